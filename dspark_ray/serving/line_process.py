"""A child process that is spoken to in lines."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

LINE_LIMIT_BYTES = 64 << 20


class LineProcess:
    """Belongs to one event loop, which does not start it: uvloop forks, and in the fork the handlers of
    libraries run. Torch's waits there for a lock of Intel's OpenMP that another thread held, and with it the
    loop and all its clients. `Popen` runs no handlers (it uses vfork).
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str]) -> "LineProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.to_thread(_start, command, theirs)
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT_BYTES)
        return cls(process, reader, writer)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def write_line(self, line: bytes) -> None:
        """To a dead one it is lost; `read_line` tells."""
        self._writer.write(line + b"\n")
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def read_line(self) -> bytes | None:
        """None once it has ended."""
        try:
            return await self._reader.readline() or None
        except ConnectionError:
            return None

    async def kill(self) -> None:
        self._process.kill()
        self._writer.close()
        await asyncio.to_thread(self._process.wait)


def _start(command: Sequence[str], ends: socket.socket) -> "subprocess.Popen[bytes]":
    # It must find this program where this process did, which Ray may have told it by other means.
    path = os.pathsep.join(path for path in sys.path if path)
    end = ends.fileno()
    return subprocess.Popen(command, stdin=end, stdout=end, env={**os.environ, "PYTHONPATH": path})
