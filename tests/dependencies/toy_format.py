"""Computes with a weight format that the tree in the working directory has and this package does not.

    python tests/dependencies/toy_format.py NAME COMPILER

The Python files, the kernels and the tests' reference come from the tree in the working directory, and only the
software Metal device comes from this repository. Python quantizes a weight; the kernels and the CPU's decoder compute
with weights of the reference.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [os.getcwd(), str(ROOT)]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from tests.support import reference  # noqa: E402
from tests.support.kernels import launch  # noqa: E402
from tests.support.kernels.fused import run_fused  # noqa: E402
from tests.support.kernels.problems import Inputs, Problem, check, check_dequantize, make_inputs, run_gemv  # noqa: E402
from tests.support.kernels.tiles import run_staged  # noqa: E402
from torch_marlin_metal.formats import WEIGHT_FORMATS  # noqa: E402
from torch_marlin_metal.quantize.weight import quantize_weight  # noqa: E402

# Reads K, N and the group size (int64), the words and the fp32 scales, and writes the decoded weight, fp32 [N, K].
DECODER = """
#include <cstdio>
#include <numeric>
#include <vector>
#include "csrc/weights/cpu/api.h"
using namespace marlin;
int main() {
  int64_t sizes[3];
  if (std::fread(sizes, 8, 3, stdin) != 3) return 1;
  const auto [K, N, group_size] = sizes;
  std::vector<uint32_t> words(K / 8 * N);
  std::vector<float> scales((K + group_size - 1) / group_size * N), out(K * N);
  if (std::fread(words.data(), 4, words.size(), stdin) != words.size()) return 1;
  if (std::fread(scales.data(), 4, scales.size(), stdin) != scales.size()) return 1;
  std::vector<int64_t> ids(N);
  std::iota(ids.begin(), ids.end(), 0);
  const auto type = ElementType::float32;
  const cpu::PackedWeight weight{.format = WeightFormat::FORMAT, .K = K, .N = N, .group_size = group_size,
                                 .words = words.data(), .scales = scales.data(), .scales_type = type,
                                 .zeros_type = type, .super_type = type};
  cpu::embedding({weight, nullptr, ids.data(), N, out.data(), type},
                 {1, [](int64_t count, int64_t, const cpu::Body& body) { body(0, count); }});
  return std::fwrite(out.data(), 4, out.size(), stdout) == out.size() ? 0 : 1;
}
"""


def check_cpu(name: str, compiler: str) -> None:
    """Checks that the CPU's decoder gives the reference's weights, bit for bit."""
    K, N, group_size = 200, 7, 64
    weight = reference.make_weight(name, K, N, group_size)
    Path("decoder.cpp").write_text(DECODER.replace("FORMAT", name))
    sources = ["decoder.cpp", "csrc/weights/cpu/embedding.cpp"]
    subprocess.run([compiler, "-std=c++20", "-O1", "-I.", *sources, "-o", "decoder"], check=True)
    parts = (np.array([K, N, group_size]), weight.b_packed.numpy(), weight.scales.float().numpy())
    data = b"".join(part.tobytes() for part in parts)
    out = subprocess.run([Path("decoder").resolve()], input=data, capture_output=True, check=True).stdout
    np.testing.assert_array_equal(np.frombuffer(out, np.float32).reshape(N, K).T, weight.exact)


def check_metal(name: str) -> None:
    """Checks products and dequantize on the software Metal device.

    If the offset is not a power of two, its product with an fp32 scale may be rounded. Codes equal to the offset show
    such a rounding, because their weights must be 0.
    """
    half, single = torch.float16, torch.float32
    product = Problem(name, 3, 40, 136, 32, half)
    check(product, run_gemv(product, rows=3, simdgroups=2), raw_codes=True)
    product = Problem(name, 9, 36, 136, 64, single, scales_dtype=single)
    check(product, run_fused(product, rows=16, simdgroups=1), raw_codes=False)
    codes = np.full((136, 36), reference.OFFSETS[name], np.uint8)
    zero = reference.make_weight(name, 136, 36, 64, scales_dtype=single, codes=codes)
    inputs = Inputs(make_inputs(product).a, zero, None, None)
    assert (run_fused(product, rows=16, simdgroups=1, inputs=inputs) == 0).all()
    product = Problem(name, 9, 36, 72, 32, half)
    check(product, run_staged("gemm_single_stage_64x64x32", product), raw_codes=False)
    check_dequantize(Problem(name, 1, 36, 72, 16, single, scales_dtype=single))


def check_quantize(name: str) -> None:
    """Checks that quantizing keeps every weight within half a step, if no code saturates."""
    w = torch.rand(16, 256, generator=torch.Generator().manual_seed(0)) * 2 - 1
    packed = quantize_weight(w, name, 32, scale_dtype=torch.float32)
    steps = packed.scales.repeat_interleave(32, 0)
    shifts = torch.arange(0, 32, 4).view(1, 8, 1)
    codes = (packed.b_packed.unsqueeze(1) >> shifts & 15).reshape(256, 16)
    assert codes.min() == 0 and codes.max() > 8, (codes.min(), codes.max())
    error = ((codes - reference.OFFSETS[name]) * steps - w.T).abs()
    assert (error <= 0.5001 * steps).all(), (error / steps).max()


def main() -> None:
    name, compiler = sys.argv[1:]
    for module in (sys.modules["torch_marlin_metal"], reference, launch):
        assert Path(module.__file__).is_relative_to(Path.cwd()), f"{module.__file__} is not the copy's"
    assert name in WEIGHT_FORMATS and name in reference.FORMATS
    check_quantize(name)
    check_cpu(name, compiler)
    check_metal(name)
    print(f"{name}: quantized, decoded and multiplied")


if __name__ == "__main__":
    main()
