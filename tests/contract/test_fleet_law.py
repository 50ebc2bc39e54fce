"""Every fleet policy through real planners: no admission anticipates, and plans couple until they expire."""

import numpy as np
import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import SpeculationConfig
from dspark_ray.core.types import (
    FleetView,
    Priority,
    Request,
    SamplingParams,
    ServiceTier,
    StepPlan,
    SurvivalReport,
    TierTerms,
)
from dspark_ray.engine.budget import BudgetPlanner, row_claims
from dspark_ray.engine.coupling import Coupling
from dspark_ray.engine.sequence import Draft, Sequence, new_sequence
from dspark_ray.scheduling.fleet import FLEET_POLICIES
from dspark_ray.scheduling.speculation import STALE_STEPS, Load
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.survival import survival

GAMMA = 4
STEEP = StepTable(rows=[1, 4, 8, 64], verify_ms=[5.0, 6.0, 9.0, 80.0])
STAIRS = StepTable(rows=[1, 5, 6, 40], verify_ms=[7.0, 7.0, 11.0, 12.0], staircase_rows=40)
TABLES = {table.digest: table for table in (STEEP, STAIRS)}
TERMS = (
    TierTerms(ServiceTier.FLEX, 0.5),
    TierTerms(ServiceTier.DEFAULT, 1.0),
    TierTerms(ServiceTier.PRIORITY, 2.0, 150.0),
)
CONFIG = SpeculationConfig(num_draft_tokens=GAMMA)


class Replica:
    """A planner with requests whose current blocks have the given confidences [R, γ]."""

    def __init__(self, name: str, table: StepTable, stale: np.ndarray, tiers: np.ndarray) -> None:
        self.name, self.table, self.stale = name, table, survival(stale).astype(np.float32)
        self.budget = BudgetPlanner(CONFIG, table, max_step_rows=256)
        self.clock = ManualClock()
        self.coupling = Coupling(self.budget, self.clock)
        self.sequences = [self._sequence(row, ServiceTier(tier)) for row, tier in enumerate(tiers)]

    def _sequence(self, row: int, tier: ServiceTier) -> Sequence:
        sampling, prompt = SamplingParams(max_tokens=50), (1, 2)
        sequence = new_sequence(Request(f"{row}", prompt, sampling, priority=Priority(tier)), row)
        sequence.survival_history = [self.stale[row]] * (STALE_STEPS + 1)
        return sequence

    def report(self, scores: np.ndarray | None = None) -> SurvivalReport:
        rows = len(self.sequences)
        return SurvivalReport(
            replica_id=self.name,
            generation=1,
            sequence=1,
            survival=self.stale if scores is None else scores,
            base_rows=rows,
            num_running=rows,
            num_waiting=0,
            table_digest=self.table.digest,
            table=None,
            budget_tokens=0.0,
            claims=row_claims(self.sequences),
        )

    def lens(self, confidences: np.ndarray, plan: StepPlan | None) -> list[int]:
        if plan is not None:
            self.coupling.apply(plan)
        for sequence, row in zip(self.sequences, survival(confidences), strict=True):
            sequence.draft = Draft([1] * GAMMA, row.astype(np.float32), None)
        room = [GAMMA] * len(self.sequences)
        return self.budget.choose(self.sequences, room, Load(0, 0), self.clock.now_ms()).lens.tolist()


def random_replicas(rng: np.random.Generator) -> list[Replica]:
    def one(name: str, table: StepTable) -> Replica:
        rows = int(rng.integers(1, 5))
        tiers = rng.choice([tier.value for tier in ServiceTier], size=rows)
        return Replica(name, table, rng.random((rows, GAMMA)) ** 0.3, tiers)

    return [one(name, table) for name, table in zip("ab", (STEEP, STAIRS), strict=True)]


def anticipates(policy_name: str, tries: int, *, from_current: bool = False) -> bool:
    """Whether later confidences of a request change an admission of its earlier positions. `from_current`
    plans from the current blocks, as no fleet may.
    """
    rng = np.random.default_rng(5)
    for _ in range(tries):
        seed, k = int(rng.integers(1 << 30)), int(rng.integers(1, GAMMA))
        cap = 40.0 + 160.0 * rng.random() if policy_name in ("shared_cap", "weighted") else None
        results = []
        for changed in (False, True):
            replicas = random_replicas(np.random.default_rng(seed))
            blocks = [np.random.default_rng(seed + 1).random(one.stale.shape) ** 0.3 for one in replicas]
            if changed:
                blocks[0][0, k:] = np.random.default_rng(seed + 2).choice([0.0, 1.0], size=GAMMA - k)
            reports = tuple(
                one.report(survival(block).astype(np.float32) if from_current else None)
                for one, block in zip(replicas, blocks, strict=True)
            )
            view = FleetView(reports, dict(TABLES), cap, TERMS, 8.0)
            plans = FLEET_POLICIES.get(policy_name)().plan(view, TABLES)
            lens = [one.lens(b, plan) for one, b, plan in zip(replicas, blocks, plans, strict=True)]
            results.append(min(lens[0][0], k))
        if results[0] != results[1]:
            return True
    return False


@pytest.mark.parametrize("policy_name", FLEET_POLICIES.names())
def test_no_policy_anticipates(policy_name: str) -> None:
    assert not anticipates(policy_name, tries=40)


def test_the_check_catches_plans_from_current_scores() -> None:
    assert anticipates("lockstep", tries=60, from_current=True)


def test_a_groups_step_time_bounds_the_budget_until_the_plan_expires() -> None:
    confidences = np.full((4, GAMMA), 0.95)
    replica = Replica("a", STAIRS, confidences, np.array(["default"] * 4))
    alone = sum(replica.lens(confidences, None))
    plan = StepPlan("a", 1, 1, "lockstep", ttl_ms=1000.0, group_step_ms=7.0)
    assert sum(replica.lens(confidences, plan)) == 1  # five rows take 7 ms, four are anchors
    assert alone > 1
    replica.clock.advance(1001.0)
    replica.coupling.expire()
    assert sum(replica.lens(confidences, None)) == alone
    longer = StepPlan("a", 1, 2, "lockstep", group_step_ms=100.0)
    assert sum(replica.lens(confidences, longer)) == 4 * GAMMA  # waiting for the group is free


def test_weights_move_tokens_between_requests_until_the_plan_expires() -> None:
    confidences = np.array([[0.6] * GAMMA, [0.9] * GAMMA])
    replica = Replica("a", STEEP, confidences, np.array(["priority", "flex"]))
    alone = replica.lens(confidences, None)
    plan = StepPlan("a", 1, 1, "weighted", ttl_ms=1000.0, tiers=TERMS, target_boost=8.0)
    weighted = replica.lens(confidences, plan)
    assert weighted[0] > alone[0]
    replica.clock.advance(1001.0)
    replica.coupling.expire()
    assert replica.lens(confidences, None) == alone


def test_without_coupling_every_policy_is_local() -> None:
    rng = np.random.default_rng(6)
    for policy_name in ("shared_cap", "weighted"):
        for seed in rng.integers(1 << 30, size=10):
            lens = []
            for planned in (False, True):
                replicas = random_replicas(np.random.default_rng(seed))
                even = tuple(TierTerms(tier) for tier in ServiceTier)  # equal weights, no targets
                view = FleetView(tuple(one.report() for one in replicas), dict(TABLES), None, even, 8.0)
                plans = FLEET_POLICIES.get(policy_name)().plan(view, TABLES)
                lens.append(
                    [
                        one.lens(1.0 - one.stale / 2, plan if planned else None)
                        for one, plan in zip(replicas, plans, strict=True)
                    ]
                )
            assert lens[0] == lens[1]
