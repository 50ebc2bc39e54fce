"""The servers of a comparison as processes: started, waited for, paused while another is measured, ended."""

import json
import os
import shlex
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import yaml
from pydantic import Field

from dspark_ray.core.errors import ConfigError, DsparkError
from dspark_ray.core.section import Section
from dspark_ray.profiling.load import find_model

START_TIMEOUT_S = 900.0  # vLLM compiles at its first start
STOP_TIMEOUT_S = 60.0
SETTLE_S = 3.0  # after a start or a pause: timers that ran out meanwhile all fire at once
_AT_REST = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_MADE_LATER = {"PORT", "CONFIG"}
_SERVE = "from dspark_ray.cli.main import app; app()"  # the installed command, whatever the PATH


class System(Section):
    """One server. Without a `command` it is this project, with `overrides` merged into the base config."""

    name: str
    port: int
    command: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    model: str | None = None  # in requests; None: the first one that it lists
    body: dict[str, Any] = Field(default_factory=dict)  # more of each request
    most_requests: int | None = None  # in flight at once that it can work on together
    count_texts: bool = False  # its tokens are counted in its texts, since its usage is wrong
    version: str | None = None  # a command that prints it; None: this project's


class Systems(Section):
    """The whole file; see systems.yaml."""

    model: str
    variables: dict[str, str] = Field(default_factory=dict)
    systems: tuple[System, ...]


class ServerError(DsparkError):
    """A server did not start, or ended."""


@dataclass(slots=True)
class Server:
    """A running system. Its processes share one session, so that all of them are found."""

    system: System
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.system.port}"

    @property
    def model(self) -> str:
        """Its name in requests."""
        return self.system.model or find_model(self.url)

    def wait_until_ready(self) -> None:
        """Returns once a request is answered; `ServerError` with the end of the log otherwise."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/v1/models", timeout=5.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(1.0)
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise ServerError(f"{self.system.name} does not answer on port {self.system.port}:\n{tail}")

    def processes(self) -> list[psutil.Process]:
        """All its processes, the first one included."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, summed over the processes of each name."""
        seconds: dict[str, float] = {}
        for process in self.processes():
            try:
                times = process.cpu_times()
                seconds[process.name()] = seconds.get(process.name(), 0.0) + times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return seconds

    def memory_mb(self) -> float:
        """Of all processes; what they share counts once."""
        total = 0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return round(total / 2**20)

    def pause(self) -> None:
        """No process of it runs any more; it keeps its memory."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while running := [p for p in self.processes() if _status(p) not in _AT_REST]:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.system.name}: {running[0]} does not stop")
            for process in running:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """All of them go on."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Asks it to end, then makes it."""
        self.resume()
        remaining = self.processes()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        for process in remaining:
            if process.is_running():
                process.kill()

    @classmethod
    def start(cls, system: System, base: Path, folder: Path) -> Self:
        """The process, not yet ready."""
        slug = system.name.replace(" ", "-")
        config = folder / f"{slug}.yaml"
        command = _own_command(system, base, config)
        if system.command is not None:
            command = shlex.split(_filled(system.command, {"PORT": str(system.port), "CONFIG": str(config)}))
        log = folder / f"{slug}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **system.environment},
                start_new_session=True,
            )
        return cls(system, process, log)


@contextmanager
def running(systems: Sequence[System], base: Path) -> Iterator[list[Server]]:
    """All systems, ready and paused. They start one after another: two that start together measure badly."""
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="servers-") as folder:
        try:
            for system in systems:
                print(f"starting {system.name}", flush=True)
                server = Server.start(system, base, Path(folder))
                servers.append(server)
                server.wait_until_ready()
                time.sleep(SETTLE_S)
                server.pause()
            yield servers
        finally:
            for server in servers:
                server.stop()


@contextmanager
def awake(server: Server) -> Iterator[None]:
    """Only this server runs; the others hold their memory and nothing else."""
    server.resume()
    time.sleep(SETTLE_S)
    server.wait_until_ready()  # a watcher may restart a part that it found silent: HAProxy's does
    try:
        yield
    finally:
        server.pause()


def load_systems(
    path: Path, names: Sequence[str] | None, variables: Mapping[str, str]
) -> tuple[Path, list[System]]:
    """The base config and the systems called `names` (all: None), `variables` and the environment filled in.

    One with a variable that nobody has set is left out, with a note. `ConfigError` for an unknown name.
    """
    file = Systems.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    known = {system.name: system for system in file.systems}
    if unknown := [name for name in names or [] if name not in known]:
        raise ConfigError(f"{path} has no {', '.join(unknown)}; it has {', '.join(known)}")
    values = {"TRANSFORMERS_VENV": sys.prefix, **file.variables, **os.environ, **variables}
    chosen = []
    for name in names or known:
        text = _filled(known[name].model_dump_json(), {k: json.dumps(v)[1:-1] for k, v in values.items()})
        missing = sorted(set(string.Template(text).get_identifiers()) - _MADE_LATER)
        if missing:
            print(f"left out: {name} ({', '.join(missing)} not set)")
        else:
            chosen.append(System.model_validate_json(text))
    return Path(file.model), chosen


def version_of(system: System) -> str | None:
    """The last line that its version command prints."""
    if system.version is None:
        return None
    done = subprocess.run(shlex.split(system.version), capture_output=True, text=True, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return next((line for line in lines if "version" in line), lines[-1] if lines else None)


def _own_command(system: System, base: Path, config: Path) -> list[str]:
    """Writes `config`: the base with the system's overrides and port."""
    document = yaml.safe_load(base.read_text(encoding="utf-8"))
    document["http_options"]["port"] = system.port
    _merge(document["applications"][0]["args"], system.overrides)
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    return [sys.executable, "-c", _SERVE, "serve", str(config)]


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _filled(text: str, variables: Mapping[str, str]) -> str:
    return string.Template(text).safe_substitute(variables)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
