"""`dspark-ray swap-drafter`: a new drafter on a running server, tried on a share of its requests."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_ray.cli.common import out
from dspark_ray.core.env import client_headers
from dspark_ray.core.errors import ConfigError

if TYPE_CHECKING:
    import httpx

_LOOK_S = 2.0


def swap_drafter(
    path: Annotated[
        str | None, typer.Argument(help="Checkpoint, below the server's speculation.hot_swap.load_from.")
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="Calibration of it, or without PATH of the present drafter.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="If it is another kind than the present one.")] = None,
    share: Annotated[float, typer.Option(help="Of the requests, during the trial.")] = 0.1,
    manual: Annotated[bool, typer.Option(help="Wait for --promote or --roll-back.")] = False,
    promote: Annotated[bool, typer.Option("--promote", help="End the trial: keep the new one.")] = False,
    roll_back: Annotated[bool, typer.Option("--roll-back", help="End the trial: keep the old one.")] = False,
    wait: Annotated[bool, typer.Option(help="Until every replica has decided.")] = False,
    url: Annotated[str, typer.Option(help="A running server.", metavar="URL")] = "http://127.0.0.1:8000",
) -> None:
    """Try a new drafter, or new temperatures, on a running server; without arguments, show how it goes."""
    import httpx

    starts = path is not None or temperatures is not None
    if starts + promote + roll_back > 1:
        raise ConfigError("start a trial, or end one with --promote or --roll-back: not both at once")
    base = url.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=base, timeout=600.0, headers=client_headers()) as client:
        if starts:
            body = {"path": path, "temperatures": temperatures, "kind": kind, "share": share}
            given = {key: value for key, value in body.items() if value is not None}
            states = _ask(client, "POST", "/swap", {**given, "automatic": not manual})
        elif promote or roll_back:
            states = _ask(client, "POST", "/promote" if promote else "/roll_back", {})
        else:
            states = _ask(client, "GET", "")
        while wait and any(state["status"] == "trial" for state in states):
            time.sleep(_LOOK_S)
            states = _ask(client, "GET", "")
    for state in states:
        out.print("\n".join(describe(state)), markup=False, highlight=False)


def describe(state: dict[str, Any]) -> list[str]:
    """A replica's trial in lines."""
    reason = f": {state['reason']}" if state["reason"] else ""
    lines = [f"{state['id']}: {state['status']}{reason}"]
    for name, arm in zip(("before", "candidate"), state["arms"], strict=False):
        lines.append(
            f"  {name:9} τ {arm['tau']:.2f} on {arm['num_drafts']} drafts, step {arm['step_ms']:.1f} ms, "
            f"{arm['tokens_per_ms']:.4f} tokens/ms: {arm['description']}"
        )
    return lines


def _ask(
    client: "httpx.Client", method: str, route: str, body: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    import httpx

    try:
        response = client.request(method, "/v1/drafter" + route, json=body)
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(
            f"{client.base_url} does not answer as a server of this program: {error}"
        ) from error
    if response.status_code == 404:
        raise ConfigError("this server swaps no drafters: set speculation.hot_swap.load_from")
    if response.status_code != 200:
        raise ConfigError(f"the server refuses: {answer['error']['message']}")
    return list(answer["replicas"])
