"""Tests that a broken rule of Metal raises an error with the rule's name, and that correct host code runs."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import softmetal
from softmetal import build

VIOLATIONS = {
    "second encoder": r"\[one open encoder\]: computeCommandEncoder: .* already encoding",
    "slot 31": r"\[31 buffer slots\]: setBuffer: index 31, expected 0 to 30",
    "setBytes of 4097": r"\[setBytes length\]: setBytes at index 0: 4097 bytes, expected 1 to 4096",
    "constant of another type": r"'negate' \[\[function_constant\(1\)\]\] has the type bool, its value was set as int",
    "constant without a value": r"kernel 'f': function constants without a value: 'rows' \(1\)",
    "36 KB declared": r"kernel 'f' declares 36864 bytes of threadgroup memory, at most 32768",
    "contents of a private buffer": r"contents is null",
    "bytes for a private buffer": r"\[private buffer\]: newBufferWithBytes: a private buffer has no contents",
    "setBytes of 0": r"\[setBytes length\]: setBytes at index 0: 0 bytes",
    "1025 threads": r"\[threads per threadgroup\]: .*\(1025, 1, 1\) is 1025 threads, kernel 'scale' allows 1024",
    "over the pipeline's limit": r"\[threads per threadgroup\]: .* 65 threads, kernel 'narrow' allows 64",
    "33 KB of threadgroup memory": r"\[threadgroup memory\]: kernel 'shared': 32784 bytes .* at most 32768",
    "declared and set threadgroup memory": r"kernel 'declared': 32784 bytes \(24576 declared in the kernel\)",
    "threadgroup length of 20": r"\[threadgroup memory length\]: .*20 bytes, expected a multiple of 16",
    "no threadgroup length": r"\[threadgroup memory binding\]: .*'scratch' \[\[threadgroup\(0\)\]\]: no length was set",
    "empty grid": r"\[zero-size dispatch\]: dispatchThreads: grid of \(0, 1, 1\)",
    "empty threadgroup": r"\[zero-size dispatch\]: dispatchThreadgroups: .*threadgroups of \(16, 0, 1\)",
    "no pipeline": r"\[pipeline\]: dispatchThreads: no pipeline is set",
    "unbound argument": r"\[unbound argument\]: kernel 'scale', argument 'y' \[\[buffer\(1\)\]\] has nothing bound",
    "nil for an argument": r"\[missing buffer\]: Compute Function\(scale\): missing Buffer binding at index 1 for y\[0\]",
    "binding of an earlier operator": r"\[stale binding\]: kernel 'scale', argument 'factor' \[\[buffer\(2\)\]\]",
    "binding of an earlier pipeline": r"\[stale binding\]: kernel 'narrow', argument 'y' \[\[buffer\(0\)\]\]",
    "threadgroup length of an earlier operator": r"\[threadgroup memory binding\]: .*no length was set",
    "offset at the end": r"\[buffer offset\]: setBuffer at index 0: offset 64 of a buffer of 64 bytes",
    "moved offset at the end": r"\[buffer offset\]: setBufferOffset at index 0: offset 64 of a buffer of 64 bytes",
    "misaligned float": r"\[buffer alignment\]: .*'x' \[\[buffer\(0\)\]\]: offset 2, expected a multiple of 4",
    "misaligned float4": r"\[buffer alignment\]: .*'y' \[\[buffer\(0\)\]\]: offset 4, expected a multiple of 16",
    "argument too small": r"\[argument size\]: .*'factor' \[\[buffer\(2\)\]\]: 2 bytes bound, its type has 4",
    "threadgroup slot 31": r"\[31 threadgroup slots\]: setThreadgroupMemoryLength: index 31, expected 0 to 30",
    "setBytes of null": r"\[setBytes pointer\]: setBytes at index 0: the pointer is null",
    "moved offset of nothing": r"\[unbound argument\]: setBufferOffset at index 5: no buffer is bound there",
    "nil pipeline": r"\[pipeline\]: setComputePipelineState: expected a pipeline, got nil",
    "resource of nil": r"\[resource\]: useResource: expected a buffer, got nil",
    "resource for nothing": r"\[resource\]: useResource: expected MTLResourceUsageRead or .*, got usage 0",
    "barrier of nothing": r"\[barrier scope\]: memoryBarrierWithScope: scope 0 names nothing",
    "position beyond 32 bits": r"\[grid size\]: dispatchThreads: grid of \(4294967296, 1, 1\) threads",
    "encoding after endEncoding": r"\[encoding after endEncoding\]: setComputePipelineState",
    "commit with an open encoder": r"\[commit with an open encoder\]",
    "encoding after commit": r"\[committed command buffer\]: computeCommandEncoder after commit",
    "wait before commit": r"\[wait before commit\]",
    "encoder released unended": r"\[encoder lifetime\]: a command encoder was released without endEncoding",
    "re-entrant dispatch_sync": r"\[re-entrant dispatch_sync\]: .*deadlock",
    "operator in the block": r"\[re-entrant dispatch_sync\]: a PyTorch operator",
    "wait in the block": r"\[re-entrant dispatch_sync\]: .* torch.mps.synchronize\(\) in a dispatch_sync block",
    "encoder after NONE": r"\[encoding after endEncoding\]: setComputePipelineState",
    "encoder after the profiler": r"\[encoding after endEncoding\]: setComputePipelineState",
    "handler in the block": r"\[re-entrant dispatch_sync\]: dispatch_sync was called",
    "handler beside an encoder": r"\[handler beside an open encoder\]: addCompletedHandler with an encoder open",
    "encoder of another stream": r"\[encoder outside the queue\]: commandEncoder\(\)",
    "raw commit in the block": r"\[commit inside the block\]",
    "encoder outside the queue": r"\[encoder outside the queue\]: commandEncoder\(\)",
    "kept encoder": r"\[encoder outside the queue\]: setComputePipelineState",
    "exception over dispatch_sync": r"\[exception across dispatch_sync\]: .*from the block",
    "freed buffer": r"\[object lifetime\]: a freed MTLBuffer was used",
    "unpaired profiler": r"\[profiler pairing\]: beginProfileKernel without endProfileKernel",
    "profiler without a handle": r"\[profiler pairing\]: beginProfileKernel 'scale': the handle is null",
    "profiler twice": r"\[profiler pairing\]: beginProfileKernel 'narrow' before endProfileKernel of 'scale'",
    "profiler of another kernel": r"\[profiler pairing\]: endProfileKernel with another handle",
    "profiler beside an encoder": r"\[handler beside an open encoder\]: beginProfileKernel with a compute encoder open",
    "pipeline of nil": r"\[function\]: newComputePipelineStateWithFunction: expected a function, got nil",
    "buffer of 0 bytes": r"\[buffer length\]: newBufferWithLength: expected at least 1 byte, got 0",
    "constant of a vector type": r"\[function constant type\]: setConstantValue: type 6 is not supported here",
    "blit out of range": r"\[blit range\]: copyFromBuffer, destination: bytes 0 to 64 of a buffer of 32 bytes",
    "blit from out of range": r"\[blit range\]: copyFromBuffer, source: bytes 8 to 40 of a buffer of 32 bytes",
    "blit to nil": r"\[blit buffers\]: copyFromBuffer: a buffer is nil",
    "blit of nothing": r"\[zero-size copy\]: copyFromBuffer: size 0",
    "blit onto itself": r"\[blit overlap\]: copyFromBuffer: source and destination overlap",
    "fill of nil": r"\[blit buffers\]: fillBuffer: the buffer is nil",
    "fill of nothing": r"\[zero-size fill\]: fillBuffer: range of length 0",
    "fill out of range": r"\[blit range\]: fillBuffer: bytes 32 to 96 of a buffer of 64 bytes",
}
CORRECT = [
    *(
        "correct",
        "two dispatches, one binding",
        "absent optional",
        "constants and macros",
        "language version",
        "math functions",
        "blit",
        "device",
        "the system's version",
        "tensors of an M5",
    ),
    *("own encoder on PyTorch's buffer", "buffers live until the work has run", "paired profiler"),
    *("freed memory is poison", "commits in a block"),
]
FOLDER = Path(__file__).parent / "host"
SOURCES = [FOLDER / f"{name}.mm" for name in ("correct", "violations", "violations_of_order")]
Host = Callable[[str], str]


@pytest.fixture(scope="session")
def host() -> Host:
    """Builds `host/` as an extension, and returns its function `run_scenario`."""
    library = softmetal.build_extension("softmetal_test_host", [FOLDER / "all.mm"])
    run = ctypes.CDLL(str(library)).run_scenario
    run.restype, run.argtypes = ctypes.c_char_p, [ctypes.c_char_p]

    def scenario(name: str) -> str:
        text: str = run(name.encode()).decode()
        return text

    return scenario


@pytest.fixture(autouse=True)
def nothing_left_over() -> None:
    softmetal.faults()


@pytest.mark.parametrize("mode", ["fast", "checked"])
@pytest.mark.parametrize("name", CORRECT)
def test_correct_host_code_runs(host: Host, name: str, mode: str) -> None:
    with softmetal.validated(), softmetal.checked(mode == "checked"):
        assert host(name) == ""


# In these scenarios, Metal reports no violation but returns nil and an error. The scenario raises the error's text.
RETURNED = ("constant of another type", "constant without a value", "36 KB declared", "contents of a private buffer")


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_reported(host: Host, name: str) -> None:
    with softmetal.validated():
        message = host(name)
    assert re.search(VIOLATIONS[name], message), message
    assert message.startswith("Metal API violation [") != (name in RETURNED)
    # The device must still be usable.
    torch.mps.synchronize()
    assert (torch.ones(3, device="mps") + 1).tolist() == [2, 2, 2]
    assert host("correct") == ""


def test_only_validation_refuses_nil(host: Host) -> None:
    with softmetal.validated(False):
        assert host("nil for an argument") == ""
    with pytest.raises(RuntimeError, match=r"at address \(nil\).*kernel 'scale'"):
        torch.mps.synchronize()


def test_the_environment_turns_validation_on_as_on_a_mac() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MTL_DEBUG_LAYER"}
    program = """import os, softmetal
for setting in ({"MTL_DEBUG_LAYER": "1"}, {"MTL_DEBUG_LAYER": "0"}, {}):
    if (child := os.fork()) == 0:
        os.environ.update(setting)
        softmetal.install()
        print(softmetal._device().set_validates(0), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "0", "0"], done.stderr


def test_every_scenario_is_used() -> None:
    names = {name for path in SOURCES for name in re.findall(r'^    \{"([^"]+)",', path.read_text(), re.M)}
    assert names == set(VIOLATIONS) | set(CORRECT) | {"exception with rethrow"}


def test_every_rule_that_the_device_enforces_has_a_scenario() -> None:
    text = "".join(path.read_text() for path in sorted(build.RUNTIME.glob("*.[hm]*")))
    named = re.findall(r"\b(?:violation|require_range)\(\s*([^,]+),", text)
    # The pattern also matches the definitions of both functions, and the place where one of them calls the other.
    passed_on = {"const char* rule", "rule"}
    assert {name for name in named if not re.fullmatch('"[^"]+"', name)} == passed_on
    rules = {name.strip('"') for name in named if name not in passed_on}
    rules |= set(re.findall(r'Metal API violation \[([^\]"]+)\]', text))
    assert len(rules) > 30
    shown = " ".join(VIOLATIONS.values())
    assert {rule for rule in rules if rf"\[{rule}\]" not in shown} == set()


def test_an_exception_passes_dispatch_sync_with_rethrow(host: Host) -> None:
    assert host("exception with rethrow") == "from the block"
