"""Runs a Serve config until SIGINT or SIGTERM, as `serve run CONFIG` does; a failed deployment ends it.

    python -m deployments.run configs/smollm2-135m-cpu.yaml [PORT]

`dspark-ray serve` starts this as its child. With RAY_ADDRESS set it deploys to that cluster. The exit status
is 1 if an application could not be deployed, with the reason in one line on stderr; else 0.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import ray
import yaml
from ray import serve
from ray.serve._private import api as private_api  # what `serve run` calls: there is no public counterpart
from ray.serve.config import gRPCOptions
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeDeploySchema

from dspark_ray.core.errors import DsparkError

NAMESPACE = "serve"
_POLL_S = 1.0
_FAILED = ("UNHEALTHY", "DEPLOY_FAILED")


class DeployError(DsparkError):
    """An application that will not run."""


def main(path: Path, port: int | None = None) -> int:
    """Deploys and waits; the exit status. `port` replaces the config's."""
    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    if port is not None:
        config.http_options.port = port
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failure = None
    try:
        _deploy(config)
        _wait_until_running([application.name for application in config.applications])
        while True:
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        pass
    except DeployError as error:
        failure = str(error)
    finally:
        signal.signal(signal.SIGTERM, _leave)  # a second signal does not wait for running requests
        if ray.is_initialized():
            serve.shutdown()
    if failure is not None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"error: {failure}", file=sys.stderr, flush=True)
    return 0 if failure is None else 1


def failure_of(name: str, application: ApplicationStatusOverview) -> str:
    """One line: what the first failed deployment says last, or the application itself."""
    deployments = application.deployments.values()
    messages = [deployment.message for deployment in deployments if deployment.status.value in _FAILED]
    texts = [message for message in (*messages, application.message) if message.strip()]
    reason = texts[0].strip().splitlines()[-1].strip() if texts else "no reason was given"
    return f"application {name!r} could not be deployed: {reason}"


def _deploy(config: ServeDeploySchema) -> None:
    """Starts Ray and Serve with the config's options, and hands the config to Serve's controller."""
    # Not whatever cluster was started last on this machine: it may be gone, or not ours.
    ray.init(address=os.environ.get("RAY_ADDRESS", "local"), namespace=NAMESPACE)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # again: Ray has set its own
    client = private_api.serve_start(
        http_options=config.http_options.model_dump(),
        proxy_location=config.proxy_location,
        grpc_options=gRPCOptions(**config.grpc_options.model_dump()),
        controller_options=config.controller_options,
    )
    client.deploy_apps(config, _blocking=False)


def _wait_until_running(names: Sequence[str]) -> None:
    """Raises `DeployError` for the first application that fails."""
    while True:
        known = serve.status().applications
        for name in names:
            if name in known and known[name].status == ApplicationStatus.DEPLOY_FAILED:
                raise DeployError(failure_of(name, known[name]))
        if all(name in known and known[name].status == ApplicationStatus.RUNNING for name in names):
            return
        time.sleep(_POLL_S)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # through Ray's exit handler, which ends a local cluster


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:3])))
