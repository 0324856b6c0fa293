"""Checks that functions of torch's Mac library make the same calls as before, for each supported version.

    python -m softmetal.apple.pytorch_calls                  # the pinned torch, in a second
    python -m softmetal.apple.pytorch_calls --all            # every supported torch: fetches 130 MB for each
    python -m softmetal.apple.pytorch_calls --all --write    # store the lists after reading what changed

The device imitates these functions, and extensions depend on how they change the encoder and the command buffer. The
program reads the functions' calls from the disassembly of `libtorch_cpu.dylib`. It compares the calls with
`recorded_pytorch_calls.json`, which --write makes. Any difference is an error, and a person must examine it.
"""

import argparse
import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

from . import wheels

STORED = Path(__file__).with_name("recorded_pytorch_calls.json")
PINNED = "2.13.0"
WHEEL_OF = {"2.13.0": "torch-macos", "2.14.1": "torch-macos-2.14.1", "2.15.0": "torch-macos-2.15.0"}
# Mangled names without parameters. Parameters differ between versions, and without them all overloads and blocks match.
FREE_FUNCTIONS = (
    "14getMPSProfiler",
    "17getStreamFromPool",
    "19getCurrentMPSStream",
    "19setCurrentMPSStream",
    "26dispatch_sync_with_rethrow",
)
MEMBERS = {
    "9MPSStream": (
        "4copy",
        "5flush",
        "6commit",
        "11synchronize",
        "13commandBuffer",
        "13commitAndWait",
        "14checkLastError",
        "14commandEncoder",
        "15addErrorHandler",
        "17commitAndContinue",
        "19addCompletedHandler",
        "19endKernelCoalescing",
    ),
    "8Profiler11MPSProfiler": (
        "16endProfileKernel",
        "18beginProfileKernel",
        "19endProfileExecution",
        "21beginProfileExecution",
        "27addProfilerCompletedHandler",
        "27addProfilerScheduledHandler",
    ),
    # PyTorch's allocator keeps the memory of different streams apart. Extensions with separate memory for each stream
    # rely on it.
    "13HeapAllocator20MPSHeapAllocatorImpl": (
        "11free_buffer",
        "15get_free_buffer",
        "16split_free_block",
        "23insert_available_buffer",
    ),
    "8MPSHooks": ("12commitStream", "17deviceSynchronize"),
    "9MPSDevice": ("7getName", "12getCoreCount"),
}
_NAMES = "|".join([*FREE_FUNCTIONS, *(f"{owner}(?:{'|'.join(names)})" for owner, names in MEMBERS.items())])
MANGLED = re.compile(rf"_+ZNK?2at3mps(?:{_NAMES})E\w*")
# Calls that the lists leave out. Calls for memory, strings and exceptions depend on the compiler, not on PyTorch's
# source.
HOUSEKEEPING = re.compile(r"std::|operator (new|delete)|__Unwind_Resume|___cxa_(?!throw)|___clang_|fmt::|.*\(\.cold\.")
STRING = re.compile(r"std::__1::basic_string<char, [^<>]*<char>, [^<>]*<char>\s?>")

CallLists = dict[str, list[str]]


class CallsChanged(RuntimeError):
    """The calls of a function differ from the stored list. The message shows the difference."""


def _run(*command: str, text: str | None = None) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _demangled(names: list[str]) -> list[str]:
    printed = _run("llvm-cxxfilt-19", text="\n".join(name.removeprefix("_") for name in names))
    return [STRING.sub("std::string", line) for line in printed.splitlines()]


def _stubs(dylib: Path) -> dict[int, str]:
    """Returns stub addresses -> names of imported functions."""
    printed = _run("llvm-objdump-19", "--macho", "--indirect-symbols", str(dylib))
    return {int(at, 16): name for at, name in re.findall(r"^(0x[0-9a-f]+)\s+\d+ (\S+)$", printed, re.MULTILINE)}


def calls_in(disassembly: str, stubs: dict[int, str]) -> CallLists:
    """Returns the calls of each function in the order of the code, from the output of `llvm-objdump -d`.

    A message is recorded with its selector, for example `-[commit]`. A jump out of the function is also a call. A
    branch through a register is recorded as "(indirect)".

    Args:
        disassembly: the disassembly of some functions, with mangled names.
        stubs: stub addresses -> names of imported functions.
    """
    found: CallLists = {}
    function = ""
    for line in disassembly.splitlines():
        if header := re.fullmatch(r"[0-9a-f]+ <(\S+)>:", line):
            function = header[1]
            found[function] = []
            continue
        if re.match(r"\s*[0-9a-f]+:\s+(blr|br)\b", line):
            found[function].append("(indirect)")
        branch = re.match(r"\s*[0-9a-f]+:\s+(bl?)\s+0x([0-9a-f]+) <([^>+]+)(\+0x[0-9a-f]+)?>", line)
        if branch is None:
            continue
        kind, address, name, offset = branch.groups()
        if kind == "b" and name == function:
            continue  # a jump inside the function
        target = stubs.get(int(address, 16), name + (offset or ""))
        found[function].append(re.sub(r"^_objc_msgSend\$(.*)$", r"-[\1]", target))
    return found


def call_lists(dylib: Path) -> CallLists:
    """Returns the calls of the functions that we rely on, sorted by demangled name.

    Raises:
        CallsChanged: the library defines none of these functions.
    """
    symbols = _run("llvm-nm-19", "--defined-only", "--format=just-symbols", str(dylib)).split()
    wanted = [name for name in symbols if MANGLED.fullmatch(name) and ".cold" not in name]
    if not wanted:
        raise CallsChanged(f"{dylib.name}: defines none of the functions that the host code relies on")
    printed = _run(
        "llvm-objdump-19", "-d", "--no-show-raw-insn", f"--disassemble-symbols={','.join(wanted)}", str(dylib)
    )
    found = calls_in(printed, _stubs(dylib))
    names = sorted({*found, *(call for calls in found.values() for call in calls if re.match("_+Z", call))})
    readable = dict(zip(names, _demangled(names), strict=True))
    return {
        readable[function]: [name for call in calls if not HOUSEKEEPING.match(name := readable.get(call, call))]
        for function, calls in sorted(found.items(), key=lambda pair: readable[pair[0]])
    }


def lines(lists: CallLists) -> list[str]:
    """Returns call lists as lines of text, for messages and for comparison."""
    return [line for function, calls in lists.items() for line in (function, *(f"    {call}" for call in calls))]


def compare(version: str, found: CallLists, stored: CallLists) -> None:
    """Compares the calls of one torch with the stored ones.

    Raises:
        CallsChanged: the calls differ.
    """
    if found == stored:
        return
    difference = "\n".join(
        difflib.unified_diff(
            lines(stored), lines(found), "stored", f"libtorch_cpu.dylib of torch {version}", "", "", 3, ""
        )
    )
    raise CallsChanged(
        f"torch {version}: functions that the device imitates call something else. Read what changed, "
        f"adapt runtime/pytorch and the extensions that rely on them, then store the lists with --write:\n{difference}"
    )


def stored_lists() -> dict[str, CallLists]:
    content: dict[str, CallLists] = json.loads(STORED.read_text())["versions"]
    return content


def check(version: str = PINNED) -> str:
    """Compares the calls of one torch's library with the stored calls. Returns a message of success.

    Raises:
        CallsChanged: the calls differ, or none are stored for that torch.
        wheels.WheelUnavailable: its wheel is not available.
    """
    stored = stored_lists()
    if version not in stored:
        raise CallsChanged(f"torch {version}: no calls are stored; --write stores them")
    found = call_lists(wheels.unpack(WHEEL_OF[version]) / "torch" / "lib" / "libtorch_cpu.dylib")
    compare(version, found, stored[version])
    calls = sum(map(len, found.values()))
    return f"torch {version}: the {calls} calls of {len(found)} functions that the host code relies on are as stored"


def write(versions: list[str]) -> None:
    found = {
        version: call_lists(wheels.unpack(WHEEL_OF[version]) / "torch" / "lib" / "libtorch_cpu.dylib")
        for version in versions
    }
    content = {"written_by": "python -m softmetal.apple.pytorch_calls --all --write", "versions": found}
    STORED.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    """Compares or stores the lists. Returns 1 if a list differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every supported torch, not only the pinned one")
    parser.add_argument("--write", action="store_true", help="store the lists of every supported torch")
    arguments = parser.parse_args()
    versions = list(WHEEL_OF) if arguments.all or arguments.write else [PINNED]
    if arguments.write:
        write(versions)
    changed = 0
    for version in versions:
        try:
            print(f"== {check(version)}", flush=True)
        except CallsChanged as error:
            print(error, file=sys.stderr)
            changed += 1
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
