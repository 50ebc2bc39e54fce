"""How a replica keeps to its share of the fleet's draft tokens per second."""

import math

_BURST_S = 0.25  # credit is kept for this long: several steps, and a cut of the cap is felt well within 1 s


class TokenBucket:
    """Credit in draft tokens: grows with time, falls with what is verified. Not thread-safe.

    Once a step: `available(now)` is the most that may be verified (`LengthView.cap_tokens`), then `take`
    what was. Fractions of a token are kept, so that a slow rate is met over many short steps. Starts full.
    """

    def __init__(self, rate_per_s: float, burst: float) -> None:
        """rate_per_s: draft tokens per second. burst: most credit kept, in tokens; at least what one step
        can verify, or steps that are longer than `burst / rate` lose credit and the rate is never reached.
        """
        assert 0 <= rate_per_s < math.inf, "the rate is a finite number of tokens per second"
        self._rate_per_s = rate_per_s
        self._burst = max(burst, 1.0)
        self._credit = self._burst
        self._last_ms: float | None = None

    @property
    def rate_per_s(self) -> float:
        return self._rate_per_s

    def available(self, now_ms: float) -> int:
        """Whole tokens that may be verified at `now_ms`; time that goes backwards earns nothing."""
        if self._last_ms is not None:
            earned = max(0.0, now_ms - self._last_ms) / 1e3 * self._rate_per_s
            self._credit = min(self._burst, self._credit + earned)
        self._last_ms = now_ms
        return max(0, math.floor(self._credit + 1e-9))

    def take(self, num_tokens: int) -> None:
        """Spend. More than was available leaves a debt, which is paid off before the next token."""
        self._credit -= num_tokens

    def set_rate(self, rate_per_s: float, burst: float | None = None) -> None:
        """A new share, from the next `available` on. A lower one shrinks saved credit in proportion, so
        that a cut is felt at once and not after the savings of better times are spent.

        burst: the new most credit kept; needed by callers that derive it from the rate.
        """
        assert 0 <= rate_per_s < math.inf, "the rate is a finite number of tokens per second"
        if rate_per_s < self._rate_per_s and self._credit > 0:
            self._credit *= rate_per_s / self._rate_per_s
        self._rate_per_s = rate_per_s
        if burst is not None:
            self._burst = max(burst, 1.0)
            self._credit = min(self._credit, self._burst)


def draft_token_cap(
    num_decoding: int, prefill_rows: int, max_step_rows: int, bucket: TokenBucket | None, now_ms: float
) -> int:
    """Draft tokens that fit into a step's rows, and into the shared cap's share if there is one."""
    reserve = min(prefill_rows, max_step_rows // 4)  # prefill is never starved by drafts
    room = max(0, max_step_rows - num_decoding - reserve)
    return room if bucket is None else min(room, bucket.available(now_ms))


def bucket_of_share(
    bucket: TokenBucket | None, draft_tokens_per_s: float | None, block_size: int
) -> TokenBucket | None:
    """The bucket for a plan's share from now on, with the credit of the last one; None without a cap.

    At least one request's block of credit is kept, or a slow rate never fills one.
    """
    if draft_tokens_per_s is None:
        return None
    burst = max(draft_tokens_per_s * _BURST_S, float(block_size))
    if bucket is None:
        return TokenBucket(draft_tokens_per_s, burst)
    bucket.set_rate(draft_tokens_per_s, burst)
    return bucket
