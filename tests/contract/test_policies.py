"""What every length rule and every fleet policy promises; registering one is being tested here."""

import numpy as np
import pytest

from dspark_ray.core.types import FleetView, SurvivalReport
from dspark_ray.scheduling.fleet import FLEET_POLICIES
from dspark_ray.scheduling.lengths import LENGTH_RULES, LengthDecision, LengthView, throughput
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.survival import admit_top, rank_tokens, survival

RULES = pytest.mark.parametrize("rule_name", LENGTH_RULES.names())
POLICIES = pytest.mark.parametrize("policy_name", FLEET_POLICIES.names())


def random_confidences(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Ordinary values mixed with those that break ranks: ties, certainties, zeros and NaN."""
    extreme = rng.choice([0.0, 0.5, 1.0, np.nan], size=shape)
    return np.where(rng.random(shape) < 0.3, extreme, rng.random(shape) ** 0.3)


def random_view(rng: np.random.Generator, confidences: np.ndarray) -> LengthView:
    num_requests, block = confidences.shape
    max_lens = rng.integers(0, block + 1, size=num_requests)
    most = int(max_lens.sum())
    return LengthView(
        current_survival=survival(confidences),
        stale_survival=survival(random_confidences(rng, confidences.shape)),
        max_lens=max_lens,
        base_rows=num_requests,
        num_decoding=num_requests,
        cost_ms=5.0 + np.cumsum(rng.choice([0.0, 0.3, 4.0], size=most + 1)),
        cap_tokens=int(rng.integers(0, most + 2)) if rng.random() < 0.4 else None,
        fixed_tokens=int(rng.integers(0, block + 1)),
        threshold=float(rng.random()),
    )


def with_confidences(view: LengthView, confidences: np.ndarray) -> LengthView:
    fields = {name: getattr(view, name) for name in LengthView.__slots__}
    return LengthView(**{**fields, "current_survival": survival(confidences)})


def anticipates(rule, rng: np.random.Generator, tries: int) -> bool:
    """Whether changing a request's confidences after k ever changes an admission of its positions ≤ k."""
    for _ in range(tries):
        num_requests, block = int(rng.integers(1, 5)), int(rng.integers(1, 6))
        confidences = random_confidences(rng, (num_requests, block))
        view = random_view(rng, confidences)
        row, k = int(rng.integers(num_requests)), int(rng.integers(1, block + 1))
        changed = confidences.copy()
        changed[row, k:] = random_confidences(rng, (block - k,))  # c_{k+1}, …: they have seen x_k
        before, after = rule(view).lens[row], rule(with_confidences(view, changed)).lens[row]
        if min(before, k) != min(after, k):
            return True
    return False


@RULES
def test_no_rule_anticipates(rule_name):
    assert not anticipates(LENGTH_RULES.get(rule_name), np.random.default_rng(0), tries=600)


def test_the_check_catches_a_full_search_on_current_scores():
    def planted(view: LengthView) -> LengthDecision:
        values, _ = rank_tokens(view.current_survival, view.max_lens)
        budget = int(np.argmax(throughput(values, view.num_decoding, view.cost_ms)))
        return LengthDecision(admit_top(view.current_survival, budget, view.max_lens), budget, 0.0)

    assert anticipates(planted, np.random.default_rng(0), tries=600)


@RULES
def test_lengths_are_prefixes_within_limits_budget_and_cap(rule_name):
    rng = np.random.default_rng(1)
    for _ in range(200):
        confidences = random_confidences(rng, (int(rng.integers(1, 6)), int(rng.integers(1, 8))))
        view = random_view(rng, confidences)
        decision = LENGTH_RULES.get(rule_name)(view)
        assert decision.lens.shape == view.max_lens.shape
        assert decision.lens.dtype == np.int64
        assert (decision.lens >= 0).all()
        assert (decision.lens <= view.max_lens).all()
        assert decision.budget == decision.lens.sum()
        assert view.cap_tokens is None or decision.budget <= view.cap_tokens
        assert view.num_decoding <= decision.expected_tokens <= view.num_decoding + decision.budget


@RULES
def test_rules_are_deterministic_and_leave_the_view_alone(rule_name):
    rng = np.random.default_rng(2)
    for _ in range(50):
        view = random_view(rng, random_confidences(rng, (4, 5)))
        arrays = {
            name: getattr(view, name).copy() for name in ("current_survival", "stale_survival", "max_lens")
        }
        first, second = (LENGTH_RULES.get(rule_name)(view).lens.tolist() for _ in range(2))
        assert first == second
        for name, array in arrays.items():
            np.testing.assert_array_equal(getattr(view, name), array)


@RULES
@pytest.mark.parametrize("num_requests", [0, 1])
def test_rules_take_empty_and_single_batches(rule_name, num_requests):
    a = np.full((num_requests, 3), 0.9)
    for most in (0, 3):
        max_lens = np.full(num_requests, most)
        cost_ms = np.full(num_requests * most + 1, 10.0)
        view = LengthView(a, a, max_lens, num_requests, num_requests, cost_ms, threshold=0.5)
        decision = LENGTH_RULES.get(rule_name)(view)
        assert decision.lens.shape == (num_requests,)
        assert decision.budget <= num_requests * most


TABLE = StepTable(rows=[1, 64], verify_ms=[10.0, 73.0])


def random_report(rng: np.random.Generator, name: str) -> SurvivalReport:
    num = int(rng.integers(0, 5))
    scores = survival(random_confidences(rng, (num, 4))).astype(np.float32)
    digest = TABLE.digest if rng.random() < 0.8 else "unknown"
    return SurvivalReport(
        replica_id=name,
        generation=int(rng.integers(1, 9)),
        sequence=int(rng.integers(1, 99)),
        survival=scores,
        base_rows=num + int(rng.integers(0, 9)),
        num_running=num,
        num_waiting=int(rng.integers(0, 5)),
        table_digest=digest,
        table=None,
        budget_tokens=0.0,
    )


@POLICIES
def test_policies_answer_every_report_within_the_cap(policy_name):
    rng = np.random.default_rng(3)
    tables = {TABLE.digest: TABLE}
    for _ in range(60):
        names = [f"replica-{i}" for i in range(int(rng.integers(0, 5)))]
        reports = tuple(random_report(rng, name) for name in names)
        cap = float(rng.random() * 300) if rng.random() < 0.8 else None
        view = FleetView(reports, dict(tables), cap)
        plans = FLEET_POLICIES.get(policy_name)().plan(view, tables)
        assert [plan.replica_id for plan in plans] == names
        assert [plan.generation for plan in plans] == [one.generation for one in reports]
        assert {plan.policy for plan in plans} <= {policy_name}
        rates = [plan.draft_tokens_per_s for plan in plans if plan.draft_tokens_per_s is not None]
        assert all(np.isfinite(rate) and rate >= 0 for rate in rates)
        assert not rates or sum(rates) <= (cap or 0.0) * (1 + 1e-9)
        assert plans == FLEET_POLICIES.get(policy_name)().plan(view, tables)


@POLICIES
def test_policies_take_an_empty_fleet(policy_name):
    assert FLEET_POLICIES.get(policy_name)().plan(FleetView((), {}, 10.0), {}) == ()
