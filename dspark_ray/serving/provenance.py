"""`speculation_details`: how each token of a streamed choice came about, as a field of its chunk.

A step emits the draft tokens that were accepted and then one of the target's own: a *correction* where the
next draft token was rejected, a *bonus* where all verified ones stood, a *plain* one where none was verified.
"""

from itertools import pairwise
from typing import Any

from dspark_ray.core.types import RequestOutput
from dspark_ray.serving.text import TextDelta


def speculation_body(output: RequestOutput, delta: TextDelta) -> dict[str, Any] | None:
    """One step of one choice; None where the request did not ask. `tokens` may be fewer than were emitted: a
    stop string ended the text.
    """
    details = output.details
    if details is None:
        return None
    own = (
        "plain"
        if details.verified == 0
        else "bonus"
        if details.accepted == details.verified
        else "correction"
    )
    tokens: list[dict[str, Any]] = []
    chances = [after / before if before else 0.0 for before, after in pairwise((1.0, *details.survival))]
    for index, text in enumerate(delta.pieces):
        if index < details.accepted:
            chance = round(chances[index], 4)
            tokens.append({"text": text, "source": "accepted", "confidence": chance})
        else:
            tokens.append({"text": text, "source": own, "confidence": None})
    return {
        "drafted": details.drafted,
        "verified": details.verified,
        "accepted": details.accepted,
        "tokens": tokens,
    }
