"""sm_compile starts one compiler process for all requests, and none for a request whose result is in the cache."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from softmetal import device
from softmetal.executor import bindings
from softmetal.msl.tools import cache_folder

ROOM = Path(device.__file__).parent
HERE = Path(__file__).parent
SOURCE = "constant int n [[function_constant(0)]];\nkernel void f(device int* x) { *x = n; }"


def request(source: str, n: int = 7, include_path: Path = ROOM) -> tuple[int, str]:
    """Returns the status, and the library's path or the compiler's messages."""
    answer = ctypes.c_void_p()
    constant = bindings.ConstantValue(b"n", 0, str(n).encode())
    path = ctypes.c_char_p(os.fsencode(include_path))
    request = bindings.CompileRequest(source=source.encode(), constants=ctypes.pointer(constant), constant_count=1)
    request.include_paths, request.include_path_count = ctypes.pointer(path), 1
    return bindings.executor().sm_compile(request, answer), device._text(answer)


def value(path: str) -> int:
    x = np.zeros(1, np.int32)
    device.Library(path).kernel("f").launch(threads=1, group=1, buffers=[x])
    return int(x[0])


def children(process: int, name: bytes) -> list[int]:
    """Returns the process ids of a process's children that have `name` in their commands."""
    of_threads = [path.read_text().split() for path in Path(f"/proc/{process}/task").glob("*/children")]
    return [int(p) for found in of_threads for p in found if name in Path(f"/proc/{p}/cmdline").read_bytes()]


def servers() -> list[int]:
    """Returns the process ids of this process's compiler servers that run."""
    return children(os.getpid(), b"msl.server")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes the first request of each test new, but keeps the precompiled headers, whose compile takes seconds."""
    folder = tmp_path / "cache"
    folder.mkdir()
    device.compile(SOURCE, constants={"n": 1})
    for path in cache_folder().glob("*.pch"):
        (folder / path.name).symlink_to(path)
    monkeypatch.setenv("SOFTMETAL_CACHE", str(folder))


def test_a_known_request_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    status, path = request(SOURCE)
    assert status == 0, path
    assert value(path) == 7
    assert request(SOURCE + "\n#error no\n")[0] == 1
    assert "program_source.metal:3" in request(SOURCE + "\n#error no\n")[1]
    monkeypatch.setenv("PATH", "/nowhere")
    assert request(SOURCE) == (0, path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    monkeypatch.setenv("SOFTMETAL_CXX", "clang++-of-nobody")
    status, message = request(SOURCE + " ")
    assert status == 1 and "clang++-of-nobody not found" in message


def test_one_server_compiles_for_all_threads() -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: request(SOURCE, n), range(8)))
    assert [status for status, _ in answers] == [0] * 8
    assert [value(path) for _, path in answers] == list(range(8))
    assert len(servers()) == 1


def test_a_new_server_replaces_one_that_ended() -> None:
    assert request(SOURCE, 1)[0] == 0
    (old,) = servers()
    os.kill(old, signal.SIGKILL)
    os.waitpid(old, 0)
    status, path = request(SOURCE, 2)
    assert status == 0 and value(path) == 2
    assert len(servers()) == 1 and servers() != [old]


def test_the_servers_clang_compiles_for_all_requests_until_it_ends() -> None:
    assert request(SOURCE, 1)[0] == 0
    (server,) = servers()
    (old,) = children(server, b"clang++")
    assert request(SOURCE, 2)[0] == 0
    assert children(server, b"clang++") == [old]
    os.kill(old, signal.SIGKILL)
    status, path = request(SOURCE, 3)  # the process that answers this request starts another
    assert status == 0 and value(path) == 3


STATIC = """#include <unistd.h>
int main(int n, char** words) { (void)n; words[0] = "clang++-19"; return execvp(words[0], words); }
"""


@pytest.mark.parametrize("is_static", [False, True], ids=["a script", "a static program"])
def test_a_launcher_may_take_the_place_of_clang(is_static: bool, tmp_path: Path) -> None:
    """A static program does not load the library that keeps clang resident. A script must not pass it on to clang."""
    launcher = tmp_path / "launcher"
    if is_static:
        subprocess.run(["cc", "-static", "-x", "c", "-", "-o", str(launcher)], input=STATIC, text=True, check=True)
    else:
        launcher.write_text('#!/bin/sh\ntest -z "$LD_PRELOAD" && exec clang++-19 "$@"\n')
        launcher.chmod(0o755)
    environment = os.environ | {"SOFTMETAL_CXX": str(launcher)}
    code = "from softmetal.msl import tools; print(tools.run([tools.CLANG, '-E', '-P', '-x', 'c', '-'], 'here'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "here"


def test_the_server_ends_with_its_process(tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
    script += (
        "from test_compiler_process import SOURCE, children, request, servers\nassert request(SOURCE, 20)[0] == 0\n"
    )
    script += "print(*servers(), *children(*servers(), b'clang++'))"
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    processes = [Path(f"/proc/{number}") for number in printed.split()]
    assert len(processes) == 2
    deadline = time.monotonic() + 60
    while any(process.exists() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [process for process in processes if process.exists()] == []


def test_an_absent_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTMETAL_PYTHON", "/nowhere/python3")
    assert request(SOURCE) == (1, "cannot start /nowhere/python3: No such file or directory")


def _compile_in_fork(queue: "multiprocessing.Queue[tuple[int, int, int]]") -> None:
    status, path = request(SOURCE, 11)
    queue.put((status, value(path), len(servers())))


def test_a_forked_process_starts_a_server_of_its_own() -> None:
    assert request(SOURCE, 10)[0] == 0
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_compile_in_fork, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == (0, 11, 1)
    process.join(60)
    status, path = request(SOURCE, 12)  # the parent's server still answers
    assert status == 0 and value(path) == 12


def test_a_changed_compiler_is_imported_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "softmetal"
    for folder in ("msl", "executor"):
        shutil.copytree(ROOM / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("SOFTMETAL_HOME", str(copy))
    assert request(SOURCE, 1)[0] == 0
    names = copy / "msl" / "tools.py"
    names.write_text(names.read_text().replace("clang++-19", "clang++-from-tomorrow"))
    status, message = request(SOURCE, 2)
    assert status == 1 and "clang++-from-tomorrow not found" in message


def test_a_changed_header_changes_the_result(tmp_path: Path) -> None:
    source = '#include "factor.h"\n' + SOURCE.replace("= n", "= n * FACTOR")
    for factor in (2, 3):
        (tmp_path / "factor.h").write_text(f"#define FACTOR {factor}\n")
        for n in (5, 6):  # the second request uses the preprocessed text of the first
            status, path = request(source, n, tmp_path)
            assert status == 0 and value(path) == n * factor


def test_a_source_that_asks_for_a_file_is_read_anew(tmp_path: Path) -> None:
    source = '#if __has_include("present.h")\n#define FACTOR 2\n#else\n#define FACTOR 1\n#endif\n'
    source += SOURCE.replace("= n", "= n * FACTOR")
    status, path = request(source, 5, tmp_path)
    assert status == 0 and value(path) == 5
    (tmp_path / "present.h").write_text("")
    status, path = request(source, 6, tmp_path)
    assert status == 0 and value(path) == 12
