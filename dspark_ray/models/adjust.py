"""What shapes a request's logits before temperature and filters: penalties, biases, masks, grammars.

One hook for target and drafter alike. An adjuster belongs to one request and knows the tokens it has
emitted. It is applied to the target's rows (each given the drafted tokens before it) and to the drafter's
logits before a token is drafted, so that p and q are the distributions of the same constrained text. The
output keeps its law whatever is done to q: a drafted token that p forbids is rejected like any other, and
its place is drawn from norm(max(0, p − q)).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark_ray.core.types import Request

FORBIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class Columns:
    """Which tokens the columns of logits are: the whole vocabulary, or the drafter's part of it."""

    vocab_map: Tensor | None = None  # [W] ascending target ids; None: column = target id

    def find(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Target ids [K] → (their columns [k], their places in `token_ids` [k]) for those that have one."""
        if self.vocab_map is None:
            return token_ids, torch.arange(len(token_ids))
        found = torch.searchsorted(self.vocab_map, token_ids).clamp(max=len(self.vocab_map) - 1)
        places = (self.vocab_map[found] == token_ids).nonzero().squeeze(1)
        return found[places], places

    def pick(self, values: Tensor) -> Tensor:
        """What belongs to each column of `values` [..., V], e.g. a mask. → [..., W]"""
        return values if self.vocab_map is None else values[..., self.vocab_map]


class LogitsAdjuster(Protocol):
    """One request's adjuster. Called by the step loop, on its thread.

    Logits must depend on nothing but the request and the tokens before the row: never on the batch, nor on
    what was drafted after the row. At least one token of the whole vocabulary must stay allowed in each row
    that can be reached; rows behind a forbidden token or behind the end of the answer never are, and may be
    left alone or forbidden altogether.
    """

    def adjust(self, logits: Tensor, drafted: Sequence[int], columns: Columns) -> None:
        """Changes logits [n, W] fp32, on the CPU, in place; `FORBIDDEN` excludes a token.

        The last row follows the committed tokens and all of `drafted`, row i all but the last n − 1 − i of
        them: verification passes ℓ + 1 rows and ℓ tokens, drafting one row and the block's tokens so far.
        """

    def commit(self, token_ids: Sequence[int]) -> None:
        """Tokens that were emitted, in order: also those that a resumed request had emitted before."""


AdjusterFactory = Callable[[Request], LogitsAdjuster | None]
"""An adjuster that stands at the end of the prompt, or None where a request needs none.

Called when a request is queued; raises `RequestError` for what can never be followed.
"""


class AdjusterChain:
    """Several adjusters of one request, in order."""

    def __init__(self, adjusters: Sequence[LogitsAdjuster]) -> None:
        self._adjusters = tuple(adjusters)

    def adjust(self, logits: Tensor, drafted: Sequence[int], columns: Columns) -> None:
        for adjuster in self._adjusters:
            adjuster.adjust(logits, drafted, columns)

    def commit(self, token_ids: Sequence[int]) -> None:
        for adjuster in self._adjusters:
            adjuster.commit(token_ids)


def make_adjuster(request: Request, factories: Sequence[AdjusterFactory]) -> LogitsAdjuster | None:
    """The adjuster of a request, resumed ones included; None where no factory has one for it."""
    found = [adjuster for factory in factories if (adjuster := factory(request)) is not None]
    if not found:
        return None
    adjuster = found[0] if len(found) == 1 else AdjusterChain(found)
    if request.emitted_token_ids:
        adjuster.commit(request.emitted_token_ids)
    return adjuster


def adjust_on_host(
    adjuster: LogitsAdjuster, logits: Tensor, drafted: Sequence[int], columns: Columns
) -> None:
    """`adjuster.adjust`, for logits on any device: adjusters work on the CPU."""
    if logits.is_cpu:
        adjuster.adjust(logits, drafted, columns)
        return
    copied = logits.cpu()
    adjuster.adjust(copied, drafted, columns)
    logits.copy_(copied)


def adjust_draft_row(
    logits: Tensor, adjuster: LogitsAdjuster, drafted: Sequence[int], columns: Columns
) -> bool:
    """Changes a drafter's logits [W] in place; False, and no change, where it can draft no allowed token."""
    adjusted = logits.unsqueeze(0).to("cpu", copy=True)
    adjuster.adjust(adjusted, drafted, columns)
    if bool(adjusted.max() == FORBIDDEN):
        return False
    logits.copy_(adjusted[0])
    return True
