"""`dspark-ray serve CONFIG`: runs `serve run CONFIG`, says when it is ready, and ends it cleanly.

The configuration is checked first, so that a wrong key is one line here and not a failing replica. Ray
runs in a child process of its own session: one Ctrl-C reaches this process only, which then asks the child to
shut the application down; a second one ends it at once.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from dspark_ray.cli.common import PROJECT_DIR, err, load_config

_POLL_S = 0.3
_READY_POLL_S = 1.0
_PATIENCE_S = 600.0
_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # how a client on this machine reaches them


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where Serve's proxy listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{_WILDCARD_HOSTS.get(self.host, self.host)}:{self.port}"


def serve(
    config: Annotated[Path, typer.Argument(help="A Serve config, e.g. configs/smollm2-135m-cpu.yaml.")],
) -> None:
    """Serve the model of CONFIG over an OpenAI-compatible API until Ctrl-C.

    The same as `serve run CONFIG`, with the configuration checked first and a line that says
    when the server answers. With RAY_ADDRESS set it deploys to that cluster.
    """
    checked = load_config(config)
    address = read_address(config)
    if "RAY_ADDRESS" not in os.environ:
        check_port_is_free(address)
    err.print(f"starting {checked.model.id} ({checked.speculation.mode}) from {config}")
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(config)]
    with _StopSignals() as signals:  # before the child, which must not inherit an ignored SIGINT
        child = subprocess.Popen(command, start_new_session=True, env=_environment())
        probe = threading.Thread(target=_announce, args=(address, checked.model.id), daemon=True)
        probe.start()
        try:
            status = _watch(child, signals)
        finally:
            if child.poll() is None:
                child.kill()
    raise typer.Exit(status)


def read_address(config: Path) -> HttpAddress:
    """`http_options` of a Serve config that was loaded before, with Serve's defaults."""
    import yaml

    options: dict[str, Any] = yaml.safe_load(config.read_text(encoding="utf-8")).get("http_options") or {}
    return HttpAddress(str(options.get("host", "127.0.0.1")), int(options.get("port", 8000)))


def check_port_is_free(address: HttpAddress) -> None:
    """`ConfigError` if another process listens there: Ray's own message comes late and looks like a bug."""
    from dspark_ray.core.errors import ConfigError

    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address.host}:{address.port} ({error.strerror}): stop the other server "
                "or change http_options in the config; to deploy to a running Ray cluster set RAY_ADDRESS"
            ) from error


def _environment() -> dict[str, str]:
    """The project is importable in Ray's processes even when it is run from its folder, not installed."""
    paths = [str(PROJECT_DIR), str(PROJECT_DIR / "kernels"), os.environ.get("PYTHONPATH", "")]
    # Ray lowers its workers' priority (nice 15) and gives Serve's proxy 5 s to start: on a small machine an
    # engine would then run behind everything else, and a slow start would be taken for a failure.
    defaults = {"RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _watch(child: "subprocess.Popen[bytes]", signals: "_StopSignals") -> int:
    """Until the child has ended; its exit status, 0 when it was asked to end."""
    asked = 0
    while (status := child.poll()) is None:
        time.sleep(_POLL_S)
        if (times := signals.count) > asked:
            asked = times
            _end(child, asked)
    return 0 if asked else status


def _end(child: "subprocess.Popen[bytes]", times_asked: int) -> None:
    """First politely (`serve run` shuts the application down on SIGINT), then less so."""
    if times_asked == 1:
        err.print("shutting down (again to stop waiting for running requests)")
        child.send_signal(signal.SIGINT)
    else:
        child.send_signal(signal.SIGTERM if times_asked == 2 else signal.SIGKILL)


def _announce(address: HttpAddress, model_id: str) -> None:
    """Says once that the server is ready; ends with the process if it never is."""
    import httpx

    # The proxy keeps a request until a replica can answer: asking patiently fills no log with hang-ups.
    timeout = httpx.Timeout(_PATIENCE_S, connect=_READY_POLL_S)
    while True:
        try:
            if httpx.get(f"{address.url}/ready", timeout=timeout, trust_env=False).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(_READY_POLL_S)
    body = f'{{"model": "{model_id}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    err.print(
        f"\n[bold green]ready[/bold green] at [bold]{address.url}/v1[/bold]   try, in another terminal:"
    )
    err.print(f"  curl {address.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
              soft_wrap=True)  # fmt: skip
    err.print(f"  dspark-ray chat --url {address.url}\n")


class _StopSignals(AbstractContextManager["_StopSignals"]):
    """Counts SIGINT and SIGTERM instead of dying from them."""

    def __enter__(self) -> "_StopSignals":
        self.count = 0
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
