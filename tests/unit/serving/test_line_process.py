"""A child process that is spoken to in lines."""

import os
import sys

import pytest

from dspark_ray.serving.line_process import LineProcess

ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"


async def test_lines_come_back_and_its_death_shows() -> None:
    process = await LineProcess.start((sys.executable, "-S", "-c", ECHO))
    await process.write_line(b"abc")
    assert await process.read_line() == b"cba\n"
    assert process.is_alive
    await process.kill()
    assert not process.is_alive
    await process.write_line(b"abc")
    assert await process.read_line() is None


async def test_one_that_ends_by_itself() -> None:
    process = await LineProcess.start((sys.executable, "-S", "-c", "pass"))
    assert await process.read_line() is None
    await process.kill()


async def test_no_fork_handler_runs() -> None:
    """A library's handler may wait in the fork for a lock that is never freed, and the loop for the fork."""
    reader, writer = os.pipe()
    armed = [writer]  # a handler cannot be taken back
    os.register_at_fork(after_in_child=lambda: armed and os.write(armed[0], b"x"))
    process = await LineProcess.start((sys.executable, "-S", "-c", "pass"))
    await process.kill()
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    armed.clear()
    os.close(reader)
    os.close(writer)
