"""Tests torch.mps.load_metallib with a library that Apple's compiler made. PyTorch loads it through newLibraryWithData:
and newLibraryWithURL:.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import softmetal
from softmetal.proof import libraries


@pytest.fixture(scope="module")
def metallib() -> Path:
    wheels = libraries.wheels
    if not wheels.is_cached("mlx-metal"):
        pytest.skip(
            f"{wheels.WHEELS['mlx-metal'].filename} is not in .cache/wheels; `python -m softmetal.proof` fetches it"
        )
    return libraries.mlx_library()


def test_a_kernel_runs_from_a_path(metallib: Path) -> None:
    library = torch.mps.load_metallib(metallib)
    a, b = torch.arange(7.0, device="mps"), torch.full((7,), 0.5, device="mps")
    c = torch.zeros(7, device="mps")
    assert "vv_Addfloat32" in dir(library)
    with softmetal.checked():
        library.vv_Addfloat32(a, b, c, 7, arg_casts={3: "int32"})
    assert c.tolist() == [i + 0.5 for i in range(7)]


def test_a_kernel_runs_from_bytes(metallib: Path) -> None:
    library = torch.mps.load_metallib(metallib.read_bytes())
    kernel = library.steel_gemm_splitk_nn_float32_float32_bm16_bn16_bk16_wm2_wn2_MN_taligned_K_taligned
    assert kernel.max_threads_per_threadgroup == 128
    assert kernel.static_thread_group_memory_length > 2048


def test_checked_mode_names_the_argument(metallib: Path) -> None:
    library = torch.mps.load_metallib(metallib)
    a, c = torch.zeros(4, device="mps"), torch.zeros(7, device="mps")
    # Three threads read beyond the end. The seed determines which of them runs first.
    report = r"out-of-bounds read of 4 bytes: buffer 1 \+ (16|20|24) \(b.*kernel 'vv_Addfloat32'"
    with pytest.raises(RuntimeError, match=report), softmetal.checked():
        library.vv_Addfloat32(c, a, c.clone(), 7, arg_casts={3: "int32"})
    softmetal.faults()


def test_what_cannot_be_read_is_refused(tmp_path: Path, metallib: Path) -> None:
    with pytest.raises(RuntimeError, match="expected a metallib, got 5 bytes that begin b'hell'"):
        torch.mps.load_metallib(b"hello")
    with pytest.raises(RuntimeError, match="No such file"):
        torch.mps.load_metallib(tmp_path / "absent.metallib")
    with pytest.raises(RuntimeError, match=r"expected .* bytes, got 1000"):
        torch.mps.load_metallib(metallib.read_bytes()[:1000])
    library = torch.mps.load_metallib(metallib)
    with pytest.raises(RuntimeError, match=r"function constants without a value: 'has_batch' \(10\)"):
        _ = library.steel_gemm_fused_nn_float32_float32_bm32_bn32_bk16_wm2_wn2
