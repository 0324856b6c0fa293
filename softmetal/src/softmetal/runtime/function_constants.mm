#include "function_constants.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <map>

namespace softmetal {
namespace {

using Constants = std::vector<Program::Constant>;

Constants& values_of(MTLFunctionConstantValues* values) {
  return *static_cast<Constants*>(values->_state);
}

std::string constant_text(const void* value, MTLDataType type) {
  const auto integer = [value](auto sample) {
    std::memcpy(&sample, value, sizeof sample);
    return std::to_string(sample);
  };
  switch (type) {
    case MTLDataTypeBool:
      return *static_cast<const uint8_t*>(value) != 0 ? "true" : "false";
    case MTLDataTypeChar:
      return integer(int8_t{});
    case MTLDataTypeUChar:
      return integer(uint8_t{});
    case MTLDataTypeShort:
      return integer(int16_t{});
    case MTLDataTypeUShort:
      return integer(uint16_t{});
    case MTLDataTypeInt:
      return integer(int32_t{});
    case MTLDataTypeUInt:
      return integer(uint32_t{});
    case MTLDataTypeLong:
      return integer(int64_t{});
    case MTLDataTypeULong:
      return integer(uint64_t{});
    case MTLDataTypeFloat:
    case MTLDataTypeHalf: {
      float number = 0;
      if (type == MTLDataTypeFloat) {
        std::memcpy(&number, value, sizeof number);
      } else {
        _Float16 half;
        std::memcpy(&half, value, sizeof half);
        number = static_cast<float>(half);
      }
      std::array<char, 40> text;
      std::snprintf(text.data(), text.size(), "%a", static_cast<double>(number));
      return text.data();
    }
  }
  violation("function constant type", "setConstantValue: type ", static_cast<NSUInteger>(type),
            " is not supported here");
}

const char* type_name(MTLDataType type) {
  switch (type) {
    case MTLDataTypeBool:
      return "bool";
    case MTLDataTypeChar:
      return "char";
    case MTLDataTypeUChar:
      return "uchar";
    case MTLDataTypeShort:
      return "short";
    case MTLDataTypeUShort:
      return "ushort";
    case MTLDataTypeInt:
      return "int";
    case MTLDataTypeUInt:
      return "uint";
    case MTLDataTypeLong:
      return "long";
    case MTLDataTypeULong:
      return "ulong";
    case MTLDataTypeFloat:
      return "float";
    case MTLDataTypeHalf:
      return "half";
  }
  return "";
}

// Returns the short name of a scalar type, because MSL has several names for most scalar types.
std::string short_type(std::string type) {
  static const std::map<std::string, std::string> names = {
      {"unsigned", "uint"},       {"unsigned int", "uint"}, {"uint32_t", "uint"}, {"int32_t", "int"},
      {"unsigned char", "uchar"}, {"uint8_t", "uchar"},     {"int8_t", "char"},   {"unsigned short", "ushort"},
      {"uint16_t", "ushort"},     {"int16_t", "short"},     {"size_t", "ulong"},  {"uint64_t", "ulong"},
      {"unsigned long", "ulong"}, {"int64_t", "long"}};
  const auto found = names.find(type);
  return found == names.end() ? type : found->second;
}

}  // namespace

const std::vector<Program::Constant>& constants_of(MTLFunctionConstantValues* values) {
  return values_of(values);
}

std::string wrong_type(const sm_library* library, const std::vector<Program::Constant>& values) {
  const std::array<std::string, 11> scalars = {"bool", "char", "uchar", "short", "ushort", "int",
                                               "uint", "long", "ulong", "float", "half"};
  for (uint32_t i = 0; i < sm_library_constant_count(library); ++i) {
    const sm_function_constant& declared = *sm_library_constant(library, i);
    const std::string type = short_type(declared.type);
    if (std::find(scalars.begin(), scalars.end(), type) == scalars.end())
      continue;  // enums and vectors are not checked
    for (const Program::Constant& value : values) {
      const bool same = value.name.empty() ? value.index == declared.index : value.name == declared.name;
      if (same && value.type != type) {
        return std::string("function constant '") + declared.name + "' [[function_constant(" +
               std::to_string(declared.index) + ")]] has the type " + type + ", its value was set as " + value.type;
      }
    }
  }
  return "";
}

}  // namespace softmetal

@implementation MTLFunctionConstantValues
- (id)init {
  _state = new std::vector<softmetal::Program::Constant>();
  return self;
}
- (void)dealloc {
  delete &softmetal::values_of(self);
  [super dealloc];
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  softmetal::values_of(self).push_back(
      {"", static_cast<uint32_t>(index), softmetal::constant_text(value, type), softmetal::type_name(type)});
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name {
  softmetal::values_of(self).push_back(
      {[name UTF8String], 0, softmetal::constant_text(value, type), softmetal::type_name(type)});
}
@end
