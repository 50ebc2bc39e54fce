"""What a client waits for is counted once, and only whole requests of clients are."""

import pytest

from dspark_ray.core.config import GoodputConfig
from dspark_ray.core.request_times import TimeCounts
from dspark_ray.core.types import FinishReason, Request, RequestOutput, SamplingParams
from dspark_ray.runtime.request_tally import RequestTally

LIMITS = GoodputConfig(ttft_ms=100.0, tpot_ms=20.0)


def serve(
    tally: RequestTally,
    outputs: list[tuple[float, int]],
    reason: FinishReason = FinishReason.LENGTH,
    emitted: tuple[int, ...] = (),
    reply_address: str = "inproc://a",
) -> None:
    """outputs: (when, how many tokens), the request having come at 1000 ms."""
    request = Request("r", (1, 2), SamplingParams(), emitted_token_ids=emitted, reply_address=reply_address)
    watch = tally.start(request, 1000.0)
    for number, (at_ms, count) in enumerate(outputs, start=1):
        last = number == len(outputs)
        tally.note(watch, RequestOutput("r", (7,) * count, reason if last else None), at_ms)


def at_most(counts: TimeCounts, bound_ms: int) -> int:
    return dict(counts.cumulative)[str(bound_ms)]


def test_times_to_the_first_token_and_between_tokens() -> None:
    tally = RequestTally(LIMITS)
    serve(tally, [(1050.0, 1), (1070.0, 3), (1090.0, 1)])  # 40 ms for 4 tokens
    serve(tally, [(1200.0, 1), (1300.0, 1)])
    times = tally.times()
    assert (at_most(times.first_token, 50), at_most(times.first_token, 100)) == (1, 1)
    assert at_most(times.first_token, 200) == 2
    assert times.first_token.sum_ms == pytest.approx(250.0)
    assert (at_most(times.per_token, 7), at_most(times.per_token, 10), at_most(times.per_token, 100)) == (
        0,
        1,
        2,
    )
    assert times.first_token.cumulative[-1] == ("+Inf", 2)
    assert times.good_tokens == 5  # the second was late


@pytest.mark.parametrize(
    ("outputs", "good"),
    [
        ([(1100.0, 1)], 1),  # a single token has no time between tokens
        ([(1101.0, 1)], 0),
        ([(1010.0, 1), (1050.0, 2)], 3),
        ([(1010.0, 1), (1051.0, 2)], 0),
        ([(1010.0, 4), (1011.0, 0)], 4),
    ],
)
def test_goodput_needs_both_limits(outputs: list[tuple[float, int]], good: int) -> None:
    tally = RequestTally(LIMITS)
    serve(tally, outputs)
    assert tally.times().good_tokens == good


def test_who_is_left_out() -> None:
    tally = RequestTally(LIMITS)
    nothing = tally.times()
    serve(tally, [(1010.0, 2)], emitted=(5,))  # its first token came elsewhere
    serve(tally, [(1010.0, 2)], reply_address="")  # the server's own trial
    serve(tally, [(1010.0, 0)], FinishReason.ABORT)  # nothing came
    assert tally.times() == nothing
    serve(tally, [(1010.0, 1), (1020.0, 1)], FinishReason.ERROR)
    assert (tally.times().first_token.cumulative[-1][1], tally.times().good_tokens) == (1, 0)
    serve(tally, [(1010.0, 1), (1020.0, 1)], FinishReason.ABORT)  # at a stop string, for example
    assert tally.times().good_tokens == 2
