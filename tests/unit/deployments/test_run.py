"""`deployments.run` without a cluster: when it ends, with which status, and what it says."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from deployments import run

CONFIG = "applications: [{name: app, import_path: 'a:b'}]"


def application(status: ApplicationStatus, message: str = "", **deployments: tuple[str, str]) -> Any:
    states = {
        name: SimpleNamespace(status=SimpleNamespace(value=value), message=text)
        for name, (value, text) in deployments.items()
    }
    return SimpleNamespace(status=status, message=message, deployments=states)


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Runs `main` while Serve tells the given states, then Ctrl-C; exit status and what was called."""
    calls: list[str] = []
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)

    def start(*states: Any) -> tuple[int, list[str]]:
        told = iter(states)

        def sleep(seconds: float) -> None:
            calls.append("sleep")
            if len(calls) > 5:
                raise KeyboardInterrupt

        def deploy(config: ServeDeploySchema) -> None:
            calls.append(config.applications[0].name)

        monkeypatch.setattr(run, "_deploy", deploy)
        monkeypatch.setattr(run.time, "sleep", sleep)
        monkeypatch.setattr(run.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(run.serve, "shutdown", lambda: calls.append("shutdown"))
        monkeypatch.setattr(run.serve, "status", lambda: SimpleNamespace(applications={"app": next(told)}))
        return run.main(path), calls

    return start


def test_a_failed_deployment_ends_it(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trace = "Traceback:\n ...\nCheckpointError: no drafter\n"
    failed = application(
        ApplicationStatus.DEPLOY_FAILED,
        "The deployments are UNHEALTHY.",
        Ingress=("UPDATING", ""),
        LLMServer=("DEPLOY_FAILED", trace),
    )
    status, calls = start(application(ApplicationStatus.DEPLOYING), failed)
    assert (status, calls) == (1, ["app", "sleep", "shutdown"])
    message = "error: application 'app' could not be deployed: CheckpointError: no drafter\n"
    assert capsys.readouterr().err == message


def test_a_builder_that_fails_is_quoted(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(application(ApplicationStatus.DEPLOY_FAILED, "Traceback\nConfigError: wrong"))[0] == 1
    assert capsys.readouterr().err.endswith("could not be deployed: ConfigError: wrong\n")


def test_it_runs_until_it_is_asked_to_end(start: Any) -> None:
    status, calls = start(application(ApplicationStatus.DEPLOYING), application(ApplicationStatus.RUNNING))
    assert status == 0
    assert calls == ["app", *["sleep"] * 5, "shutdown"]
