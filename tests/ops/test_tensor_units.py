"""variant="tensor" of gemm and moe_gemm on a GPU with tensor units: values, conditions, and failing compiles.

Each test that needs an M5 runs in a separate process, because a process queries the GPU's family only once.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support import reference
from tests.support.experts import make_experts, moe_gemm
from tests.support.experts import run as run_experts
from tests.support.programs import run_python
from tests.support.reference import random
from torch_marlin_metal.extension import native

OPS = torch.ops.torch_marlin_metal

ROOT = Path(__file__).resolve().parents[2]
M5 = {"SOFTMETAL_FAMILY": "10"}
ROWS = (1, 33, 67)
FORMATS = [name for name in reference.FORMATS if name != "lut4"]
DTYPES = (torch.float16, torch.bfloat16)
LAYOUT = "the tensor units of this GPU hold the sums of bfloat16 in an unknown layout: element 0 of lane 0 is in row 2, column 5"
PROBLEMS = {
    "gemm_tensor": "kernel gemm_tensor_uint4b8_float16 (gemm/tensor.metal) does not compile: no such type",
    "moe_tensor": "kernel moe_tensor_uint4b8_float16 (experts/moe_tensor.metal) does not compile: no such type",
}
WARNING = "torch_marlin_metal: products use the other kernels, because "
pytestmark = [
    pytest.mark.usefixtures("mps"),
    pytest.mark.skipif(sys.platform == "darwin", reason="makes the software Metal device an M5"),
]


def run(a: torch.Tensor, weight: reference.Weight, **options) -> torch.Tensor:
    return OPS.gemm(a, weight.b_packed, weight.scales, **{**weight.arguments, **options})


def kernels() -> list[str]:
    """Returns the kernels that ran since the last call, after checking that checked mode found no fault."""
    import softmetal

    torch.mps.synchronize()
    ran = [record.kernel for record in softmetal.counters()]
    assert softmetal.faults() == []  # this call also clears the counters
    return ran


def dtypes_in_turn(turn: int, whole: bool) -> tuple[torch.dtype, ...]:
    return DTYPES if whole else (DTYPES[turn % 2],)


def check_products(
    K: int, N: int, group_sizes: tuple[int, ...], rows: tuple[int, ...], whole: bool, step: int = 1
) -> None:
    """Multiplies in every format of tensor units.

    Dtypes, group sizes and options are used in turn; with `whole`, all dtypes run. Without `whole`, only every
    `step`-th format of the list runs.
    """
    import softmetal

    formats: list[tuple[str, dict[str, torch.dtype]]] = [(name, {}) for name in FORMATS]
    codes = {"scales_dtype": torch.uint8, "super_dtype": torch.float16}
    formats += [("uint4_bias", codes | {"zeros_dtype": torch.uint8}), ("uint4b8", codes)]
    floats = (torch.bfloat16, torch.float32)
    formats += [(name, {"zeros_dtype": dtype}) for name in ("uint4", "uint4_bias") for dtype in floats]
    kernels()
    for turn, (weight_format, options) in list(enumerate(formats))[:: 1 if whole else step]:
        for i, dtype in enumerate(dtypes_in_turn(turn, whole)):
            group_size = group_sizes[(turn + i) % len(group_sizes)]
            weight = reference.make_weight(weight_format, K, N, group_size, seed=turn, **options)
            generator = torch.Generator().manual_seed(turn)
            a = torch.randn(max(rows), K, generator=generator).to(dtype)
            bias = torch.randn(N, generator=generator).to(dtype) if turn % 2 else None
            perm = torch.randperm(K, generator=generator).to(torch.int32) if turn % 3 == 1 else None
            order = None if perm is None else perm.numpy()
            exact, bound = reference.gemm(a, weight, bias, order, raw_codes=False)
            moved = weight.to("mps")
            given = {name: t.to("mps") for name, t in (("bias", bias), ("perm", perm)) if t is not None}
            for M in rows:
                tile = f"{64 if M > 32 and turn % 2 else 32}x{(64, 128)[(turn + i) % 3 % 2]}x32"
                variant = f"tensor:{tile}" if max(rows) != M or turn % 3 else "tensor"
                result = run(a[:M].to("mps"), moved, variant=variant, **given)
                reference.check_gemm(result, exact[:M], bound[:M])
                if not softmetal.is_checked():  # in checked mode, each launch has another order of sums
                    again = run(a[:M].to("mps"), moved, variant=variant, **given)
                    assert torch.equal(result.cpu(), again.cpu()), "same inputs, same bits"
                assert f"gemm_tensor_{weight_format}_{str(dtype)[6:]}" in kernels()


def check_mixtures(K: int, N: int, group_sizes: tuple[int, ...], ids: torch.Tensor, whole: bool, step: int = 1) -> None:
    """Multiplies with experts in every format of tensor units. Dtypes, group sizes and options are used in turn."""
    import softmetal

    kernels()
    for turn, weight_format in list(enumerate(FORMATS))[:: 1 if whole else step]:
        group_size = group_sizes[turn % len(group_sizes)]
        scale = {"global_scale_shape": (-1,)} if weight_format == "nvfp4" else {}
        experts = make_experts(weight_format, 3, K, N, group_size, use_perm=turn % 2 == 1, **scale)
        options = {"bias": random(3, N, seed=1)} if turn % 3 != 1 else {}
        options |= {"row_weights": random(*ids.shape, seed=2).abs(), "reduce": turn % 4 < 2} if turn % 3 != 0 else {}
        for dtype in dtypes_in_turn(turn, whole):
            a = random(*(ids.shape if turn % 2 else ids.shape[:1]), K, dtype=dtype)
            got = run_experts(a, experts, ids, "mps", variant="tensor", **options)
            exact, bound = moe_gemm(a, experts, ids, raw_codes=False, **options)
            reference.check_gemm(got, exact, bound)
            assert f"moe_tensor_{weight_format}_{str(dtype)[6:]}" in kernels()
            if not softmetal.is_checked():  # in checked mode, each launch has another order of sums
                again = run_experts(a, experts, ids, "mps", variant="tensor", **options)
                assert torch.equal(got, again), "same inputs, same bits"
                kernels()


def every_format_in_checked_mode(whole: bool) -> None:
    check_products(200, 70, (16, 32, 64), ROWS, whole)
    check_mixtures(200, 70, (16, 32, 64), torch.tensor([[1, 0]] * 3 + [[1, -1]] * 33), whole)


def formats_in_fast_mode(whole: bool) -> None:
    check_products(1096, 328, (16, 64, 128, 256), (5, 130), whole, step=3)
    check_mixtures(520, 200, (64, 16, 256), torch.tensor([[1, 0]] * 70 + [[2, 7]] * 5), whole, step=3)


def product(dtype: torch.dtype, M: int = 33, N: int = 70, K: int = 200, **options) -> list[str]:
    """Multiplies, checks the values and returns the kernels."""
    weight = reference.make_weight("uint4b8", K, N, 32)
    a = random(M, K, dtype=dtype, seed=M)
    exact, bound = reference.gemm(a, weight, raw_codes=False)
    kernels()
    reference.check_gemm(run(a.to("mps"), weight.to("mps"), **options), exact, bound)
    return kernels()


def mixture(dtype: torch.dtype, T: int = 33, N: int = 70, K: int = 200, **options) -> list[str]:
    """Multiplies with three experts, checks the values and returns the kernels."""
    experts = make_experts("uint4b8", 3, K, N, 32)
    a, ids = random(T, K, dtype=dtype), torch.arange(2 * T).reshape(T, 2) % 3
    exact, bound = moe_gemm(a, experts, ids, raw_codes=False)
    kernels()
    reference.check_gemm(run_experts(a, experts, ids, "mps", **options), exact, bound)
    return kernels()


@contextmanager
def auto_takes_tensor(problem: str | None, kind: str, kernel: str = "gemm_tensor") -> Iterator[list]:
    """Makes auto prefer tensor, and makes one kind of compile fail with `problem`. Yields the compiles of `kernel`."""
    import softmetal

    native.set_tuned([("uint4b8", str(d)[6:], 32, 200, 70, 1, 1000, "tensor") for d in reference.DTYPES])
    compiled: list = []

    def answer(compile) -> str | None:
        if compile.kind != kind or kernel not in compile.text:
            return None
        compiled.append(compile)
        return problem

    with softmetal.compiles(answer):
        yield compiled


def check_fallback(kind: str) -> None:
    """For all dtypes, auto uses other kernels, and a product that names the kernel raises the error."""
    with auto_takes_tensor("no such type", kind) as compiled:
        for dtype in (torch.float16, torch.bfloat16, torch.float16):
            for M in (33, 40):
                assert not [name for name in product(dtype, M) if "tensor" in name]
        assert len(compiled) == 1, "a failure is remembered, and other types are not tried"
        with pytest.raises(RuntimeError, match=f"^torch_marlin_metal: {re.escape(PROBLEMS['gemm_tensor'])}"):
            product(torch.float16, variant="tensor")
        assert not [name for name in mixture(torch.float16) if "tensor" in name]
    assert "gemm_tensor_uint4b8_bfloat16" in product(torch.bfloat16, variant="tensor"), "this function compiles"


def a_library_that_fails(whole: bool) -> None:
    # An interruption does not mean that the kernel is wrong, so it is an error and the next product compiles again.
    interrupted = "Compiler encountered XPC_ERROR_CONNECTION_INTERRUPTED (is the OS shutting down?)"
    with (
        auto_takes_tensor(interrupted, "library"),
        pytest.raises(RuntimeError, match="XPC_ERROR_CONNECTION_INTERRUPTED"),
    ):
        product(torch.float16)
    check_fallback("library")


def a_pipeline_that_fails(whole: bool) -> None:
    check_fallback("pipeline")


def a_mixture_that_fails(whole: bool) -> None:
    """After one failure, neither mixtures nor products use a kernel for tensor units."""
    with auto_takes_tensor("no such type", "library", "moe_tensor") as compiled:
        for T in (33, 40):
            assert not [name for name in mixture(torch.float16, T) if "tensor" in name]
        assert len(compiled) == 1
        with pytest.raises(RuntimeError, match=f"^torch_marlin_metal: {re.escape(PROBLEMS['moe_tensor'])}"):
            mixture(torch.float16, variant="tensor")
        assert not [name for name in product(torch.float16) if "tensor" in name]
    assert "moe_tensor_uint4b8_bfloat16" in mixture(torch.bfloat16, variant="tensor"), "this function compiles"


def a_library_that_compiles(whole: bool) -> None:
    for kernel, multiply in (("gemm_tensor", product), ("moe_tensor", mixture)):
        with auto_takes_tensor(None, "library", kernel) as compiled:
            assert f"{kernel}_uint4b8_float16" in multiply(torch.float16)
        assert len(compiled) == 1
    native.set_tuned([])
    assert not [name for name in mixture(torch.float16) if "tensor" in name]


def another_layout(whole: bool) -> None:
    """If the GPU stores one kind of matrix in another layout, tensor units are not used, although every kernel
    compiles.
    """
    with auto_takes_tensor(None, "library", "probe_tensor_layout(") as compiled:
        for dtype in (torch.float16, torch.bfloat16):
            assert not [name for name in product(dtype) if "gemm_tensor" in name]
        for multiply in (product, mixture):
            with pytest.raises(RuntimeError, match=f"^torch_marlin_metal: {re.escape(LAYOUT)}"):
                multiply(torch.float16, variant="tensor")
        assert not [name for name in mixture(torch.float16) if "tensor" in name]
    assert len(compiled) == 1, "the probe runs once"


def other_operands(whole: bool) -> None:
    """Floats and lut4 have no kernel for tensor units. For them, a tuning table that names the variant is ignored."""
    weights = {name: reference.make_weight(name, 200, 70, 32).to("mps") for name in ("uint4b8", "lut4")}
    experts = {name: make_experts(name, 3, 200, 70, 32) for name in weights}
    units = r"\(tensor units multiply float16 and bfloat16 activations by weights without a lut\)"
    with auto_takes_tensor(None, "library") as compiled:
        native.set_tuned([(name, "float32", 32, 200, 70, 1, 1000, "tensor") for name in weights])
        for name, dtype in (("uint4b8", torch.float32), ("lut4", torch.float32), ("lut4", torch.float16)):
            a = random(33, 200, dtype=dtype)
            what = f"{str(dtype)[6:]} activations by {name} weights {units}"
            for variant in ("tensor", "tensor:32x64x32"):
                text = f"gemm: variant: expected one that multiplies {what}, got '{variant}'"
                with pytest.raises(ValueError, match=text):
                    run(a.to("mps"), weights[name], variant=variant)
            with pytest.raises(
                ValueError, match=f"moe_gemm: variant: expected one that multiplies {what}, got 'tensor'"
            ):
                run_experts(a, experts[name], torch.zeros(33, 1, dtype=torch.int64), "mps", variant="tensor")
        for multiply in (product, mixture):
            assert not [name for name in multiply(torch.float32) if "tensor" in name]
    assert compiled == []


def auto_by_the_estimate(whole: bool) -> None:
    """Without a tuning table, auto uses tensor units for nine rows of a product or expert, but never for fp32."""
    assert "gemm_tensor_uint4b8_bfloat16" in product(torch.bfloat16, 9, N=4096, K=1024)
    assert "moe_tensor_uint4b8_bfloat16" in mixture(torch.bfloat16, 14, N=1024, K=512)  # 9 or 10 rows for each expert
    assert product(torch.float32, 16, N=2048, K=512) == ["gemm_fused_uint4b8_float32"]
    if whole:  # this kernel takes seconds to compile
        assert mixture(torch.float32, 14, N=1024, K=512) == ["moe_sort", "moe_fused_uint4b8_float32"]


def an_older_system(whole: bool) -> None:
    """On an older macOS the kernel is not compiled, and a product that names it raises an error."""
    with auto_takes_tensor(None, "library") as compiled:
        assert not [name for name in product(torch.float16) if "tensor" in name]
        for variant in ("tensor", "tensor:64x64x32"):
            expected = rf"gemm: variant: expected .*needs macOS 26\.2, and this is macOS 15\.6.*, got '{variant}'"
            with pytest.raises(ValueError, match=expected):
                product(torch.float16, variant=variant)
        with pytest.raises(ValueError, match=r"moe_gemm: variant: expected .*needs macOS 26\.2, .*, got 'tensor'"):
            mixture(torch.float16, variant="tensor")
        assert not [name for name in mixture(torch.float16) if "tensor" in name]
    assert compiled == []


SCENARIOS: dict[Callable[[bool], None], dict[str, str]] = {
    every_format_in_checked_mode: {"SOFTMETAL_CHECKED": "1"},
    formats_in_fast_mode: {"SOFTMETAL_CHECKED": "0"},
    a_library_that_fails: {"SOFTMETAL_CHECKED": "0"},
    a_pipeline_that_fails: {"SOFTMETAL_CHECKED": "0"},
    a_mixture_that_fails: {"SOFTMETAL_CHECKED": "0"},
    a_library_that_compiles: {"SOFTMETAL_CHECKED": "0"},
    another_layout: {"SOFTMETAL_CHECKED": "0", "SOFTMETAL_FOREIGN_TENSORS": str(1 << 5)},
    other_operands: {"SOFTMETAL_CHECKED": "0"},
    auto_by_the_estimate: {"SOFTMETAL_CHECKED": "0", "TORCH_MARLIN_METAL_GPU": "M5"},
    an_older_system: {"SOFTMETAL_CHECKED": "0", "SOFTMETAL_MACOS": "15.6"},
}


def run_scenario(name: str, whole: bool) -> None:
    failure = ""
    try:
        next(scenario for scenario in SCENARIOS if scenario.__name__ == name)(whole)
    except BaseException:
        failure = traceback.format_exc()
    print(json.dumps(failure))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.whole if name == "every_format_in_checked_mode" else ())
        for name in (scenario.__name__ for scenario in SCENARIOS)
    ],
)
def test_on_an_m5(name: str, everything: bool) -> None:
    environment = next(environment for scenario, environment in SCENARIOS.items() if scenario.__name__ == name)
    script = f"from tests.ops import test_tensor_units as t\nt.run_scenario({name!r}, {everything})"
    done = run_python("-c", script, cwd=ROOT, env={**os.environ, **M5, **environment}, mps=True)
    assert done.returncode == 0, done.stderr
    assert (failure := json.loads(done.stdout.splitlines()[-1])) == "", failure
    problem = LAYOUT if name == "another_layout" else PROBLEMS["moe_tensor" if "mixture" in name else "gemm_tensor"]
    warnings = done.stderr.count(WARNING + problem)
    falls_back = name.endswith("that_fails") or name == "another_layout"
    assert warnings == done.stderr.count("the other kernels") == falls_back


def test_an_m1_refuses_the_variant() -> None:
    expected = (
        r"torch_marlin_metal::gemm: variant: expected .*Apple10.*, and this GPU is of family Apple7.*, got 'tensor'"
    )
    with pytest.raises(ValueError, match=expected):
        product(torch.float16, variant="tensor")
    with pytest.raises(ValueError, match=expected.replace("gemm", "moe_gemm", 1)):
        mixture(torch.float16, variant="tensor")
    assert not [name for name in product(torch.float16) if "tensor" in name]
