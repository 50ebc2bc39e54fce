"""Which drafted tokens stand, and what comes after them.

The rejection rule (Leviathan et al. 2023; docs/method): x_k ~ q_k is accepted with probability
min(1, p_k(x_k)/q_k(x_k)), left to right; at the first rejection the token is drawn from
norm(max(0, p_k − q_k)); all accepted, one bonus token from the next p. Greedy is the same rule with
one-hot p and q: a draft token stands iff it is the argmax. With shared noise (seeded requests) the target's
token is the argmax of log p plus the noise of its place, and a draft token stands iff it is that one.

p is what a request's adjuster makes of the logits: a token that it forbids has p = 0 and is rejected by
the same rule.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from dspark_kernels.choose import argmax
from dspark_kernels.noise import noisy_argmax
from numpy.typing import NDArray
from torch import Tensor

from dspark_ray.core.types import AcceptanceRule, SamplingParams
from dspark_ray.models.adjust import Columns, LogitsAdjuster, adjust_on_host
from dspark_ray.models.sampling import filtered_probs, sample_from, sampling_rows


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One request's share of the verified rows: row i follows draft token i (row 0: the anchor)."""

    first_row: int  # in the logits
    draft_tokens: Seq[int]  # the ℓ verified tokens; ℓ + 1 rows
    draft_probs: Tensor | None  # [≥ ℓ, Vd]; None: one-hot
    sampling: SamplingParams
    rng: np.random.Generator
    adjuster: LogitsAdjuster | None = None  # has seen the tokens up to the anchor
    noise_keys: NDArray[np.int64] | None = None  # [ℓ + 1] of the rows' places, with the rule of shared noise


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many draft tokens stand, and the target's own token after them."""

    num_accepted: int
    next_token: int


Acceptor = Callable[[Tensor, Seq[VerifyRequest], Tensor | None], list[Verdict]]
"""Who judges: `verify` on the host, or device_acceptance.py. Arguments and result are `verify`'s."""


def verify(logits: Tensor, requests: Seq[VerifyRequest], vocab_map: Tensor | None) -> list[Verdict]:
    """Verdicts in the order of `requests`. logits [M, V]; vocab_map [Vd] draft id → target id or None."""
    groups: dict[Rule, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(_rule_of(request), []).append(index)
    verdicts: list[Verdict | None] = [None] * len(requests)
    for rule, members in groups.items():
        found = rule(logits, [requests[i] for i in members], vocab_map)
        for index, verdict in zip(members, found, strict=True):
            verdicts[index] = verdict
    return [v for v in verdicts if v is not None]


Rule = Callable[[Tensor, Seq[VerifyRequest], Tensor | None], list[Verdict]]


def _rule_of(request: VerifyRequest) -> Rule:
    match request.sampling.rule:
        case AcceptanceRule.GREEDY:
            return _verify_greedy if request.adjuster is None else _verify_adjusted_greedy
        case AcceptanceRule.SHARED_NOISE:
            return _verify_shared
        case AcceptanceRule.REJECTION:
            return _verify_sampled


def _rows_of(requests: Seq[VerifyRequest]) -> list[int]:
    return [r.first_row + i for r in requests for i in range(len(r.draft_tokens) + 1)]


def _adjusted_rows(logits: Tensor, requests: Seq[VerifyRequest]) -> Tensor:
    """The requests' rows in fp32, shaped by their adjusters. → [M', V], a copy"""
    rows, start = logits[_rows_of(requests)].float(), 0
    for request in requests:
        end = start + len(request.draft_tokens) + 1
        if request.adjuster is not None:
            adjust_on_host(request.adjuster, rows[start:end], request.draft_tokens, Columns())
        start = end
    return rows


def _verify_greedy(logits: Tensor, requests: Seq[VerifyRequest], _: Tensor | None) -> list[Verdict]:
    rows = _rows_of(requests)
    return _match(requests, argmax(logits if len(rows) == logits.shape[0] else logits[rows]))


def _verify_adjusted_greedy(logits: Tensor, requests: Seq[VerifyRequest], _: Tensor | None) -> list[Verdict]:
    return _match(requests, argmax(_adjusted_rows(logits, requests)))


def _verify_shared(logits: Tensor, requests: Seq[VerifyRequest], _: Tensor | None) -> list[Verdict]:
    keys = np.concatenate([r.noise_keys for r in requests if r.noise_keys is not None])
    return _match(
        requests, noisy_argmax(_probs(logits, requests), torch.from_numpy(keys).to(logits.device), None)
    )


def _match(requests: Seq[VerifyRequest], chosen: Tensor) -> list[Verdict]:
    """A draft token stands iff it is the target's choice. chosen [M'] of the requests' rows"""
    tokens = chosen.tolist()
    verdicts, start = [], 0
    for request in requests:
        count = _leading_matches(request.draft_tokens, tokens[start:])
        verdicts.append(Verdict(count, tokens[start + count]))
        start += len(request.draft_tokens) + 1
    return verdicts


def _leading_matches(draft: Seq[int], truth: Seq[int]) -> int:
    for count, token in enumerate(draft):
        if token != truth[count]:
            return count
    return len(draft)


def _verify_sampled(logits: Tensor, requests: Seq[VerifyRequest], vocab_map: Tensor | None) -> list[Verdict]:
    probs = _probs(logits, requests)  # [M', V]
    starts = np.cumsum([0, *(len(r.draft_tokens) + 1 for r in requests)])
    counts = [
        _num_accepted(probs[start : start + len(r.draft_tokens)], r, vocab_map)
        for start, r in zip(starts, requests, strict=False)
    ]
    last = [int(s) + c for s, c in zip(starts, counts, strict=False)]
    last_rows = probs[torch.tensor(last, device=probs.device)]  # [R, V]
    for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
        if count < len(request.draft_tokens):
            last_rows[index] = _residual(last_rows[index], request, count, vocab_map)
    drawn = [r.rng.random() for r in requests]
    uniforms = torch.tensor(drawn, dtype=torch.float64, device=logits.device)
    tokens = sample_from(last_rows, uniforms).tolist()
    return [Verdict(count, token) for count, token in zip(counts, tokens, strict=True)]


def _probs(logits: Tensor, requests: Seq[VerifyRequest]) -> Tensor:
    """p of the requests' rows. → [M', V]"""
    owners = [i for i, r in enumerate(requests) for _ in range(len(r.draft_tokens) + 1)]
    owner = torch.tensor(owners, device=logits.device)
    columns = sampling_rows([r.sampling for r in requests], logits.shape[1], logits.device).select(owner)
    return filtered_probs(_adjusted_rows(logits, requests), columns)


def _num_accepted(probs: Tensor, request: VerifyRequest, vocab_map: Tensor | None) -> int:
    """Leading draft tokens that pass u·q(x) < p(x). probs [ℓ, V]"""
    if not request.draft_tokens:
        return 0
    tokens = torch.tensor(request.draft_tokens, device=probs.device)
    p = probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    if request.draft_probs is None:
        q = torch.ones_like(p)
    else:
        draft_ids = tokens if vocab_map is None else torch.searchsorted(vocab_map, tokens)
        q = request.draft_probs[: len(tokens)].gather(1, draft_ids.unsqueeze(1)).squeeze(1)
    uniforms = torch.from_numpy(request.rng.random(len(tokens))).to(probs.device)
    return int((uniforms * q < p).long().cumprod(0).sum())


def _residual(probs: Tensor, request: VerifyRequest, position: int, vocab_map: Tensor | None) -> Tensor:
    """max(0, p − q) at the first rejected position, unnormalised. probs [V] → [V]"""
    residual = probs.clone()
    if request.draft_probs is None:
        residual[request.draft_tokens[position]] -= 1.0
    elif vocab_map is None:
        residual -= request.draft_probs[position]
    else:
        residual.index_add_(0, vocab_map, request.draft_probs[position], alpha=-1)
    residual.clamp_(min=0.0)
    # p = q up to rounding leaves nothing: the rejection itself was rounding, and p is what is owed.
    return residual if bool(residual.sum() > 0) else probs
