"""Deliberate mistakes in our MSL headers and compiler flags. With each, some kernel must differ from Apple's form."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..msl import compiler


@dataclass(frozen=True)
class Mistake:
    """One change of a header or of the compiler's flags, and a kernel that must show the change."""

    name: str
    kernel: str
    before: str
    after: str
    header: str = ""  # "": the flags


MISTAKES = (
    Mistake("bfloat conversion rounds ties away from zero", "vn_copyfloat32bfloat16", "0x7fffu + ((x >> 16) & 1u)",
            "0x8000u", "softmetal/bfloat.h"),
    Mistake("simd_shuffle_down takes the lane after", "gemv_float32_bm4_bn1_sm1_sn32_tm4_tn4_nc0_axpby0",
            "lane + by < 32 ? lane + by : lane", "lane + by < 31 ? lane + by + 1 : lane", "metal_simdgroup"),
    Mistake("-ffp-contract=fast", "affine_qmv_fast_float_gs_64_b_4_batch_0_pr_0_hgs_0_r_4", "-ffp-contract=on",
            "-ffp-contract=fast"),
    Mistake("precise:: of half stays half", "vn_Sigmoidfloat16float16", "precise_mode, singles", "precise_mode, floats",
            "metal_math"),
    Mistake("half keeps excess precision", "affine_dequantize_float16_t_gs_64_b_4", "-ffloat16-excess-precision=none",
            "-ffloat16-excess-precision=fast"),
    Mistake("float to integer wraps", "vn_copyfloat32int8", "-fno-strict-float-cast-overflow",
            "-fstrict-float-cast-overflow"),
    Mistake("vectors are not contracted", "dot_product_float32_it32_tg512_sg16", "product_plus, p.a[i] * p.b[i] + c[i]",
            "product_plus, (p.a * p.b)[i] + c[i]", "softmetal/contraction.h"),
)  # fmt: skip


@contextlib.contextmanager
def mistaken(mistake: Mistake | None) -> Iterator[None]:
    """Makes the mistake in every compile of Metal source in a `with` block. None means no mistake.

    Raises:
        ValueError: the text that the mistake replaces does not exist.
    """
    if mistake is None:
        yield
        return
    include, flags = compiler._INCLUDE, list(compiler._COMPILE)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if mistake.header:
                copy = Path(folder) / "msl" / "include"
                shutil.copytree(include, copy)
                # metal_config includes executor/abi.h.
                (Path(folder) / "executor").symlink_to(include.parents[1] / "executor")
                header = copy / mistake.header
                header.write_text(_replaced(header.read_text(), mistake))
                compiler._INCLUDE = copy
            else:
                changed = _replaced("\n".join(flags), mistake).split("\n")
                compiler._COMPILE[:] = changed
            _forget()
            yield
        finally:
            compiler._INCLUDE = include
            compiler._COMPILE[:] = flags
            _forget()


def _replaced(text: str, mistake: Mistake) -> str:
    if mistake.before not in text:
        raise ValueError(f"{mistake.name}: {mistake.before!r} is not in {mistake.header or 'the flags'}")
    return text.replace(mistake.before, mistake.after)


def _forget() -> None:
    compiler.toolchain_digest.cache_clear()
    compiler._stubs.cache_clear()
