"""No vLLM process outlives its engine, however that ends.

vLLM's core is a child process that serves its parent's sockets: if the parent is killed it waits for ever,
with the model in memory. A shell that reads from the parent's pipe sees the parent's end, and kills it.
"""

import multiprocessing
import subprocess

_SCRIPT = 'read -r _; kill -KILL "$@" 2>/dev/null'


class Reaper:
    """Watches this process from another one, for the sake of the children it has now."""

    def __init__(self) -> None:
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "reaper", *pids], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        """The children have ended, or are about to by themselves."""
        self._shell.kill()
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()
