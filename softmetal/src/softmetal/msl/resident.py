"""Runs a compiler whose process stays loaded: resident.cpp forks a process for each request."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path


def _start(compiler: str, library: Path) -> socket.socket | None:
    """Starts the compiler with the library of resident.cpp and returns the socket that takes requests.

    Returns None if the compiler ends instead, because it does not load the library: a launcher such as ccache can be a
    static program.

    Raises:
        FileNotFoundError: there is no such compiler.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        silent = [(os.POSIX_SPAWN_OPEN, i, os.devnull, os.O_RDWR, 0) for i in range(3)]
        files = [*silent, (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
        process = os.posix_spawnp(compiler, [compiler], {**os.environ, "LD_PRELOAD": str(library)}, file_actions=files)
    if ours.recv(1):
        return ours
    ours.close()
    os.waitpid(process, 0)
    return None


class Resident:
    """A compiler's process. It ends when no process has the socket any more.

    Args:
        compiler: the compiler's name or path.
        library: the compiled resident.cpp.
    """

    def __init__(self, compiler: str, library: Path) -> None:
        self._place = (compiler, library)
        self._channel = _start(compiler, library)

    def run(self, arguments: Sequence[str], data: bytes) -> tuple[int, bytes, bytes]:
        """Runs the compiler on `data`. Returns its status (-1 if a signal ended it), output and messages."""
        if self._channel is None:
            done = subprocess.run([self._place[0], *arguments], input=data, capture_output=True)
            return done.returncode, done.stdout, done.stderr
        entries = [f"{name}={value}" for name, value in os.environ.items()]
        texts = [os.getcwd(), str(len(arguments)), *arguments, *entries]
        request = b"".join(os.fsencode(text) + b"\0" for text in texts)
        # files in memory, because a pipe could fill up and block the compiler
        files = [os.memfd_create(name) for name in ("input", "output", "messages")]
        read_end, write_end = os.pipe()
        try:
            with open(files[0], "wb", closefd=False) as file:
                file.write(data)
            try:
                socket.send_fds(self._channel, [request], [*files, write_end])
            except ConnectionError:  # the compiler's process was killed
                self._channel.close()
                self._channel = _start(*self._place)
                return self.run(arguments, data)
            finally:
                os.close(write_end)
            status = os.read(read_end, 1)
            output, messages = (os.pread(file, os.fstat(file).st_size, 0) for file in files[1:])
        finally:
            for file in (*files, read_end):
                os.close(file)
        return status[0] if status else -1, output, messages
