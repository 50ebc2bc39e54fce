"""Swapping the drafter while serving: every replica tries the new one, and keeps or drops it by itself."""

import uuid
from dataclasses import asdict, replace
from typing import Any, Protocol

from pydantic import Field, model_validator

from dspark_ray.core.config import HotSwapConfig
from dspark_ray.core.types import SwapOrder, SwapState
from dspark_ray.serving.body import Body
from dspark_ray.serving.folders import MAX_PATH, below


class SwappingEngines(Protocol):
    """The engines that run now. All methods raise the error of one that refuses."""

    async def load_drafter(self, order: SwapOrder) -> None:
        """Begins a trial on each, or on none."""
        ...

    async def end_trial(self, promote: bool) -> None: ...

    async def swap_states(self) -> dict[str, SwapState]:
        """By replica."""
        ...


class SwapDrafter(Body):
    """`POST /v1/drafter/swap`."""

    path: str | None = Field(
        None, max_length=MAX_PATH, description="None: the present drafter, new temperatures"
    )
    temperatures: str | None = Field(None, max_length=MAX_PATH)
    kind: str | None = Field(None, max_length=64, description="None: the present drafter's")
    share: float = Field(0.1, gt=0.0, lt=1.0, description="of the requests, during the trial")
    automatic: bool = Field(True, description="promoted or rolled back by its figures; false: by hand")

    @model_validator(mode="after")
    def _check(self) -> "SwapDrafter":
        if self.path is None and self.temperatures is None:
            raise ValueError("name a drafter (path) or temperatures")
        return self


def swap_order(fields: SwapDrafter, config: HotSwapConfig) -> SwapOrder:
    """Raises `RequestError` for files outside `load_from`."""
    order = SwapOrder(None, None, fields.kind, fields.share, fields.automatic, uuid.uuid4().hex)
    if fields.path is not None:
        order = replace(order, path=str(below(config.load_from, fields.path, "path")))
    if fields.temperatures is not None:
        found = below(config.load_from, fields.temperatures, "temperatures")
        order = replace(order, temperatures=str(found))
    return order


def states_body(states: dict[str, SwapState]) -> dict[str, Any]:
    """How the trial goes on each replica."""
    return {"replicas": [{"id": name, **asdict(state)} for name, state in sorted(states.items())]}
