"""Compiles csrc/ into a shared library on first use and loads it: a few seconds once, then a file in the
user's cache.

The file's name carries a digest of the sources and of every macro the compiler predefines for this CPU, which
tells compilers and instruction sets apart. Processes that build at the same time each rename a finished file
into place.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
MAIN_SOURCE = SOURCES / "cpu_ops.cpp"
# No -ffast-math: the masks and NaN checks must mean what they say. The vector code is explicit and does not
# need it.
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
BUILD_TIMEOUT_S = 300


class BuildError(RuntimeError):
    """No compiler, or it failed; the message says what it printed."""


def load_library() -> ctypes.CDLL:
    """The compiled library, built if the cache has none. BuildError says why there is none."""
    compiler = _find_compiler()
    machine_flag = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [compiler, *FLAGS, machine_flag]
    digest = _digest(command)
    # torch's OpenMP runtime is loaded already and must stay the only one: two pools of threads would fight
    # for the cores. So the library names no runtime of its own, unless torch's does not show its symbols.
    try:
        return ctypes.CDLL(str(_built(command, digest, link_openmp=False)))
    except OSError as error:
        logger.debug("torch's OpenMP runtime cannot be shared (%s); linking the compiler's", error)
    try:
        return ctypes.CDLL(str(_built(command, digest, link_openmp=True)))
    except OSError as error:
        raise BuildError(f"the compiled library does not load: {error}") from error


def cache_dir() -> Path:
    """The folder `kernels` in $DSPARK_CACHE_DIR or ~/.cache/dspark-ray; BuildError for a relative path."""
    named = os.environ.get("DSPARK_CACHE_DIR", "~/.cache/dspark-ray")
    path = Path(named).expanduser()
    if not path.is_absolute():  # it would be another folder for each process
        raise BuildError(f"DSPARK_CACHE_DIR must be an absolute path, not {named!r}")
    return path / "kernels"


def _find_compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C++ compiler: looked for $CXX, g++, c++ and clang++")


def _digest(command: list[str]) -> str:
    macros = _run([*command, "-E", "-dM", "-x", "c++", os.devnull])
    digest = hashlib.sha256(" ".join(command).encode() + macros.encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _built(command: list[str], digest: str, *, link_openmp: bool) -> Path:
    target = cache_dir() / f"cpu_ops-{digest}{'-openmp' if link_openmp else ''}.so"
    if target.exists():
        return target
    started = time.monotonic()
    logger.info("compiling the CPU kernels into %s", target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            compiled, linked = Path(folder) / "cpu_ops.o", Path(folder) / "cpu_ops.so"
            _run([*command, "-c", str(MAIN_SOURCE), "-o", str(compiled)])
            _run(
                [
                    command[0],
                    "-shared",
                    str(compiled),
                    "-o",
                    str(linked),
                    *(["-fopenmp"] if link_openmp else []),
                ]
            )
            linked.replace(target)
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error}") from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started)
    return target


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout
