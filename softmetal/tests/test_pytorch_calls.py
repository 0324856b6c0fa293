"""Tests how pytorch_calls reads the calls in a Mac library: a library that the test builds, and PyTorch's if it is
cached.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from softmetal.apple import pytorch_calls, wheels

TOOLS = ("clang++-19", "ld64.lld-19", "llvm-objdump-19", "llvm-nm-19", "llvm-cxxfilt-19")
missing = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")

# Imitates PyTorch's stream. Like code from Apple's clang, this code sends a message through a stub that names the
# selector. It also calls one of its own functions and an imported function, and makes a tail call.
SOURCE = """
struct Buffer;
void endEncoding(Buffer*) asm("_objc_msgSend$endEncoding");
void commit(Buffer*) asm("_objc_msgSend$commit");
void waitUntilCompleted(Buffer*) asm("_objc_msgSend$waitUntilCompleted");
extern "C" void imported(int);
namespace at::mps {
enum class SyncType { NONE, COMMIT };
struct MPSStream {
  Buffer* buffer;
  void synchronize(SyncType type);
  void commit();
  void unrelated();
};
void MPSStream::unrelated() { waitUntilCompleted(buffer); }
void MPSStream::commit() { ::commit(buffer); imported(1); imported(2); }
void MPSStream::synchronize(SyncType type) {
  endEncoding(buffer);
  if (type == SyncType::COMMIT) commit();
}
}  // namespace at::mps
"""
EXPECTED = {
    "at::mps::MPSStream::commit()": ["-[commit]", "_imported", "_imported"],
    "at::mps::MPSStream::synchronize(at::mps::SyncType)": ["-[endEncoding]", "at::mps::MPSStream::commit()"],
}


def build(folder: Path, source: str) -> Path:
    (folder / "stream.cpp").write_text(source)
    compile_it = [TOOLS[0], "-target", "arm64-apple-macos14", "-std=c++20", "-O1", "-fno-inline", "-fno-exceptions"]
    subprocess.run([*compile_it, "-c", "stream.cpp", "-o", "stream.o"], cwd=folder, check=True)
    link = [TOOLS[1], "-dylib", "-arch", "arm64", "-platform_version", "macos", "14.0", "14.0"]
    link += ["-undefined", "dynamic_lookup", "-o", "stream.dylib", "stream.o"]
    subprocess.run(link, cwd=folder, check=True)
    return folder / "stream.dylib"


def test_calls_are_read_in_order_by_name(tmp_path: Path) -> None:
    assert pytorch_calls.call_lists(build(tmp_path, SOURCE)) == EXPECTED


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("::commit(buffer); ", "::commit(buffer); waitUntilCompleted(buffer); ", "+    -[waitUntilCompleted]"),
        ("  endEncoding(buffer);\n", "", "-    -[endEncoding]"),
        ("imported(1); imported(2)", "imported(1)", "-    _imported"),
        ("void synchronize(SyncType type);", "void synchronize(SyncType type, bool);", "SyncType, bool)"),
    ],
)
def test_a_changed_function_is_an_error_that_shows_it(tmp_path: Path, before: str, after: str, shown: str) -> None:
    changed = SOURCE.replace(before, after)
    if "bool" in after:
        changed = changed.replace("synchronize(SyncType type) {", "synchronize(SyncType type, bool) {")
    assert changed != SOURCE
    found = pytorch_calls.call_lists(build(tmp_path, changed))
    with pytest.raises(
        pytorch_calls.CallsChanged, match=r"torch 9\.9\.9: functions that the device imitates"
    ) as raised:
        pytorch_calls.compare("9.9.9", found, EXPECTED)
    assert shown in str(raised.value)


def test_a_library_without_the_functions_is_an_error(tmp_path: Path) -> None:
    empty = build(tmp_path, "namespace at::mps { void other() {} }")
    with pytest.raises(pytorch_calls.CallsChanged, match="defines none of the functions"):
        pytorch_calls.call_lists(empty)


def test_every_supported_torch_is_stored() -> None:
    stored = pytorch_calls.stored_lists()
    assert list(stored) == list(pytorch_calls.WHEEL_OF)
    for lists in stored.values():
        # The device and extensions rely on three facts: synchronize ends the encoder even with SyncType::NONE,
        # commandEncoder never commits, and endProfileKernel calls synchronize.
        synchronize = lists["at::mps::MPSStream::synchronize(at::mps::SyncType)"]
        assert synchronize[:2] == ["-[endEncoding]", "_objc_release"]
        assert "-[commit]" not in lists["at::mps::MPSStream::commandEncoder()"]
        ends = [calls for name, calls in lists.items() if "::endProfileKernel" in name]
        assert any(calls[-1] == "at::mps::MPSStream::synchronize(at::mps::SyncType)" for calls in ends)


def test_pytorch_of_the_cache_is_as_stored() -> None:
    wheel = pytorch_calls.WHEEL_OF[pytorch_calls.PINNED]
    if not wheels.is_cached(wheel):
        pytest.skip("no torch for the Mac in the cache: `make macos` fetches it")
    stored = pytorch_calls.stored_lists()[pytorch_calls.PINNED]
    found = pytorch_calls.call_lists(wheels.unpack(wheel) / "torch" / "lib" / "libtorch_cpu.dylib")
    pytorch_calls.compare(pytorch_calls.PINNED, found, stored)
    stored["at::mps::MPSStream::commandEncoder()"].insert(0, "-[commit]")
    with pytest.raises(pytorch_calls.CallsChanged, match=r"-    -\[commit\]"):
        pytorch_calls.compare(pytorch_calls.PINNED, found, stored)
