"""Acceptance by length of context: where speculation costs more than it brings, fewer tokens are verified.

Confidences are calibrated by position in a block, not by context; a drafter that was trained on short texts
may claim too much in long ones. So in each band of lengths the tokens that verification brought are set
against those that were claimed and against what they cost: where they fall short, and are dearer than tokens
of plain decoding, the band's cap is halved. (Dear alone is the budget's business: it weighs right claims at
every load.) A cap depends on past steps alone, so nothing that is drafted decides whether it is verified.
"""

import math
from dataclasses import dataclass

from dspark_ray.core.types import ContextBand

FIRST_BAND = 512  # tokens of the first band; each next one ends at twice as many
JUDGED_STEPS = 256  # verified drafts of a band before it is judged
RETRY_STEPS = 1024  # request steps of a band after which a lowered cap is raised again, to see
MARGIN = 0.9  # tokens may be so much dearer before it counts
SHORTFALL = 0.8  # of the accepted tokens that were claimed; above it, claims count as right
CHANCE = 4.0  # standard errors that they must fall short by, too


@dataclass(slots=True)
class _Band:
    cap: int
    num_judged: int = 0  # since the last judgement
    accepted: int = 0
    claimed: float = 0.0
    extra_ms: float = 0.0
    since_lowered: int = 0
    num_steps: int = 0  # request steps in all, for the figures
    num_accepted: int = 0


class ContextWatch:
    """One per engine; belongs to the step loop."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._gamma = num_draft_tokens
        self._bands: dict[int, _Band] = {}
        # Of this step's requests: band, tokens verified, accepted, and claimed by their scores.
        self._step: list[tuple[_Band, int, int, float]] = []
        self._plain_tokens = self._plain_ms = 0.0  # of steps as they would be without drafts, fading

    def cap(self, num_tokens: int) -> int:
        """Draft tokens of a request of this length that are verified at most; 0: it is not drafted."""
        band = self._bands.get(_band_of(num_tokens))
        return self._gamma if band is None else band.cap

    def note(self, num_tokens: int, num_verified: int, num_accepted: int, claimed: float) -> None:
        """One request's part in this step. claimed: accepted tokens that the scores promised"""
        band = self._bands.setdefault(_band_of(num_tokens), _Band(self._gamma))
        band.num_steps += 1
        band.num_accepted += num_accepted
        if band.cap < self._gamma:
            band.since_lowered += 1
            if band.since_lowered >= RETRY_STEPS:
                band.cap, band.since_lowered = min(self._gamma, max(1, 2 * band.cap)), 0
        self._step.append((band, num_verified, num_accepted, claimed))

    def end_step(self, plain_ms: float, verify_ms: float, draft_ms: float) -> None:
        """What the step cost: a step of the same requests without drafts, what verification added, and the
        drafting. Zeros where costs are unknown: then nothing is judged."""
        step, self._step = self._step, []
        verified = sum(count for _, count, _, _ in step)
        if plain_ms <= 0 or not verified:
            return
        self._plain_tokens = 0.99 * self._plain_tokens + len(step)
        self._plain_ms = 0.99 * self._plain_ms + plain_ms
        num_drafted = sum(count > 0 for _, count, _, _ in step)
        for band, count, accepted, claimed in step:
            if count:
                band.num_judged += 1
                band.claimed += claimed
                band.accepted += accepted
                band.extra_ms += verify_ms * count / verified + draft_ms / num_drafted
        for band in {id(band): band for band, *_ in step}.values():
            if band.num_judged >= JUDGED_STEPS:
                self._judge(band)

    def bands(self) -> tuple[ContextBand, ...]:
        """What was seen, shortest contexts first."""
        return tuple(
            ContextBand(_first_token(index), 1 + band.num_accepted / max(1, band.num_steps), band.cap)
            for index, band in sorted(self._bands.items())
        )

    def _judge(self, band: _Band) -> None:
        plain_rate = self._plain_tokens / self._plain_ms
        is_dear = band.accepted < MARGIN * plain_rate * band.extra_ms
        by_chance = CHANCE * math.sqrt(band.claimed)  # as for independent tokens
        if is_dear and band.accepted < min(SHORTFALL * band.claimed, band.claimed - by_chance):
            band.cap, band.since_lowered = band.cap // 2, 0
        band.num_judged = band.accepted = 0
        band.extra_ms = band.claimed = 0.0


def _band_of(num_tokens: int) -> int:
    return (num_tokens // FIRST_BAND).bit_length()


def _first_token(band: int) -> int:
    return FIRST_BAND << (band - 1) if band else 0
