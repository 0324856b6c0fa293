"""Tests that sm_compile starts one compiler process for all requests, and none for a request whose result is cached."""

import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softmetal import device
from softmetal.executor import bindings
from softmetal.msl import tools
from softmetal.msl.resident import Resident, _reap

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
    """Returns the ids of a process's children that have `name` in their command."""
    of_threads = [path.read_text().split() for path in Path(f"/proc/{process}/task").glob("*/children")]
    return [int(p) for found in of_threads for p in found if name in Path(f"/proc/{p}/cmdline").read_bytes()]


def servers() -> list[int]:
    """Returns the ids of this process's running compiler servers."""
    return children(os.getpid(), b"msl.server")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gives each test a cache without kernels, which contains only the compiled headers and the library of clang.

    Both are slow to make.
    """
    folder = tmp_path / "cache"
    folder.mkdir()
    device.compile(SOURCE, constants={"n": 1})
    resident_library = tools._compiler()._place[1]
    for path in (resident_library, *tools.cache_folder().glob("*.pch")):
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
    status, path = request(SOURCE, 3)  # the process that answers this request starts a second server
    assert status == 0 and value(path) == 3


STATIC = """#include <stdlib.h>
#include <unistd.h>
int main(int n, char** words) { (void)n; unsetenv("LD_PRELOAD"); words[0] = "clang++-19"; return execvp(words[0], words); }
"""


PREPROCESS = ["-E", "-P", "-x", "c", "-"]


@contextlib.contextmanager
def resident(compiler: str) -> Iterator[Resident]:
    made = Resident(compiler, tools._compiler()._place[1])
    try:
        yield made
    finally:
        if made._channel is not None:
            made._channel.close()
            _reap(made._process)


@pytest.mark.parametrize("is_static", [False, True], ids=["a script", "a static program"])
def test_a_launcher_may_take_the_place_of_clang(is_static: bool, tmp_path: Path) -> None:
    """Both kinds of launchers must work without a resident clang.

    A static program cannot load the library that keeps clang resident. A script must not pass the library on to clang.
    """
    launcher = tmp_path / "launcher"
    if is_static:
        subprocess.run(["cc", "-static", "-x", "c", "-", "-o", str(launcher)], input=STATIC, text=True, check=True)
    else:
        launcher.write_text('#!/bin/sh\ntest -z "$LD_PRELOAD" && exec clang++-19 "$@"\n')
        launcher.chmod(0o755)
    with resident(str(launcher)) as clang:
        assert (clang._channel is None) == is_static
        assert clang.run(PREPROCESS, b"here") == (0, b"here\n", b"")


def test_a_compiler_cache_before_clang_is_passed_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If a link named clang to ccache comes first on PATH, the real clang compiles. A link that is no cache is used."""
    programs = {}
    for name in ("ccache", "clang"):
        (tmp_path / name).mkdir()
        programs[name] = tmp_path / name / name
        programs[name].write_text("#!/bin/sh\n")
        programs[name].chmod(0o755)
        (tmp_path / name / "some-clang").symlink_to(programs[name])
    for path, expected in (
        ("ccache:clang", str(tmp_path / "clang" / "some-clang")),
        ("clang:ccache", "some-clang"),
        ("ccache", "some-clang"),
        ("nowhere", "some-clang"),
    ):
        monkeypatch.setenv("PATH", ":".join(str(tmp_path / folder) for folder in path.split(":")))
        assert tools._behind_cache("some-clang") == expected, path


def _ignore_ends_of_children(queue: "multiprocessing.Queue[tuple[tuple[int, bytes, bytes], bool]]") -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with resident("clang++-19") as clang:
        answer = clang.run(PREPROCESS, b"here")
    request(SOURCE, 11)
    (server,) = servers()
    ignored = re.search(r"SigIgn:\s+(\w+)", Path(f"/proc/{server}/status").read_text())
    assert ignored is not None
    queue.put((answer, bool(int(ignored[1], 16) >> (signal.SIGCHLD - 1) & 1)))


def test_a_user_may_ignore_the_ends_of_children() -> None:
    """Processes inherit an ignored SIGCHLD, but the server and the resident clang need their children's statuses."""
    assert in_fork(_ignore_ends_of_children) == ((0, b"here\n", b""), False)


def test_a_request_that_is_too_long_for_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(11):
        monkeypatch.setenv(f"LONG_{i}", "x" * 100_000)
    assert tools.run([tools.CLANG, *PREPROCESS], "here") == "here\n"


def test_a_working_directory_that_was_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert tools.run([tools.CLANG, *PREPROCESS], "here") == "here\n"


def test_threads_replace_a_clang_that_was_killed() -> None:
    """One of the threads starts a new clang, and the killed process is reaped."""
    killed = []
    with resident("clang++-19") as clang, ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            killed.append(clang._process)
            os.kill(clang._process, signal.SIGKILL)
            answers = list(pool.map(lambda i: clang.run(PREPROCESS, b"line_%d" % i), range(8)))
            assert answers == [(0, b"line_%d\n" % i, b"") for i in range(8)]
        assert len({*killed, clang._process}) == 11
        assert [process for process in killed if Path(f"/proc/{process}").exists()] == []


@pytest.mark.parametrize("is_resident", [True, False], ids=["resident", "a process of its own"])
def test_the_status_of_a_signal(is_resident: bool, tmp_path: Path) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text("#!/bin/sh\nkill -SEGV $$\n")
    launcher.chmod(0o755)
    with resident(str(launcher)) as dying:
        channel = dying._channel
        if not is_resident:
            dying._channel = None
        assert dying.run([], b"")[0] == 128 + signal.SIGSEGV
        dying._channel = channel


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


def in_fork(task: Callable[["multiprocessing.Queue[Any]"], None]) -> Any:
    """Runs `task` in a fork of this process. Returns what it puts into the queue within a minute."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=task, args=(queue,))
    process.start()
    try:
        return queue.get(timeout=60)
    finally:
        process.join(1)
        process.kill()


def _compile_in_fork(queue: "multiprocessing.Queue[tuple[int, int, int]]") -> None:
    status, path = request(SOURCE, 11)
    queue.put((status, value(path), len(servers())))


def test_a_forked_process_starts_a_server_of_its_own() -> None:
    assert request(SOURCE, 10)[0] == 0
    assert in_fork(_compile_in_fork) == (0, 11, 1)
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
