"""`dspark-ray serve CONFIG`: deploys CONFIG, says when it is ready, and ends it cleanly.

The configuration is checked first, so that a wrong key is one line here and not a failing replica. Ray
runs in a child process of its own session (`deployments.run`): one Ctrl-C reaches this process only, which
then asks the child to shut the application down; a second one ends it at once.
"""

import contextlib
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.markup import escape

from dspark_ray.cli.common import PROJECT_DIR, err, load_config

_POLL_S = 0.3
_READY_POLL_S = 1.0
_PATIENCE_S = 600.0
_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # how a client on this machine reaches them
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where Serve's proxy listens, and the path below which the application answers."""

    host: str
    port: int
    route_prefix: str = "/"

    @property
    def url(self) -> str:
        """The application's base URL for a client on this machine, without a slash at its end."""
        host = _WILDCARD_HOSTS.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}{self.route_prefix.rstrip('/')}"


def serve(
    config: Annotated[Path, typer.Argument(help="A Serve config, e.g. configs/smollm2-135m-cpu.yaml.")],
    port: Annotated[
        int | None, typer.Option(min=1, max=_MAX_PORT, help="Instead of the config's http_options.port.")
    ] = None,
) -> None:
    """Serve the model of CONFIG over an OpenAI-compatible API until Ctrl-C.

    The same as `serve run CONFIG`, with the configuration checked first and a line that says
    when the server answers. With RAY_ADDRESS set it deploys to that cluster.
    """
    from dspark_ray.preflight.check import require_sound

    checked = load_config(config)
    require_sound(checked)
    address = read_address(config)
    if port is not None:
        address = replace(address, port=port)
    if "RAY_ADDRESS" not in os.environ:
        check_port_is_free(address)
    _say(f"starting {checked.model.id} ({checked.speculation.mode}) from {config}")
    command = [sys.executable, "-m", "deployments.run", str(config), *([] if port is None else [str(port)])]
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
    """`http_options` and the first application's route of a config, with Serve's defaults; `ConfigError`."""
    import yaml

    from dspark_ray.core.errors import ConfigError

    document: dict[str, Any] = yaml.safe_load(config.read_text(encoding="utf-8"))
    options = document.get("http_options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"http_options must be a mapping, not {options!r}")
    port = options.get("port", 8000)
    if type(port) is not int or not 1 <= port <= _MAX_PORT:
        raise ConfigError(f"http_options.port must be a number from 1 to {_MAX_PORT}, not {port!r}")
    applications: list[dict[str, Any]] = document.get("applications") or [{}]
    route_prefix = applications[0].get("route_prefix", "/")
    if not isinstance(route_prefix, str) or not route_prefix.startswith("/"):
        raise ConfigError(f"route_prefix must be a path that begins with '/', not {route_prefix!r}")
    return HttpAddress(str(options.get("host", "127.0.0.1")), port, route_prefix)


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
                "or choose another --port; to deploy to a running Ray cluster set RAY_ADDRESS"
            ) from error


def _environment() -> dict[str, str]:
    """The project is importable in Ray's processes even when it is run from its folder, not installed."""
    paths = [str(PROJECT_DIR), str(PROJECT_DIR / "kernels"), os.environ.get("PYTHONPATH", "")]
    # Ray lowers its workers' priority (nice 15) and gives Serve's proxy 5 s to start: on a small machine an
    # engine would then run behind everything else, and a slow start would be taken for a failure. And a dead
    # proxy is replaced after three checks, ten seconds apart by default: nobody is served meanwhile.
    defaults = {
        "RAY_worker_niceness": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy.middlewares",
    }
    python_path = os.pathsep.join(path for path in paths if path)
    return {**defaults, **_haproxy_ports(), **_ray_token(), **os.environ, "PYTHONPATH": python_path}


def _haproxy_ports() -> dict[str, str]:
    """Free ports for HAProxy, where the user puts it in front of the ingress: Ray's own are fixed, and two
    servers could not run on one machine.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1" or "RAY_ADDRESS" in os.environ:
        return {}
    names = ("FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC", "HAPROXY_METRICS", "HAPROXY_STATS")
    ports = zip(names, free_ports(len(names)), strict=True)
    return {f"RAY_SERVE_{name}_PORT": str(port) for name, port in ports}


def free_ports(count: int) -> list[int]:
    """Different ones on which nothing listens now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _ray_token() -> dict[str, str]:
    """A token for Ray where it could keep none: it wants one, and writes it to the home folder."""
    told = any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if told or "RAY_ADDRESS" in os.environ:  # a running cluster has its own
        return {}
    folder = Path.home() / ".ray"
    existing = folder if folder.exists() else folder.parent
    if (folder / "auth_token").is_file() or os.access(existing, os.W_OK | os.X_OK):
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _say(text: str, **options: Any) -> None:
    """A line on stderr, unless the terminal is gone: then rich raises one or the other of these."""
    with contextlib.suppress(OSError, SystemExit):
        err.print(text, **options)


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
    """First politely (the child shuts the application down on SIGINT), then less so."""
    if times_asked == 1:
        _say("shutting down (again to stop waiting for running requests)")
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
    url = escape(address.url)  # an IPv6 address has brackets
    _say(f"\n[bold green]ready[/bold green] at [bold]{url}/v1[/bold]   try, in another terminal:")
    _say(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", soft_wrap=True)
    _say(f"  {escape(_command())} chat --url {url}\n", soft_wrap=True)


def _command() -> str:
    """This program as another terminal finds it, where the virtual environment is not active."""
    installed = Path(sys.executable).with_name("dspark-ray")
    return shlex.quote(str(installed)) if installed.exists() else "dspark-ray"


class _StopSignals(AbstractContextManager["_StopSignals"]):
    """Counts SIGINT, SIGTERM and SIGHUP (the terminal was closed) instead of dying from them."""

    def __enter__(self) -> "_StopSignals":
        self.count = 0
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it ignored
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
