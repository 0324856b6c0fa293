"""Runs programs in forks of a process that has imported torch and transformers, but not this package.

In a new process, these imports would take five seconds of CPU time.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from tests.support.mps import load_mps

ROOT = Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.preloaded"])


def start_server() -> None:
    """Starts the process that is forked for each program, if it does not run yet.

    Its imports are relative to the root.
    """
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(before)


def run_python(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    mps: bool = False,
    timeout: int = 300,
) -> CompletedProcess[str]:
    """Runs `python` with these arguments in a fork, and returns the exit code and both outputs.

    Do not use it for a program that tests imports, their order, or the end of the interpreter: the fork has already
    imported torch, transformers and peft, and ends like a fork of multiprocessing. These packages and the OpenMP
    runtime read environment variables while they load, so they see the environment of the first test that starts the
    server.

    Args:
        *arguments: `-c` and a program, `-m` and a module, or a file; then the program's own arguments.
        cwd: the folder to run in; by default, this process's.
        env: the environment; by default, this process's.
        mps: whether the program uses mps. On Linux, the software Metal device is then created first.
        timeout: the seconds after which SIGALRM ends the program.

    Raises:
        TimeoutExpired: the program took longer.
    """
    words = [str(argument) for argument in arguments]
    environment = dict(os.environ if env is None else env)
    if sys.platform == "darwin":  # Apple's frameworks do not work in a forked process
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    start_server()
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        started = (words, str(cwd or Path.cwd()), environment, mps, outputs, timeout)
        process = FORKS.Process(target=_run, args=started)
        process.start()
        process.join()
        assert process.exitcode is not None
        stdout, stderr = (file.read_text() for file in outputs)
        if process.exitcode == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(words, timeout, stdout, stderr)
        return CompletedProcess(words, process.exitcode, stdout, stderr)


def _run(
    words: list[str], folder: str, environment: dict[str, str], mps: bool, outputs: list[Path], timeout: int
) -> None:
    for number, file in enumerate(outputs, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    assert "transformers.quantizers" in sys.modules and "torch_marlin_metal" not in sys.modules
    signal.alarm(timeout)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if mps:
        load_mps()
    from tests.support.preloaded import ask_for_mps

    ask_for_mps()
    with _as_interpreter(words):
        if words[0] == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        elif words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")


@contextlib.contextmanager
def _as_interpreter(words: list[str]) -> Iterator[None]:
    """Sets `sys.argv` and similar state as the interpreter does for a program, and flushes its output at the end."""
    is_file = words[0] not in ("-c", "-m")
    sys.orig_argv = [sys.executable, *words]
    sys.argv = words if is_file else [words[0], *words[2:]]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    lists = Path(sysconfig.get_path("purelib")).glob("*.pth")  # files of editable installations
    listed = {line for file in lists for line in file.read_text().splitlines()}
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)) or path in listed]
    sys.path[:] = [str(Path(words[0]).parent) if is_file else "", *added, *installed]
    try:
        yield
    finally:
        sys.stdout.flush()
