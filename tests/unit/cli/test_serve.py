"""`serve` without Ray: addresses, a taken port, and who gets which signal when."""

import io
import signal
import socket
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from dspark_ray.cli import serve
from dspark_ray.cli.serve import HttpAddress, check_port_is_free, read_address
from dspark_ray.core.errors import ConfigError


def test_address_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("applications: []")
    assert read_address(path) == HttpAddress("127.0.0.1", 8000)
    path.write_text("http_options: {host: 0.0.0.0, port: 8123}")
    assert read_address(path).url == "http://127.0.0.1:8123"
    path.write_text("{http_options: {host: '::1'}, applications: [{route_prefix: /llm/}]}")
    assert read_address(path).url == "http://[::1]:8000/llm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http_options: {port: http}", r"http_options\.port.*'http'"),
        ("http_options: {port: 70000}", r"http_options\.port.*70000"),
        ("http_options: [8000]", "must be a mapping"),
        ("applications: [{route_prefix: llm}]", "route_prefix.*'llm'"),
    ],
)
def test_an_address_that_cannot_work(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_address(path)


def test_a_taken_port_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(self: socket.socket, address: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", taken)
    with pytest.raises(ConfigError, match=r"8000 \(Address already in use\).*RAY_ADDRESS"):
        check_port_is_free(HttpAddress("127.0.0.1", 8000))


class FakeChild:
    """Ends some polls after it got the signal that it obeys."""

    def __init__(self, obeys: int | None, *, ends_with: int = 0, after_polls: int = 3) -> None:
        self.signals: list[int] = []
        self._obeys, self._ends_with, self._polls = obeys, ends_with, after_polls

    def poll(self) -> int | None:
        if self._obeys is None or self._obeys in self.signals:
            self._polls -= 1
        return self._ends_with if self._polls <= 0 else None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class Stop:
    """Counts one more request to stop each time it is looked at, up to `times`."""

    def __init__(self, times: int) -> None:
        self._times, self._seen = times, 0

    @property
    def count(self) -> int:
        self._seen = min(self._times, self._seen + 1)
        return self._seen


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_POLL_S", 0.0)
    monkeypatch.setattr(serve, "_READY_POLL_S", 0.0)


def watch(child: FakeChild, stops: int) -> int:
    return serve._watch(child, Stop(stops))  # type: ignore[arg-type]


def test_the_first_stop_is_polite() -> None:
    child = FakeChild(signal.SIGINT, ends_with=-2)
    assert watch(child, 1) == 0
    assert child.signals == [signal.SIGINT]


def test_later_stops_are_not() -> None:
    child = FakeChild(signal.SIGKILL, ends_with=-9)
    assert watch(child, 3) == 0
    assert child.signals == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


def test_a_child_that_ends_by_itself_gives_its_status() -> None:
    assert watch(FakeChild(None, ends_with=3), 0) == 3


def test_ready_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answers = iter([httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(200)])

    def get(url: str, **options: object) -> httpx.Response:
        assert url == "http://127.0.0.1:8000/llm/ready"
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dspark-ray").write_text("")
    serve._announce(HttpAddress("127.0.0.1", 8000, "/llm"), "m")
    shown = capsys.readouterr().err
    assert shown.count("ready at http://127.0.0.1:8000/llm/v1") == 1
    assert "curl http://127.0.0.1:8000/llm/v1/chat/completions" in shown
    assert f"{tmp_path}/bin/dspark-ray chat --url http://127.0.0.1:8000/llm" in shown


def test_signals_are_counted_and_handlers_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with serve._StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGHUP)
            assert signals.count == 3
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serve._StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), BrokenPipeError()])
def test_a_terminal_that_is_gone_costs_nothing(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    monkeypatch.setattr(serve, "err", Console(file=Gone()))
    monkeypatch.setattr("os.dup2", lambda *_: None)  # rich points a broken stdout at nothing
    assert watch(FakeChild(signal.SIGINT), 1) == 0


def test_ray_gets_a_token_where_it_can_keep_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "RAY_AUTH_TOKEN" not in serve._environment()
    monkeypatch.setattr("os.access", lambda *_: False)
    environment = serve._environment()
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) >= 32
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_TOKEN" not in serve._environment()


def test_haproxy_gets_ports_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "free_ports", lambda count: list(range(9000, 9000 + count)))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", "8404")  # the user's own stays
    environment = serve._environment()
    ports = {
        value
        for name, value in environment.items()
        if name.startswith("RAY_SERVE_") and name.endswith("_PORT")
    }
    assert ports == {"9000", "9001", "9002", "8404"}
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert serve._haproxy_ports() == {}
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY")
    monkeypatch.delenv("RAY_ADDRESS")
    assert serve._haproxy_ports() == {}
