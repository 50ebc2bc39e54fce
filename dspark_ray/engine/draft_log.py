"""What became of each draft, with the confidence logits it was judged by: for calibration and evaluation.

Off unless someone sets `engine.draft_log = DraftLog()`; it grows until it is taken away.
"""

from dataclasses import dataclass, field

from dspark_ray.core.types import AcceptanceRule, FloatArray
from dspark_ray.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """One verified draft. Positions past `num_verified` are unknown unless one before was rejected."""

    request_id: str
    rule: AcceptanceRule
    confidence_logits: FloatArray | None  # [γ]; None: the drafter has no confidence head
    num_verified: int
    num_accepted: int  # leading tokens that stood


@dataclass(slots=True)
class DraftLog:
    """Records in the order of verification."""

    records: list[DraftRecord] = field(default_factory=list)

    def note(self, sequence: Sequence, num_verified: int, num_accepted: int, num_emitted: int) -> None:
        """`num_accepted` by the rule, `num_emitted` tokens of accepted ones and the target's own."""
        assert sequence.draft is not None, "only drafts are logged"
        # A stop inside the accepted tokens says nothing about those after it: they are not rejections.
        known = num_verified if num_emitted > num_accepted else num_emitted
        self.records.append(
            DraftRecord(
                request_id=sequence.request.request_id,
                rule=sequence.request.sampling.rule,
                confidence_logits=sequence.draft.confidence_logits,
                num_verified=known,
                num_accepted=min(num_accepted, num_emitted),
            )
        )
