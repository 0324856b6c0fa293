"""The package advises the system to use huge pages for large packed weights, but not for memory beside them."""

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import torch_marlin_metal as tmm
from torch_marlin_metal.checkpoints.files.safetensors import read_header, read_tensor
from torch_marlin_metal.extension import native

HUGE_PAGE = 2 << 20
K, N = 4096, 2048  # 4 MB of words contain at least one huge page at any address

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no transparent huge pages"
)


def advised_ranges() -> list[tuple[int, int]]:
    """Returns the address ranges of this process with the flag hg, which MADV_HUGEPAGE sets (proc_pid_smaps(5))."""
    found, here = [], (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(address, 16) for address in first.split("-"))
            here = (begin, end)
        elif first == "VmFlags:" and "hg" in rest:
            found.append(here)
    return found


def words() -> Tensor:
    return torch.zeros(K // 8, N, dtype=torch.int32)


def loaded(folder: Path) -> Tensor:
    save_file({"words": words()}, folder / "a.safetensors")
    return read_tensor(read_header(folder / "a.safetensors")[0]["words"])


SOURCES: dict[str, Callable[[Path], Tensor]] = {
    "gptq_repack": lambda _: tmm.ops.gptq_repack(words(), perm=torch.randperm(K, dtype=torch.int32)),
    "awq_repack": lambda _: tmm.ops.awq_repack(torch.zeros(K, N // 8, dtype=torch.int32)),
    "transpose_words": lambda _: tmm.ops.transpose_words(words()),
    "quantize_weight": lambda _: tmm.quantize_weight(torch.ones(N, K)).b_packed,
    "an empty layer": lambda _: tmm.MarlinLinear(K, N).b_packed,
    "a file": loaded,
}


# Keeps each weight alive. Freed memory keeps its advice, so another weight in that memory would seem to be advised.
kept: list[Tensor] = []


@pytest.mark.parametrize("source", SOURCES)
def test_the_words_of_a_large_weight_are_advised(source: str, tmp_path: Path) -> None:
    b_packed = SOURCES[source](tmp_path)
    kept.append(b_packed)
    assert b_packed.nbytes == K * N // 2
    middle = b_packed.data_ptr() + b_packed.nbytes // 2
    assert any(begin <= middle < end for begin, end in advised_ranges())


@pytest.mark.parametrize(("offset", "size"), [(4096, 3), (HUGE_PAGE, 2), (64, 1)])
def test_only_whole_huge_pages_inside_are_advised(offset: int, size: int) -> None:
    with mmap.mmap(-1, 6 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        first = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(first)
        del first
        begin = base + (-base) % HUGE_PAGE + offset
        end = begin + size * HUGE_PAGE
        native.prefer_huge_pages(begin, size * HUGE_PAGE)
        whole = (begin + (-begin) % HUGE_PAGE, end - end % HUGE_PAGE)
        inside = [place for place in advised_ranges() if base <= place[0] < base + 6 * HUGE_PAGE]
        assert inside == ([whole] if whole[0] < whole[1] else [])
