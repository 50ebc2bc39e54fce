"""The plugin around vLLM's own scheduler output and `AdaptiveVerificationManager`, on a CPU."""

import contextlib
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from dspark_ray.core.types import StepPlan
from dspark_ray.scheduling.step_table import StepTable, cost_curve
from dspark_ray.vllm_engine import plugin
from dspark_ray.vllm_engine.link import PlanLink
from dspark_ray.vllm_engine.terms import StepTerms

pytestmark = pytest.mark.vllm

GAMMA = 3
ROWS = 64
STEPS_MS = [(1, 5.0), (4, 6.0), (8, 8.0), (16, 16.0), (32, 40.0)]
DRAFT_MS = [(1, 1.0), (4, 1.5)]
IDS = ["a", "b", "c", "d"]


class _Device:
    """A CUDA stream or event that has nothing to do."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def synchronize(self) -> None: ...
    def record(self) -> None: ...
    def wait_stream(self, other: object) -> None: ...


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class's own code, on a machine without a GPU or other ranks."""
    monkeypatch.setattr(torch.cuda, "Stream", _Device)
    monkeypatch.setattr(torch.cuda, "Event", _Device)
    monkeypatch.setattr(torch.cuda, "current_stream", _Device)
    monkeypatch.setattr(adaptive_verification, "stream", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(adaptive_verification, "gpu_sync_allowed", contextlib.nullcontext)
    group = SimpleNamespace(rank_in_group=0, broadcast_object=lambda value, src: value)
    monkeypatch.setattr(adaptive_verification, "get_tp_group", lambda: group)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)


@pytest.fixture
def link(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanLink]:
    """The plugin registered as in a process of vLLM's; the actor's side of its sockets."""
    link = PlanLink("tcp://127.0.0.1")
    for name, value in link.addresses.environment().items():
        monkeypatch.setenv(name, value)
    originals = {
        (owner, name): getattr(owner, name)
        for owner, name in (
            (Scheduler, "schedule"),
            (GPUModelRunner, "gather_batch_req_state"),
            (AdaptiveVerificationManager, "get_num_tokens"),
            (AdaptiveVerificationManager, "set_cost_curves"),
        )
    }
    monkeypatch.setattr(plugin, "REPORT_PERIOD_MS", 0.0)
    plugin.register()
    plugin.register()  # vLLM may call it again
    assert all(getattr(owner, name).__wrapped__ is method for (owner, name), method in originals.items())
    yield link
    for (owner, name), method in originals.items():
        setattr(owner, name, method)
    link.close()


def new_manager(num_requests: int = len(IDS)) -> AdaptiveVerificationManager:
    """Requests that all decode, profiled."""
    state = SimpleNamespace(
        num_speculative_steps=GAMMA,
        device=torch.device("cpu"),
        max_num_reqs=num_requests,
        max_num_batched_tokens=ROWS,
        req_id_to_index={req_id: index for index, req_id in enumerate(IDS)},
        num_computed_tokens_np=np.full(num_requests, 10),
        prefill_len=SimpleNamespace(np=np.full(num_requests, 10)),
    )
    starts = torch.zeros(num_requests + 1, dtype=torch.int32)
    manager = AdaptiveVerificationManager(state, starts, num_bonus_tokens=1, max_total_logits=ROWS)
    manager._cudagraph_limit = 16
    manager.set_cost_curves(DRAFT_MS, STEPS_MS)
    return manager


def record(manager: AdaptiveVerificationManager, confidences: np.ndarray) -> None:
    """One step's drafts: their confidences become the newest; those before them can be read by budgets."""
    batch = SimpleNamespace(num_reqs=len(confidences), idx_mapping=torch.arange(len(confidences)))
    manager.record_confidences(torch.from_numpy(confidences.astype(np.float32)), batch)


def budget(manager: AdaptiveVerificationManager, terms: StepTerms | None = None) -> int:
    """Draft tokens that the step verifies, through the runner's own way to the manager."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys(IDS, 1 + GAMMA)
    output.scheduled_spec_decode_tokens = {req_id: [-1] * GAMMA for req_id in IDS}
    if terms is not None:
        output.dspark_terms = terms
    output = pickle.loads(pickle.dumps(output))  # as it travels to the ranks
    found = []

    def gather(runner: Any, scheduler_output: Any, dummy_run: bool) -> None:
        found.append(
            manager.get_num_tokens(
                scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
            )
        )

    plugin._hand_over(gather, SimpleNamespace(adaptive_verification=manager), output, False)
    return int(found[0]) - len(IDS)


CONFIDENCES = np.array([[0.9, 0.9, 0.9], [0.8, 0.8, 0.8], [0.7, 0.5, 0.2], [0.3, 0.2, 0.1]])


@pytest.fixture
def manager(link: PlanLink) -> AdaptiveVerificationManager:
    manager = new_manager()
    record(manager, CONFIDENCES)
    record(manager, CONFIDENCES)
    return manager


def test_without_a_plan_vllms_choice_stands(manager: AdaptiveVerificationManager) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        record(manager, rng.random((4, GAMMA)))
        original = AdaptiveVerificationManager.get_num_tokens.__wrapped__
        own = original(
            manager, dict.fromkeys(IDS, 1 + GAMMA), {req_id: [-1] * GAMMA for req_id in IDS}
        ) - len(IDS)
        assert budget(manager) == own


def test_a_cap_bounds_the_search(manager: AdaptiveVerificationManager) -> None:
    free = budget(manager)
    assert free == 4  # up to the step of the staircase at 8 rows
    for share, most in ((0.0, 3), (1e6, free)):
        terms = StepTerms(0.0, share, None)
        # A block of credit at the start, then the rate.
        assert budget(new_recorded(), terms) == min(most, free)
    capped = new_recorded()
    budgets = [budget(capped, StepTerms(step * 10.0, 200.0, None)) for step in range(500)]
    assert sum(budgets[100:]) / 4.0 == pytest.approx(200.0, rel=0.01)  # the first ones spend saved credit
    assert capped._max_total_logits == ROWS  # only for the time of a search


def new_recorded() -> AdaptiveVerificationManager:
    manager = new_manager()
    record(manager, CONFIDENCES)
    record(manager, CONFIDENCES)
    return manager


@pytest.mark.parametrize(("group_ms", "expected"), [(9.5, 4), (17.5, 12), (7.0, 0), (100.0, 12)])
def test_a_group_uses_the_time_it_waits(
    manager: AdaptiveVerificationManager, group_ms: float, expected: int
) -> None:
    tables = manager.cost_tables
    assert budget(manager, StepTerms(0.0, None, group_ms)) == expected
    assert manager.cost_tables is tables


def test_no_budget_depends_on_the_block_at_hand(manager: AdaptiveVerificationManager) -> None:
    """Whatever the newest confidences are, budgets and reports are those of the ones before them."""
    terms = StepTerms(0.0, 1e6, 17.5)
    found = set()
    for newest in (np.zeros((4, GAMMA)), np.ones((4, GAMMA)), np.random.default_rng(1).random((4, GAMMA))):
        fresh = new_recorded()
        record(fresh, newest)
        found.add((budget(fresh), budget(fresh, terms)))
    assert len(found) == 1
    fresh = new_recorded()
    record(fresh, np.zeros((4, GAMMA)))
    record(fresh, np.zeros((4, GAMMA)))
    assert (budget(fresh), budget(fresh, terms)) not in found  # two steps later they count


def test_the_first_rank_reports_what_budgets_are_made_of(
    manager: AdaptiveVerificationManager, link: PlanLink
) -> None:
    record(manager, np.zeros((4, GAMMA)))  # of the block at hand: nobody may see it yet
    report = None
    for _ in range(1000):
        budget(manager)
        if (report := link.newest_report()) is not None:
            break
    assert report is not None
    np.testing.assert_allclose(report.survival, np.cumprod(CONFIDENCES, axis=1), rtol=1e-6)
    assert report.base_rows == 4
    table = StepTable.from_dict(report.table)
    assert table.digest == report.table_digest
    draft_ms, verify_ms = manager.cost_tables
    ours = cost_curve(table, None, base_rows=4, max_draft_tokens=40, num_drafting=4)
    np.testing.assert_allclose(ours, draft_ms[4] + verify_ms[4:45], rtol=1e-9)


def test_plans_reach_the_core(link: PlanLink) -> None:
    """Over the real sockets, into the output of the wrapped `Scheduler.schedule`."""
    core = plugin.CoreSide(lambda: plugin.PlanReceiver(link.addresses.plans))
    plan = StepPlan("r", 1, 1, "shared_cap", 75.0, 60_000.0, 12.5)
    for _ in range(10_000):
        link.send(plan)
        output = core.schedule(lambda scheduler: SchedulerOutput.make_empty(), None)
        if hasattr(output, "dspark_terms"):
            break
    terms = pickle.loads(pickle.dumps(output)).dspark_terms
    assert (terms.draft_tokens_per_s, terms.group_step_ms) == (75.0, 12.5)
