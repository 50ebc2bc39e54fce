"""When to draft at all."""

import numpy as np

from dspark_ray.scheduling.gate import GateSettings, should_draft, speculation_pays


def drafted_steps(num_steps: int, settings: GateSettings) -> list[int]:
    """A request whose budget is always 0: in which steps is it drafted?"""
    since, drafted = 0, []
    for step in range(num_steps):
        if should_draft(step, since, settings):
            drafted.append(step)
            since = 0
        since += 1
    return drafted


def test_a_request_that_is_never_verified_is_only_probed():
    assert drafted_steps(40, GateSettings(zero_steps=4, probe_every=10)) == [0, 1, 2, 3, 13, 23, 33]


def test_a_request_that_is_verified_is_always_drafted():
    assert all(should_draft(0, since) for since in range(100))
    assert should_draft(7, 1)
    assert not should_draft(8, 1)
    assert should_draft(8, 16)


MEAN = np.array([0.8, 0.6, 0.45])


def test_speculation_pays_when_the_target_is_memory_bound():
    cheap_rows = 10.0 + 0.1 * np.arange(4)
    assert speculation_pays(MEAN, 1, cheap_rows, draft_ms=2.0)


def test_speculation_does_not_pay_for_a_dear_drafter_or_dear_rows():
    assert not speculation_pays(MEAN, 1, 10.0 + 0.1 * np.arange(4), draft_ms=30.0)
    assert not speculation_pays(MEAN, 8, 10.0 + 10.0 * np.arange(25), draft_ms=2.0)


def test_hysteresis_keeps_what_is():
    # Best Θ = 2.85 / (10 + 18.5) = .1: exactly plain decoding.
    cost = np.full(4, 10.0)
    assert speculation_pays(MEAN, 1, cost, draft_ms=18.5, now_on=True)
    assert not speculation_pays(MEAN, 1, cost, draft_ms=18.5, now_on=False)
    assert not speculation_pays(MEAN, 1, cost, draft_ms=21.0, now_on=True)
    assert speculation_pays(MEAN, 1, cost, draft_ms=16.0, now_on=False)


def test_nothing_to_speculate_on():
    assert not speculation_pays(MEAN, 0, np.full(1, 10.0), draft_ms=0.0)
    assert not speculation_pays(np.zeros(0), 2, np.full(1, 10.0), draft_ms=0.0)
    assert not speculation_pays(np.full(3, np.nan), 1, np.full(4, 10.0), draft_ms=1.0)
