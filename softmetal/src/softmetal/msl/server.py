"""Runs the compiler for a process of the executor: imports the compiler once, then forks for each request.

A request is a message on the socket that is file descriptor 3: the number of arguments, the arguments (the first is the
module's name) and the environment, each with a 0 at the end. Four descriptors come with it: input, output, messages, and
a pipe that takes the exit status as one byte. The server ends when the executor's process closes the socket.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence

from . import compiler, linker
from .dialect import check
from .tools import CompileError

_LONGEST_REQUEST = 1 << 20  # in bytes; the kernel's own limit for a message is lower


def _stamps() -> list[tuple[str, int, int]]:
    return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in compiler.own_files()]


def _status(arguments: Sequence[str], is_current: bool) -> int:
    name, *options = arguments
    # the files have changed since this process imported them, so a new process runs the new code
    if not is_current:
        return subprocess.run([sys.executable, "-S", "-m", name, *options]).returncode
    sys.argv = [name, *options]
    try:
        status = importlib.import_module(name).main()
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else 1


def _answer(request: str, descriptors: Sequence[int], is_current: bool) -> None:
    gc.disable()  # a request ends before garbage collection would save memory
    signal.signal(signal.SIGINT, signal.default_int_handler)
    count, *texts = request.split("\0")
    arguments, entries = texts[: int(count)], texts[int(count) : -1]
    os.environ.clear()
    os.environ.update(entry.split("=", 1) for entry in entries if "=" in entry)
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)
    os.lseek(0, 0, os.SEEK_SET)
    os.write(descriptors[3], bytes([_status(arguments, is_current) & 0xFF]))


def main() -> None:
    # An interrupt from the terminal also reaches this process. It ends only if the executor's process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The user's process may ignore SIGCHLD. Python would then report status 0 for every tool.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    channel = socket.socket(fileno=3)
    stamps = _stamps()
    with contextlib.suppress(CompileError):  # if there is no compiler, each request reports this error itself
        compiler.toolchain_digest(), check.digest(), linker.command()  # kept in memory, for all requests
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _LONGEST_REQUEST, 4)
        if not message:
            return
        is_current = _stamps() == stamps
        if os.fork() == 0:
            channel.close()
            try:
                _answer(message.decode(errors="surrogateescape"), descriptors, is_current)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
