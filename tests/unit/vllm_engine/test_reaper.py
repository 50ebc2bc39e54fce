"""Children of a killed process do not outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# A parent with one child process and a reaper; it prints the child's pid and waits to be killed.
_PARENT = """
import multiprocessing, time
from dspark_ray.vllm_engine.reaper import Reaper
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
child.start()
reaper = Reaper()
{after}
print(child.pid, flush=True)
time.sleep(60)
"""


def _child_after_parents_death(after: str = "") -> int:
    script = _PARENT.format(after=after)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    return pid


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_a_killed_parent_takes_its_children_along() -> None:
    pid = _child_after_parents_death()
    deadline = time.monotonic() + 10
    while _is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_closed_reaper_kills_nobody() -> None:
    pid = _child_after_parents_death("reaper.close()")
    assert _is_alive(pid)
    os.kill(pid, signal.SIGKILL)
