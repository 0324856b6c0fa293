"""MLX's kernels for the tensor units of the M5 ("NAX"): quantized, gathered and dense products by matmul2d.

In some simdgroups all rows are inside the matrix, and in others some rows are outside. The two kinds take different
branches, and both branches have barriers. Metal forbids this within a threadgroup, and the software device reports
it. M and N are therefore chosen so that no threadgroup has simdgroups of both kinds.
"""

from __future__ import annotations

from collections.abc import Iterator

from .case import FLOATS, Case, Launch
from .gathered import gathered_products
from .libraries import MLX_WITH_TENSORS, mlx_library
from .matmul import flag, steel_products
from .quantized import TYPES, Format, matrix_products
from .references import Expected, Reference, numbers, product_bound

_HEADERS = ("steel/gemm/gemm_nax.h", "quantized_utils.h", "quantized_nax.h")
_FP_HEADERS = ("steel/gemm/gemm_nax.h", "quantized_utils.h", "fp_quantized_nax.h")
_AFFINE = [Format("affine", group, bits) for group, bits in ((64, 4), (32, 4), (128, 4), (64, 8), (64, 3))]
_FP = [Format("mxfp4", 32, 4), Format("nvfp4", 16, 4), Format("mxfp8", 32, 8)]


def _name(form: Format, base: str, word: str, tile: int, end: str) -> str:
    return f"{form.mode}_{base}_nax_{word}_gs_{form.group}_b_{form.bits}_bm{tile}_bn64_bk64_wm2_wn2{end}"


def _quantized() -> Iterator[Case]:
    for name, word in TYPES.items():
        for form in (*_AFFINE, *_FP):
            headers, prefix = (_HEADERS, "affine") if form.is_affine else (_FP_HEADERS, "fp")
            for whole, tile, shape in ((True, 64, (84, 128, 128)), (False, 32, (71, 80, 256))):
                yield Case(
                    "tensor units",
                    _name(form, "qmm_t", word, tile, f"_alN_{flag(whole)}_batch_0"),
                    headers,
                    f"{prefix}_qmm_t_nax<{word}, {form.group}, {form.bits}, {flag(whole)}, false, {tile}, 64, 64, 2, 2>",
                    matrix_products(form, name, [shape], turned=True, tile=(tile, 64)),
                    wheel=MLX_WITH_TENSORS,
                )
        yield Case(
            "tensor units",
            _name(_AFFINE[0], "qmm_n", word, 64, "_batch_0"),
            _HEADERS,
            f"affine_qmm_n_nax<{word}, 64, 4, false, 64, 64, 64, 2, 2>",
            matrix_products(_AFFINE[0], name, [(84, 128, 128)], turned=False, tile=(64, 64)),
            wheel=MLX_WITH_TENSORS,
        )


def _gathered() -> Iterator[Case]:
    for name, word in TYPES.items():
        for form in (_AFFINE[0], *_FP[:2]):
            headers, prefix = (_HEADERS, "affine") if form.is_affine else (_FP_HEADERS, "fp")
            yield Case(
                "tensor units",
                _name(form, "gather_qmm_t", word, 64, "_alN_true"),
                headers,
                f"{prefix}_gather_qmm_t_nax<{word}, {form.group}, {form.bits}, true, 64, 64, 64, 2, 2>",
                gathered_products(form, name, (20, 64, 128), "qmm_t", (64, 64)),
                wheel=MLX_WITH_TENSORS,
            )


def _expected(name: str, turned: str, launch: Launch, has_source: bool) -> Expected:
    a, b, c, *_ = launch.buffers
    left, right = numbers(a, name), numbers(b, name)
    left, right = (left.T if turned[0] == "t" else left), (right.T if turned[1] == "t" else right)
    wanted = left @ right
    if has_source:  # alpha = 0.5, beta = 2 (steel_products)
        wanted = 0.5 * wanted + 2.0 * numbers(c, name)
    return Expected(launch, 3, name, wanted, product_bound(name, wanted, left, right))


def _dense(name: str, turned: str, shape: tuple[int, int, int]) -> Reference:
    tile, has_source = (64, 128, 64, 2, 4), turned == "tn"
    aligned = {f"align_{d}": s % t == 0 for d, s, t in zip("MNK", shape, tile[:3], strict=True)}
    products = steel_products(name, tile, turned, shape, has_source)
    return Reference(
        "tensor units, dense",
        f"steel_gemm_fused_nax_{turned}_{name}_{name}_" + "bm{}_bn{}_bk{}_wm{}_wn{}".format(*tile),
        lambda: mlx_library(MLX_WITH_TENSORS),
        lambda rng: [_expected(name, turned, launch, has_source) for launch in products(rng)],
        tuple({"has_batch": False, "use_out_source": has_source, "do_axpby": has_source, **aligned}.items()),
    )


def cases() -> Iterator[Case]:
    """Yields all cases of this file."""
    yield from _quantized()
    yield from _gathered()


def references() -> list[Reference]:
    """Returns the dense products, whose source the check of address spaces refuses by mistake."""
    shapes = {"nn": (80, 148, 100), "nt": (64, 128, 128), "tn": (64, 128, 64), "tt": (16, 20, 80)}
    return [_dense(name, turned, shape) for name in FLOATS for turned, shape in shapes.items()]
