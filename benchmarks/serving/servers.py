"""The servers of a comparison as processes: started, waited for, paused while another is measured, ended."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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

START_TIMEOUT_S = 900.0  # vLLM compiles at its first start
STOP_TIMEOUT_S = 60.0
_SERVE = "from dspark_ray.cli.main import app; app()"  # the installed command, whatever the PATH


class System(Section):
    """One server. Without a `command` it is this project, with `overrides` merged into the base config."""

    name: str
    port: int
    command: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)


class Systems(Section):
    """The whole file; see systems.yaml."""

    model: str
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

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def stop(self) -> None:
        """Asks it to end, then makes it."""
        self.signal(signal.SIGCONT)
        remaining = self.processes()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        for process in remaining:
            if process.is_running():
                process.kill()

    @classmethod
    def start(cls, system: System, base: Path, folder: Path, variables: dict[str, str]) -> Self:
        """The process, not yet ready."""
        slug = system.name.replace(" ", "-")
        config = folder / f"{slug}.yaml"
        command = _own_command(system, base, config)
        if system.command is not None:
            text = _filled(system.command, variables).format(port=system.port, config=config)
            command = shlex.split(text)
        log = folder / f"{slug}.log"
        environment = {**os.environ, **{k: _filled(v, variables) for k, v in system.environment.items()}}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        return cls(system, process, log)


@contextmanager
def running(systems: list[System], base: Path, variables: dict[str, str]) -> Iterator[list[Server]]:
    """All systems, ready and paused. They start one after another: two that start together measure badly."""
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="servers-") as folder:
        try:
            for system in systems:
                print(f"starting {system.name}", flush=True)
                server = Server.start(system, base, Path(folder), variables)
                servers.append(server)
                server.wait_until_ready()
                server.signal(signal.SIGSTOP)
            yield servers
        finally:
            for server in servers:
                server.stop()


@contextmanager
def awake(server: Server) -> Iterator[None]:
    """Only this server runs; the others hold their memory and nothing else."""
    server.signal(signal.SIGCONT)
    try:
        yield
    finally:
        server.signal(signal.SIGSTOP)


def load_systems(path: Path, names: list[str] | None) -> tuple[Path, list[System]]:
    """The base config and the systems called `names` (all: None); `ConfigError` for an unknown one."""
    file = Systems.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    known = {system.name: system for system in file.systems}
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise ConfigError(f"{path} has no {', '.join(unknown)}; it has {', '.join(known)}")
    return Path(file.model), [known[name] for name in names or known]


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


def _filled(text: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    return text
