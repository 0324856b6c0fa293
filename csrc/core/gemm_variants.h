// The kernel variants that can compute a product on a GPU, and the tile shapes of each variant.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/shared/kernel_list.h"

namespace marlin {

#define MARLIN_VARIANT_NAME(name) name,
enum class GemmVariant : uint8_t { MARLIN_GEMM_VARIANTS(MARLIN_VARIANT_NAME) };
#undef MARLIN_VARIANT_NAME

#define MARLIN_VARIANT_TEXT(name) std::string_view(#name),
inline constexpr std::array kGemmVariants{MARLIN_GEMM_VARIANTS(MARLIN_VARIANT_TEXT)};
#undef MARLIN_VARIANT_TEXT

constexpr std::string_view name(GemmVariant variant) {
  return kGemmVariants[static_cast<size_t>(variant)];
}

// A variant with one of its tiles.
struct GemmTile {
  GemmVariant variant;
  Kernel kernel;
  TileShape tile;   // M x N outputs of a threadgroup, in steps of K along k; {0, 0, 0} for two_pass
  uint32_t stages;  // copies of the tile's operands in threadgroup memory
};

// Returns one row for each variant and tile, in the order of MARLIN_GEMM_VARIANTS. csrc/planner/variants.cpp lists
// them.
std::span<const GemmTile> gemm_tiles();

// Returns true if the variant rounds the decoded weight to the activations' type before it multiplies.
bool rounds_weight(GemmVariant variant);

// Returns true if the variant has kernels for moe_gemm.
bool computes_experts(GemmVariant variant);

// Returns the list of variants that moe_gemm(variant=) accepts, for example "auto, gemv or fused".
std::string expert_variants();

inline std::string name(const TileShape& tile) {
  return std::to_string(tile.M) + "x" + std::to_string(tile.N) + "x" + std::to_string(tile.K);
}

// Returns the text that selects this row in gemm(variant=): "double_buffered:128x64x16", or "two_pass".
inline std::string name(const GemmTile& row) {
  std::string text(name(row.variant));
  return row.tile == TileShape{} ? text : text + ":" + name(row.tile);
}

// Returns an error message if `stages` copies of the tile's operands exceed the threadgroup memory, or an empty text if
// they fit.
inline std::string tile_refusal(const TileShape& tile, ElementType activations, uint32_t stages) {
  const uint32_t bytes = tile_threadgroup_bytes(tile, activations, stages);
  if (bytes <= kMaxThreadgroupBytes) return "";
  return name(tile) + " in " + std::to_string(stages) + (stages == 1 ? " stage" : " stages") + " with " +
         std::string(name(activations)) + " activations needs " + std::to_string(bytes) +
         " bytes of threadgroup memory, a threadgroup has at most " + std::to_string(kMaxThreadgroupBytes);
}

// Returns true if the tile fits in threadgroup memory with activations of this type.
constexpr bool fits(const GemmTile& row, ElementType activations) {
  return row.stages == 0 || tile_threadgroup_bytes(row.tile, activations, row.stages) <= kMaxThreadgroupBytes;
}

// Returns the variant that stands before the colon of a text such as "gemv" or "double_buffered:128x64x16". Returns
// nullopt if that is not a variant, as in "auto" and "rounded". Does not check the tile.
constexpr std::optional<GemmVariant> variant_of(std::string_view text) {
  const auto found = std::ranges::find(kGemmVariants, text.substr(0, text.find(':')));
  if (found == kGemmVariants.end()) return std::nullopt;
  return static_cast<GemmVariant>(found - kGemmVariants.begin());
}

// Returns true if the text is the row's variant, with the row's tile or without a tile.
inline bool names(std::string_view text, const GemmTile& row) {
  return variant_of(text) == row.variant && (text == name(row.variant) || text == name(row));
}

// The value of gemm(variant=) as a number: "auto", "rounded", a variant, or a variant with one of its tiles. "rounded"
// is "auto" with permission to round the weight to the activations' type.
class NamedVariant {
 public:
  constexpr NamedVariant() = default;  // "auto"
  constexpr NamedVariant(GemmVariant variant) : index_(kFirstVariant + static_cast<uint32_t>(variant)) {}
  // Throws std::invalid_argument if the text is not a valid name.
  template <std::convertible_to<std::string_view> Text>
  NamedVariant(const Text& text) : NamedVariant(named(text)) {}

  // Returns nullopt if the text is not a valid name.
  static std::optional<NamedVariant> find(std::string_view text) {
    NamedVariant found;
    const auto open = std::ranges::find(kOpen, text);
    found.index_ = static_cast<uint32_t>(open - kOpen.begin());
    if (open != kOpen.end()) return found;
    if (const std::optional<GemmVariant> variant = variant_of(text); variant && text == name(*variant)) return *variant;
    const auto row = std::ranges::find_if(gemm_tiles(), [&](const GemmTile& tile) { return names(text, tile); });
    if (row == gemm_tiles().end()) return std::nullopt;
    found.index_ = kFirstTile + static_cast<uint32_t>(row - gemm_tiles().begin());
    return found;
  }

  constexpr bool operator==(const NamedVariant&) const = default;

  // Returns true for "auto" and "rounded", where the planner chooses the variant.
  constexpr bool is_open() const { return index_ < kFirstVariant; }
  constexpr bool is_rounded() const { return index_ == 1; }
  // Returns the variant without its tile, or nullopt if the planner chooses the variant.
  std::optional<GemmVariant> variant() const {
    if (is_open()) return std::nullopt;
    return has_tile() ? gemm_tiles()[index_ - kFirstTile].variant : static_cast<GemmVariant>(index_ - kFirstVariant);
  }
  // Returns true if this is the row's variant, with the row's tile or without a tile.
  bool names_row(const GemmTile& row) const {
    return variant() == row.variant && (!has_tile() || gemm_tiles()[index_ - kFirstTile].tile == row.tile);
  }
  std::string text() const {
    if (is_open()) return std::string(kOpen.at(index_));
    return has_tile() ? name(gemm_tiles()[index_ - kFirstTile]) : std::string(name(*variant()));
  }

 private:
  static constexpr std::array<std::string_view, 2> kOpen{"auto", "rounded"};
  static constexpr uint32_t kFirstVariant = kOpen.size();
  static constexpr uint32_t kFirstTile = kFirstVariant + kGemmVariants.size();

  static NamedVariant named(std::string_view text) {
    if (const auto found = find(text)) return *found;
    throw std::invalid_argument(
        "torch_marlin_metal::gemm: variant: expected auto, rounded, a variant, or a variant with one of "
        "its tiles, got '" +
        std::string(text) + "'");
  }
  constexpr bool has_tile() const { return index_ >= kFirstTile; }

  uint32_t index_ = 0;
};

// Returns true if gemm(variant=) accepts this text for activations of this type: "auto", "rounded", a variant, or a
// variant with one of its tiles. gemm can still refuse an accepted name for one problem, for example if the tile has
// more rows than M.
inline bool is_gemm_variant(std::string_view text, ElementType activations) {
  const std::optional<NamedVariant> named = NamedVariant::find(text);
  return named && (named->is_open() || std::ranges::any_of(gemm_tiles(), [&](const GemmTile& row) {
                     return fits(row, activations) && named->names_row(row);
                   }));
}

}  // namespace marlin
