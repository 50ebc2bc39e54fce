"""A new drafter, or new temperatures of the present one, while the engine serves: tried, kept or dropped.

`build` is slow and for any thread; everything else belongs to the step loop, between steps.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from dspark_ray.core.clock import Clock
from dspark_ray.core.errors import ArtefactError, CheckpointError, ConfigError, RequestError
from dspark_ray.core.types import SwapOrder, SwapState
from dspark_ray.engine.block_pool import BlockPool
from dspark_ray.engine.budget import BudgetPlanner
from dspark_ray.engine.sequence import Sequence
from dspark_ray.engine.trial import DrafterTrial, Verdict
from dspark_ray.models.drafters.base import CalibratedDrafter, Drafter

logger = logging.getLogger(__name__)


class SwappingEngine(Protocol):
    """What of an engine is changed."""

    drafter: Drafter | None
    pool: BlockPool
    budget: BudgetPlanner

    def forget_drafts(self) -> list[Sequence]:
        """Drops every unverified draft; the requests that run."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A loaded drafter and what is to become of it."""

    drafter: Drafter
    order: SwapOrder


BuildDrafter = Callable[[SwapOrder], Drafter]
"""Loads what an order names. Raises `ConfigError`, `CheckpointError` or `ArtefactError`."""


class HotSwap:
    """One trial at a time."""

    def __init__(self, engine: SwappingEngine, build: BuildDrafter, vocab_size: int, clock: Clock) -> None:
        self._engine, self._build, self._vocab_size, self._clock = engine, build, vocab_size, clock
        self._trial: DrafterTrial | None = None
        self._order: SwapOrder | None = None
        self.state = SwapState("none")  # replaced as a whole: other threads may read it

    def build(self, order: SwapOrder) -> Candidate:
        """Raises `RequestError` for a drafter that cannot serve here."""
        current = self._engine.drafter
        if current is None:
            raise RequestError("this engine has no drafter: there is nothing to swap", code="no_drafter")
        if isinstance(current, DrafterTrial):
            raise _busy()
        try:
            if order.path is None:
                return Candidate(_with_temperatures(current, order), order)
            drafter = self._build(order)
        except (ConfigError, CheckpointError, ArtefactError) as error:
            raise RequestError(str(error), param="path", code="invalid_drafter") from error
        if set(drafter.context_digests) & set(current.context_digests):
            raise RequestError(
                "this is the drafter that serves already; name temperatures alone to change those",
                param="path",
                code="invalid_drafter",
            )
        return Candidate(drafter, order)

    def start(self, candidate: Candidate) -> None:
        """The trial begins with the next step. Raises `RequestError` if one is going on."""
        engine, current = self._engine, self._engine.drafter
        assert current is not None
        if self._trial is not None:
            raise _busy()
        self._order = candidate.order
        self._trial = DrafterTrial(
            current,
            candidate.drafter,
            candidate.order.share,
            engine.budget.table,
            self._vocab_size,
            self._clock,
        )
        self._use(self._trial)
        self._publish("trial")
        logger.info("drafter trial: %s", self._trial.describe())

    def tick(self) -> None:
        """After a step: looks whether the trial has come to an end."""
        if self._trial is None or self._order is None or not self._order.automatic:
            return
        verdict = self._trial.look()
        if verdict is Verdict.BETTER:
            self.promote("it yields more tokens in a step's time")
        elif verdict is not Verdict.UNDECIDED:
            self.roll_back(f"it is {verdict.value} than the one before")

    def promote(self, reason: str) -> None:
        """The candidate is the drafter from now on. Raises `RequestError` without a trial."""
        trial = self._current_trial()
        table, ratio = self._engine.budget.table, trial.draft_cost_ratio()
        if table is not None:  # the planner must not go on with the old drafter's costs
            self._engine.budget.table = replace(table, draft_ms=table.draft_ms * ratio)
        self._end(trial, trial.candidate, "promoted", reason)

    def roll_back(self, reason: str) -> None:
        """As if nothing had been. Raises `RequestError` without a trial."""
        trial = self._current_trial()
        self._end(trial, trial.current, "rolled_back", reason)

    def refresh(self) -> None:
        """Figures of a trial that goes on, for those who ask."""
        if self._trial is not None:
            self._publish("trial")

    def _end(self, trial: DrafterTrial, drafter: Drafter, status: str, reason: str) -> None:
        self._publish(status, reason)
        self._trial = None
        self._use(drafter)
        logger.info("drafter trial: %s, because %s: %s", status, reason, self.state.arms)

    def _use(self, drafter: Drafter) -> None:
        """From the next step on. Its drafts are judged by what it says of them, so those of before go."""
        running = self._engine.forget_drafts()
        self._engine.drafter = drafter
        self._engine.pool.keep_contexts(drafter.context_digests)
        for sequence in running:
            known = sequence.context_from
            sequence.context_from = {
                digest: known.get(digest, sequence.num_computed) for digest in drafter.context_digests
            }

    def _current_trial(self) -> DrafterTrial:
        if self._trial is None:
            raise RequestError("no drafter is being tried", status=409, code="no_trial")
        return self._trial

    def _publish(self, status: str, reason: str = "") -> None:
        assert self._trial is not None
        self.state = SwapState(status, self._order, reason, self._trial.stats())


def _with_temperatures(drafter: Drafter, order: SwapOrder) -> Drafter:
    if order.temperatures is None:
        raise ConfigError("name a drafter or temperatures")
    if not isinstance(drafter, CalibratedDrafter):
        raise ConfigError("the drafter that serves has no temperatures: its chances are learnt")
    return drafter.with_temperatures(Path(order.temperatures))


def _busy() -> RequestError:
    return RequestError("a drafter is being tried already: end that first", status=409, code="trial_running")
