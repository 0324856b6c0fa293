"""Runs a compiler that stays loaded in a process: resident.cpp forks this process for each request."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

# Half of kLongestRequest in resident.cpp, because Linux doubles the size of a socket's buffer. In bytes.
_SEND_BUFFER = 1 << 19


def _reap(process: int) -> None:
    """Waits until a process ends. Ignores errors: it may be another process's child, or SIGCHLD may be ignored."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)


def _start(compiler: str, library: Path) -> tuple[int, socket.socket | None]:
    """Starts the compiler with the library of resident.cpp. Returns its process id and the socket for requests.

    The socket is None if the compiler ends without loading the library, as a static program does (a launcher such as
    ccache can be one).

    Raises:
        FileNotFoundError: the compiler does not exist.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    with theirs:
        silent = [(os.POSIX_SPAWN_OPEN, i, os.devnull, os.O_RDWR, 0) for i in range(3)]
        files = [*silent, (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
        process = os.posix_spawnp(compiler, [compiler], {**os.environ, "LD_PRELOAD": str(library)}, file_actions=files)
    if ours.recv(1):
        return process, ours
    ours.close()
    _reap(process)
    return process, None


def _folder() -> str:
    """Returns the working directory, or the root if the working directory has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


class Resident:
    """The process of a compiler. It ends when all copies of the socket are closed. Several threads may use it.

    Args:
        compiler: the compiler's name or path.
        library: the compiled resident.cpp.
    """

    def __init__(self, compiler: str, library: Path) -> None:
        self._place = (compiler, library)
        self._lock = threading.Lock()
        self._process, self._channel = _start(compiler, library)

    def _send(self, request: bytes, files: Sequence[int]) -> bool:
        """Sends a request. Returns False if there is no socket, or if the request is too long for it."""
        with self._lock:
            while self._channel is not None:
                try:
                    socket.send_fds(self._channel, [request], files)
                    return True
                except ConnectionError:  # the compiler's process was killed
                    self._channel.close()
                    _reap(self._process)
                    self._process, self._channel = _start(*self._place)
                except OSError as error:
                    if error.errno != errno.EMSGSIZE:
                        raise
                    return False
        return False

    def _run_resident(self, arguments: Sequence[str], data: bytes) -> tuple[int, bytes, bytes] | None:
        """Returns the result of `run`, or None if the compiler's process does not accept the request or is killed."""
        entries = [f"{name}={value}" for name, value in os.environ.items()]
        texts = [_folder(), str(len(arguments)), *arguments, *entries]
        request = b"".join(os.fsencode(text) + b"\0" for text in texts)
        # files in memory, because a pipe could fill up and block the compiler
        files = [os.memfd_create(name) for name in ("input", "output", "messages")]
        read_end, write_end = os.pipe()
        try:
            with open(files[0], "wb", closefd=False) as file:
                file.write(data)
            try:
                sent = self._send(request, [*files, write_end])
            finally:
                os.close(write_end)
            status = os.read(read_end, 1) if sent else b""
            output, messages = (os.pread(file, os.fstat(file).st_size, 0) for file in files[1:])
        finally:
            for file in (*files, read_end):
                os.close(file)
        return (status[0], output, messages) if status else None

    def run(self, arguments: Sequence[str], data: bytes) -> tuple[int, bytes, bytes]:
        """Runs the compiler on `data`.

        Returns its status (128 + the signal if a signal ended it), output and messages.
        """
        answer = self._run_resident(arguments, data)
        if answer is not None:
            return answer
        done = subprocess.run([self._place[0], *arguments], input=data, capture_output=True)
        status = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return status, done.stdout, done.stderr
