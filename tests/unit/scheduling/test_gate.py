"""When one request is drafted."""

from dspark_ray.scheduling.gate import GateSettings, should_draft


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
