"""vLLM's side of central scheduling: a `vllm.general_plugins` entry point.

vLLM calls `register` in each of its processes. In those of an engine of this program that verifies adaptively
it wraps four methods; in all others it does nothing:

- `Scheduler.schedule` (the core) attaches the live plan's terms to its output, which travels to all ranks;
- `GPUModelRunner.gather_batch_req_state` (each rank) hands them to its `AdaptiveVerificationManager`;
- `AdaptiveVerificationManager.get_num_tokens`, where vLLM chooses the budget of a step by a full search over
  confidences at least two steps old: the same search, under the terms' limit. The first rank reports those
  confidences;
- `AdaptiveVerificationManager.set_cost_curves`: the curves are the reports' step table.

Without a live plan vLLM's choice stands, untouched. Nothing here reads the current block's confidences, so
the budget stays non-anticipating (scheduling/lengths.py, "Losslessness").
"""

import functools
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.errors import ConfigError
from dspark_ray.scheduling.newest_plan import NewestPlan
from dspark_ray.scheduling.step_table import Float64Array, StepTable
from dspark_ray.scheduling.survival import survival
from dspark_ray.vllm_engine.link import CoreReport, LinkAddresses, PlanReceiver, ReportSender
from dspark_ray.vllm_engine.terms import Limit, RankBudget, StepTerms
from dspark_ray.vllm_engine.version import require_vllm

REPORT_PERIOD_MS = 100.0
ENTRY_POINT = "dspark-ray"  # its name in the group, which VLLM_PLUGINS may leave out
GROUP = "vllm.general_plugins"
_TERMS = "dspark_terms"  # on a `SchedulerOutput`
_RANK = "dspark_rank"  # on an `AdaptiveVerificationManager`
_MARK = "dspark_wrapped"  # on a method

# What is wrapped, with the parameters that it must have, and what is read of a manager.
_SIGNATURES = {
    "Scheduler.schedule": ("self",),
    "GPUModelRunner.gather_batch_req_state": ("self", "scheduler_output", "dummy_run"),
    "AdaptiveVerificationManager.get_num_tokens": ("self", "num_tokens_per_req", "draft_tokens"),
    "AdaptiveVerificationManager.set_cost_curves": ("self", "draft_curve", "verify_curve"),
}
_ATTRIBUTES = (
    "req_states",
    "num_speculative_steps",
    "num_bonus_tokens",
    "cost_tables",
    "_cudagraph_limit",
    "_max_total_logits",
    "_stale_confidences",
    "_stale_idx",
    "_batch_budget",
)


def is_loaded_by_vllm() -> bool:
    """Whether vLLM finds the entry point: this program is installed, not only on the path."""
    found = {one.name for one in importlib.metadata.entry_points(group=GROUP)}
    allowed = os.environ.get("VLLM_PLUGINS")
    return ENTRY_POINT in found and (allowed is None or ENTRY_POINT in allowed.split(","))


def register() -> None:
    """What vLLM calls, perhaps more than once. Raises `ConfigError` for a vLLM that it was not made for."""
    addresses = LinkAddresses.from_environment()
    if addresses is None:
        return
    version = require_vllm()
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    if hasattr(Scheduler.schedule, _MARK):
        return
    check_signatures((Scheduler, GPUModelRunner, AdaptiveVerificationManager), version)
    core = CoreSide(lambda: PlanReceiver(addresses.plans))
    _wrap(Scheduler, "schedule", core.schedule)
    _wrap(GPUModelRunner, "gather_batch_req_state", _hand_over)

    def rank_of(manager: Any) -> RankSide:
        side = getattr(manager, _RANK, None)
        if side is None:
            is_first = get_tp_group().rank_in_group == 0
            side = RankSide(manager, version, ReportSender(addresses.reports) if is_first else None)
            setattr(manager, _RANK, side)
        return side

    _wrap(
        AdaptiveVerificationManager,
        "get_num_tokens",
        lambda original, manager, *args, **kwargs: rank_of(manager).get_num_tokens(original, *args, **kwargs),
    )
    _wrap(
        AdaptiveVerificationManager,
        "set_cost_curves",
        lambda original, manager, *args, **kwargs: rank_of(manager).set_cost_curves(
            original, *args, **kwargs
        ),
    )


class CoreSide:
    """In the process of vLLM's scheduler."""

    def __init__(self, connect: Callable[[], PlanReceiver], clock: Clock | None = None) -> None:
        """`connect` is called at the first step: other processes register too, and step never."""
        self._connect = connect
        self._clock = clock or SystemClock()
        self._plans: PlanReceiver | None = None
        self._newest = NewestPlan()

    def schedule(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """`Scheduler.schedule`, its output with the terms of the plan that holds now."""
        output = original(scheduler, *args, **kwargs)
        if (terms := self._terms()) is not None:
            setattr(output, _TERMS, terms)
        return output

    def _terms(self) -> StepTerms | None:
        if self._plans is None:
            self._plans = self._connect()
        now_ms = self._clock.now_ms()
        if (plan := self._plans.newest()) is not None:
            self._newest.offer(plan, now_ms)
        held = self._newest.at(now_ms)
        return None if held is None else StepTerms.of(held, now_ms)


def _hand_over(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, dummy_run: bool, **kwargs: Any
) -> Any:
    """`GPUModelRunner.gather_batch_req_state`, which calls `get_num_tokens`."""
    manager = runner.adaptive_verification
    if manager is not None:
        setattr(manager, _TERMS, getattr(scheduler_output, _TERMS, None))
    return original(runner, scheduler_output, dummy_run, **kwargs)


class RankSide:
    """Beside one rank's `AdaptiveVerificationManager`."""

    def __init__(
        self, manager: Any, version: str, reports: ReportSender | None, clock: Clock | None = None
    ) -> None:
        """reports: the first rank's. Raises `ConfigError` for a manager that is not as expected."""
        missing = [name for name in _ATTRIBUTES if not hasattr(manager, name)]
        if missing:
            raise _unknown(version, f"AdaptiveVerificationManager has no {', '.join(missing)}")
        self._manager = manager
        self._budget = RankBudget(manager.num_speculative_steps)
        self._reports = reports
        self._clock = clock or SystemClock()
        self._report_due_ms = self._clock.now_ms()
        self._table: StepTable | None = None

    def set_cost_curves(self, original: Callable[..., Any], draft_curve: Any, verify_curve: Any) -> None:
        """As vLLM does it, and kept for the reports."""
        original(self._manager, draft_curve, verify_curve)
        self._table = _table(draft_curve, verify_curve, self._manager._cudagraph_limit)

    def get_num_tokens(
        self,
        original: Callable[..., int],
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
    ) -> int:
        """vLLM's search under the terms of this step, which may be none."""
        manager = self._manager
        num_drafted = sum(len(draft_tokens.get(req_id, ())) for req_id in num_tokens_per_req)
        base_rows = sum(num_tokens_per_req.values()) - num_drafted
        draft_ms, verify_ms = manager.cost_tables
        drafting_ms = float(draft_ms[len(num_tokens_per_req)])
        cost_ms = drafting_ms + verify_ms[base_rows : base_rows + num_drafted + 1]
        limit = self._budget.limit(getattr(manager, _TERMS, None), cost_ms)
        with _limited(manager, limit, len(num_tokens_per_req), drafting_ms):
            num_tokens = original(manager, num_tokens_per_req, draft_tokens)
        self._budget.spend(num_tokens - base_rows)
        self._report([req_id for req_id in num_tokens_per_req if draft_tokens.get(req_id)], base_rows)
        return num_tokens

    def _report(self, req_ids: list[str], base_rows: int) -> None:
        now_ms = self._clock.now_ms()
        if self._reports is None or self._table is None or now_ms < self._report_due_ms:
            return
        self._report_due_ms = now_ms + REPORT_PERIOD_MS
        manager = self._manager
        slots = [manager.req_states.req_id_to_index[req_id] for req_id in req_ids]
        stale = manager._stale_confidences[manager._stale_idx].np[slots]
        scores = survival(stale).astype(np.float32)
        self._reports.send(CoreReport(scores, base_rows, self._table.to_dict(), self._table.digest))


@contextmanager
def _limited(manager: Any, limit: Limit, num_requests: int, drafting_ms: float) -> Iterator[None]:
    """For the time of one search, what vLLM itself bounds it by: its logits' room, and what steps cost."""
    room, tables = manager._max_total_logits, manager.cost_tables
    if limit.cap_tokens is not None:
        most = num_requests * manager.num_bonus_tokens + limit.cap_tokens
        manager._max_total_logits = min(room, most)
    if limit.least_step_ms:
        draft_ms, verify_ms = tables
        manager.cost_tables = (draft_ms, np.maximum(verify_ms, limit.least_step_ms - drafting_ms))
    try:
        yield
    finally:
        manager._max_total_logits, manager.cost_tables = room, tables


def check_signatures(classes: tuple[type, ...], version: str) -> None:
    """`ConfigError` where a method is not there or takes other parameters."""
    known = {one.__name__: one for one in classes}
    for path, wanted in _SIGNATURES.items():
        class_name, method_name = path.split(".")
        method = getattr(known[class_name], method_name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)
        if found[: len(wanted)] != wanted:
            raise _unknown(version, f"{path} takes {', '.join(found) or 'no call'}, not {', '.join(wanted)}")


def _unknown(version: str, what: str) -> ConfigError:
    return ConfigError(
        f"the plan of the central scheduler cannot reach vLLM {version}: {what}. Set scheduler.policy to "
        "local and VLLM_PLUGINS to an empty string, or install a version that docs/vllm.md names"
    )


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """`owner.name` becomes a call of `around(original, self, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(method, _MARK, True)
    setattr(owner, name, method)


def _table(
    draft_curve: list[tuple[int, float]], verify_curve: list[tuple[int, float]], graph_limit: int
) -> StepTable:
    """vLLM's two curves; equal keys and order are its own profile's."""

    def split(curve: list[tuple[int, float]]) -> tuple[Float64Array, Float64Array]:
        sizes, times = np.asarray(curve, dtype=np.float64).T
        return sizes, times

    rows, verify_ms = split(verify_curve)
    requests, draft_ms = split(draft_curve)
    return StepTable(
        rows=rows.astype(np.int64),
        verify_ms=verify_ms,
        staircase_rows=graph_limit if graph_limit in rows else 0,
        requests=requests.astype(np.int64),
        draft_ms=np.maximum(draft_ms, 0.0),
        made_from={"profile": "vLLM's own"},
    )
