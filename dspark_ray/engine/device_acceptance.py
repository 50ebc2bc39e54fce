"""`verify` for whole batches: one pass of each kernel for all requests of a rule, where the logits are.

On a GPU one small copy brings what was decided to the host. On a CPU the kernels are compiled; greedy
requests stay with `verify`, which has nothing to do for them but to compare. The rules are those of
`acceptance.py`, in the kernels of `dspark_kernels.sampling`. Greedy and seeded requests get the same tokens.
With the rejection rule the law is the same and the randomness is used otherwise: the token after the
accepted ones wins a race (dspark_kernels.noise) whose key is drawn for it, where `verify` looks up a point
of a cumulative sum. Requests with an adjuster, which works on the host, are verified there.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from dspark_kernels.choose import argmax
from dspark_kernels.noise import noisy_argmax
from dspark_kernels.sampling import accept, leading_matches
from torch import Tensor

from dspark_ray.core.types import AcceptanceRule
from dspark_ray.engine.acceptance import Acceptor, Verdict, VerifyRequest, verify
from dspark_ray.models.sampling import SamplingRows, filtered_probs, sampling_rows
from dspark_ray.models.transfer import arrays_to_device, to_host


def acceptor_for(device: torch.device) -> Acceptor:
    """How an engine whose target is there verifies."""
    return verify_on_cpu if device.type == "cpu" else verify_on_device


def verify_on_device(logits: Tensor, requests: Seq[VerifyRequest], vocab_map: Tensor | None) -> list[Verdict]:
    """As `verify`. The device's work is started first; then the host does its own, and waits."""
    return _verify_in_batches(logits, requests, vocab_map, [r.adjuster is not None for r in requests])


def verify_on_cpu(logits: Tensor, requests: Seq[VerifyRequest], vocab_map: Tensor | None) -> list[Verdict]:
    """As `verify`, for logits in the host's memory."""
    one_by_one = [r.adjuster is not None or r.sampling.greedy for r in requests]
    if all(one_by_one):
        return verify(logits, requests, vocab_map)
    return _verify_in_batches(logits, requests, vocab_map, one_by_one)


def _verify_in_batches(
    logits: Tensor, requests: Seq[VerifyRequest], vocab_map: Tensor | None, is_hosts: Seq[bool]
) -> list[Verdict]:
    """`is_hosts` [R]: left to `verify`."""
    groups: dict[AcceptanceRule, list[int]] = {}
    by_host: list[int] = []
    for index, request in enumerate(requests):
        own = by_host if is_hosts[index] else groups.setdefault(request.sampling.rule, [])
        own.append(index)
    found = [
        torch.stack(RULES[rule](_flatten(logits, [requests[i] for i in members], rule), vocab_map))
        for rule, members in groups.items()
    ]  # [2, R'] each
    verdicts = dict(zip(by_host, verify(logits, [requests[i] for i in by_host], vocab_map), strict=True))
    if found:
        counts, tokens = to_host(torch.cat(found, dim=1)).tolist()
        decided = zip(counts, tokens, strict=True)
        order = [index for members in groups.values() for index in members]
        verdicts |= {index: Verdict(*pair) for index, pair in zip(order, decided, strict=True)}
    return [verdicts[index] for index in range(len(requests))]


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """R requests with their rows side by side, one for each draft token and one after those, and what their
    rule needs besides. There may be rows of no request behind them."""

    logits: Tensor  # [M, V]
    drafted: Tensor  # [M] int64 target ids; any valid one in a request's last row
    owner: Tensor  # [M] int64, whose row it is; any request where it is nobody's
    row_start: Tensor  # [R + 1] int32
    most: int  # ≥ draft tokens of any request
    filters: SamplingRows | None = None  # of the requests; None: all are greedy
    noise_keys: Tensor | None = None  # [M] int64, with shared noise
    # With the rejection rule:
    uniforms: Tensor | None = None  # [M] fp64
    draw_keys: Tensor | None = None  # [R] int64
    draft_probs: Tensor | None = None  # [M, Vd], anything where no token was drafted; None: one-hot
    one_hot: Tensor | None = None  # [R] bool: these requests' are; None: nobody's

    def probs(self) -> Tensor:
        """p of every row. → [M, V] fp32"""
        assert self.filters is not None
        return filtered_probs(self.logits, self.filters.select(self.owner))


def by_argmax(rows: JudgedRows, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens that stand and the target's own after them, [R] int64 each; so do those below."""
    return leading_matches(argmax(rows.logits), rows.drafted, rows.row_start, rows.most)


def by_shared_noise(rows: JudgedRows, _: Tensor | None) -> tuple[Tensor, Tensor]:
    assert rows.noise_keys is not None
    chosen = noisy_argmax(rows.probs(), rows.noise_keys, None)
    return leading_matches(chosen, rows.drafted, rows.row_start, rows.most)


def by_rejection(rows: JudgedRows, vocab_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """`vocab_map` [Vd]: draft id → target id, None: the same."""
    assert rows.uniforms is not None
    assert rows.draw_keys is not None
    draft_ids = None
    if rows.draft_probs is not None and vocab_map is not None:
        draft_ids = torch.searchsorted(vocab_map, rows.drafted).clamp_(max=len(vocab_map) - 1)
    return accept(
        rows.probs(),
        rows.drafted,
        rows.row_start,
        rows.most,
        rows.uniforms,
        rows.draw_keys,
        rows.draft_probs,
        rows.one_hot if rows.draft_probs is not None else None,
        vocab_map if rows.draft_probs is not None else None,
        draft_ids,
    )


RULES: dict[AcceptanceRule, Callable[[JudgedRows, Tensor | None], tuple[Tensor, Tensor]]] = {
    AcceptanceRule.GREEDY: by_argmax,
    AcceptanceRule.SHARED_NOISE: by_shared_noise,
    AcceptanceRule.REJECTION: by_rejection,
}


def _flatten(logits: Tensor, requests: Seq[VerifyRequest], rule: AcceptanceRule) -> JudgedRows:
    """The requests of a rule, their lengths and tokens known on the host."""
    device, lengths = logits.device, [len(r.draft_tokens) for r in requests]
    sizes = np.array(lengths) + 1
    starts = np.concatenate([[0], sizes.cumsum()])
    owner = np.repeat(np.arange(len(sizes)), sizes)
    drafted = np.array([token for r in requests for token in (*r.draft_tokens, 0)], dtype=np.int64)
    rows = np.array([r.first_row for r in requests])[owner] + np.arange(len(owner)) - starts[owner]
    *placed, chosen = arrays_to_device(device, drafted, owner, starts, rows)
    if len(rows) < len(logits):  # else all of them, which come in order
        logits = logits.index_select(0, chosen)
    plain = JudgedRows(logits, placed[0], placed[1], placed[2].int(), max(lengths))
    if rule is AcceptanceRule.GREEDY:
        return plain
    filters = sampling_rows([r.sampling for r in requests], logits.shape[1], device)
    if rule is AcceptanceRule.SHARED_NOISE:
        noise = np.concatenate([r.noise_keys for r in requests if r.noise_keys is not None])
        (keys,) = arrays_to_device(device, noise)
        return replace(plain, filters=filters, noise_keys=keys)
    # The last row's number of each request is not looked at.
    chances = np.concatenate([r.rng.random(n + 1) for r, n in zip(requests, lengths, strict=True)])
    draws = np.array([r.rng.integers(-(2**63), 2**63, dtype=np.int64) for r in requests])
    hot = np.array([r.draft_probs is None for r in requests], dtype=np.int64)
    uniforms, draw_keys, one_hot = arrays_to_device(device, chances, draws, hot)
    return replace(
        plain,
        filters=filters,
        uniforms=uniforms,
        draw_keys=draw_keys,
        draft_probs=_draft_probs(requests, lengths),
        one_hot=one_hot.bool() if hot.any() else None,
    )


def _draft_probs(requests: Seq[VerifyRequest], lengths: Seq[int]) -> Tensor | None:
    """q of every row [M, Vd]; anything where a request has none or no token was drafted. None: nobody has."""
    known = [r.draft_probs for r in requests if r.draft_probs is not None]
    if not known:
        return None
    anything, parts = known[0][:1], []
    for request, length in zip(requests, lengths, strict=True):
        if request.draft_probs is None:
            parts.append(anything.expand(length + 1, -1))
        else:
            parts += [request.draft_probs[:length], anything]
    return torch.cat(parts)
