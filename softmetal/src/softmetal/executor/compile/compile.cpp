// sm_compile: calls the Metal compiler (msl/, written in Python) and stores the result in a file of the cache folder,
// the memo. A repeated request reads the memo.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "compile/compiler_process.h"
#include "executor.h"
#include "random.h"

namespace softmetal {
namespace {

void append(std::string& text, const char* part) {
  text += part;
  text.push_back('\0');
}

// Returns everything that the result depends on, except the files of the compiler and of the includes.
std::string identity(const std::string& input, const std::string& python, const std::vector<std::string>& arguments) {
  std::string text;
  append(text, python.c_str());
  for (const std::string& argument : arguments)
    append(text, argument.c_str());
  append(text, input.c_str());
  return text;
}

// Returns a 128-bit hash of the text. It need not be cryptographic: the memos are the user's own files, so nobody else
// can cause a collision.
std::string fingerprint(const std::string& text) {
  uint64_t a = 1, b = 2;
  for (size_t i = 0; i < text.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min<size_t>(8, text.size() - i));
    a = mix(a ^ word);
    b = mix(b + word * 3 + a);
  }
  char hex[40];
  std::snprintf(hex, sizeof hex, "%016llx%016llx", static_cast<unsigned long long>(mix(a ^ text.size())),
                static_cast<unsigned long long>(b));
  return hex;
}

// Returns the folder softmetal/, which contains the compiler (the package msl). The environment variable SOFTMETAL_HOME
// replaces the path that the build defines.
std::string home() {
  const char* set = std::getenv("SOFTMETAL_HOME");
  return set != nullptr ? set : SOFTMETAL_HOME;
}

std::string cache_folder() {
  const char* set = std::getenv("SOFTMETAL_CACHE");
  return set != nullptr ? set : SOFTMETAL_OUTPUT "/cache";
}

std::string stamp_of(const std::string& path) {
  struct stat s;
  if (stat(path.c_str(), &s) != 0) return "gone";
  return std::to_string(s.st_mtim.tv_sec) + "." + std::to_string(s.st_mtim.tv_nsec) + "." + std::to_string(s.st_size);
}

bool read_file(const std::string& path, std::string* text) {
  FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return false;
  char part[65536];
  for (size_t n; (n = std::fread(part, 1, sizeof part, file)) > 0;)
    text->append(part, n);
  std::fclose(file);
  return true;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t start = 0; start < text.size();) {
    size_t end = std::min(text.find('\n', start), text.size());
    lines.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return lines;
}

// Reads a memo. The first line is the path of the compiled library. Each further line has the stamp and the path of a
// file from which the library was built. If no stamp has changed, the memo is valid.
bool recall(const std::string& memo, std::string* path) {
  std::string text;
  if (!read_file(memo, &text)) return false;
  std::vector<std::string> lines = lines_of(text);
  if (lines.size() < 2) return false;
  for (size_t i = 1; i < lines.size(); ++i) {
    size_t space = lines[i].find(' ');
    if (space == std::string::npos || stamp_of(lines[i].substr(space + 1)) != lines[i].substr(0, space)) return false;
  }
  *path = lines[0];
  return access(path->c_str(), R_OK) == 0;
}

void remember(const std::string& memo, const std::vector<std::string>& answer) {
  std::string text = answer[0] + "\n";
  for (size_t i = 1; i < answer.size(); ++i)
    text += stamp_of(answer[i]) + " " + answer[i] + "\n";
  // two threads may write the same memo, so each write has its own temporary file
  static std::atomic<uint64_t> written{0};
  std::string temporary = memo + "." + std::to_string(getpid()) + "." + std::to_string(++written);
  FILE* file = std::fopen(temporary.c_str(), "wb");
  if (file == nullptr) return;
  std::fwrite(text.data(), 1, text.size(), file);
  std::fclose(file);
  std::rename(temporary.c_str(), memo.c_str());
}

}  // namespace
}  // namespace softmetal

extern "C" int sm_compile(const sm_compile_request* request, char** path_or_error) {
  using namespace softmetal;
  const char* python = std::getenv("SOFTMETAL_PYTHON");
  const CompilerPlace place = {python != nullptr ? python : "python3", home()};
  const std::string input = request->source;
  std::vector<std::string> arguments = {"msl.compiler"};
  if (request->file_name != nullptr) arguments.insert(arguments.end(), {"--file-name", request->file_name});
  for (uint32_t i = 0; i < request->include_path_count; ++i) {
    arguments.insert(arguments.end(), {"--include", request->include_paths[i]});
  }
  for (uint32_t i = 0; i < request->define_count; ++i) {
    arguments.insert(arguments.end(), {"--define", request->defines[i]});
  }
  for (uint32_t i = 0; i < request->constant_count; ++i) {
    const sm_constant_value& constant = request->constants[i];
    std::string name = constant.name != nullptr ? constant.name : std::to_string(constant.index);
    arguments.insert(arguments.end(), {"--constant", name + "=" + constant.value});
  }
  if (request->language_version != 0) {
    arguments.insert(arguments.end(), {"--language-version", std::to_string(request->language_version)});
  }
  if (request->kernel != nullptr) arguments.insert(arguments.end(), {"--kernel", request->kernel});
  if (request->math != SM_MATH_SAFE) {
    arguments.insert(arguments.end(), {"--math", request->math == SM_MATH_FAST ? "fast" : "relaxed"});
  }
  if (request->fast_functions != 0) arguments.insert(arguments.end(), {"--functions", "fast"});
  const char* vary = std::getenv("SOFTMETAL_VARY");
  if (vary != nullptr && *vary != 0) arguments.insert(arguments.end(), {"--vary", vary});
  if (request->checked != 0) arguments.push_back("--checked");
  std::string memo = cache_folder() + "/" + fingerprint(identity(input, place.python, arguments)) + ".memo";
  std::string path;
  if (recall(memo, &path)) {
    *path_or_error = strdup(path.c_str());
    return 0;
  }
  // The folder with the headers of tensors is not part of the memo's name. The memo lists the headers that the source
  // includes, so a changed header makes the memo invalid.
  arguments.insert(arguments.end(), {"--include", home() + "/msl/tensor/include"});
  Answer answer = run_compiler(place, arguments, input);
  std::vector<std::string> lines = lines_of(answer.output);
  if (answer.status != 0 || lines.empty()) {
    *path_or_error = strdup(answer.errors.c_str());
    return 1;
  }
  remember(memo, lines);
  *path_or_error = strdup(lines[0].c_str());
  return 0;
}
