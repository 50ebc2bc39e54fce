"""The adjusters behind sampling parameters: which tokens are allowed, biases and penalties.

Each rule is one adjuster. Their order is vLLM's: allowed tokens, bad words, minimum length, biases, then
penalties; temperature and filters come after all of them (models/sampling.py).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.models.adjust import FORBIDDEN, AdjusterChain, AdjusterFactory, Columns, LogitsAdjuster


def token_rules(vocab_size: int, eos_token_ids: Iterable[int]) -> AdjusterFactory:
    """The factory for a model: None for requests that use none of the parameters."""
    eos = frozenset(eos_token_ids)

    def make(request: Request) -> LogitsAdjuster | None:
        sampling = request.sampling
        _check(sampling, vocab_size)
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos)
        rules: list[LogitsAdjuster] = []
        if sampling.allowed_token_ids:
            _check_something_is_left(sampling, ends)
            rules.append(AllowedTokens(sampling.allowed_token_ids))
        if sampling.bad_words:
            rules.append(BadWords(sampling.bad_words))
        if sampling.min_tokens > 0 and ends:
            rules.append(MinTokens(sampling.min_tokens, sorted(ends)))
        if sampling.logit_bias:
            rules.append(LogitBias(sampling.logit_bias))
        if sampling.has_penalties:
            rules.append(Penalties(sampling, request.prompt_token_ids))
        return AdjusterChain(rules) if rules else None

    return make


def _check(sampling: SamplingParams, vocab_size: int) -> None:
    """Token ids the model has: an id beyond its vocabulary would break the step of every request in it."""
    for param, token_ids in (
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", [token_id for word in sampling.bad_words for token_id in word]),
        ("stop_token_ids", sampling.stop_token_ids if sampling.min_tokens else ()),
    ):
        wrong = next((t for t in token_ids if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"{param}: token id {wrong} is not in the model's vocabulary of {vocab_size}",
                param=param,
                code="invalid_value",
            )


def _check_something_is_left(sampling: SamplingParams, ends: set[int]) -> None:
    left = set(sampling.allowed_token_ids) - {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens > 0:
        left -= ends
    if not left:
        raise RequestError(
            "allowed_token_ids, bad_words and min_tokens together allow no token at all",
            param="allowed_token_ids",
            code="invalid_value",
        )


def _forbid(logits: Tensor, rows: list[int], token_ids: list[int], columns: Columns) -> None:
    """Excludes token i in row i, for all [K], unless nothing of the whole vocabulary would be left there.

    That happens where rules contradict each other at some point of a text, e.g. a grammar that wants the
    word that is forbidden: a text must go on somehow, so the later rule gives way.
    """
    if not rows:
        return
    found, places = columns.find(torch.tensor(token_ids))
    where = (torch.tensor(rows)[places], found)
    before = logits[where]
    logits[where] = FORBIDDEN
    if columns.vocab_map is None:
        is_dead = logits.amax(-1) == FORBIDDEN  # [n]
        if bool(is_dead.any()):
            logits[where] = torch.where(is_dead[where[0]], before, FORBIDDEN)


class AllowedTokens:
    """Everything else is excluded."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = torch.tensor(sorted(set(token_ids)))

    def adjust(self, logits: Tensor, drafted: Sequence[int], columns: Columns) -> None:
        found, _ = columns.find(self._token_ids)
        kept = logits[:, found]
        logits.fill_(FORBIDDEN)
        logits[:, found] = kept

    def commit(self, token_ids: Sequence[int]) -> None:
        """The same tokens are allowed throughout."""


class BadWords:
    """Sequences of tokens that the output must not contain: the last token is excluded after the others."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in words]
        self._num_kept = max(len(word) for word in self._words) - 1
        self._recent: list[int] = []  # the output's last tokens

    def adjust(self, logits: Tensor, drafted: Sequence[int], columns: Columns) -> None:
        text = [*self._recent, *drafted]
        num_rows = len(logits)
        rows: list[int] = []
        token_ids: list[int] = []
        for row in range(num_rows):
            seen = tuple(text[: len(text) - num_rows + 1 + row])
            last = [w[-1] for w in self._words if len(w) == 1 or seen[-len(w) + 1 :] == w[:-1]]
            rows += [row] * len(last)
            token_ids += last
        _forbid(logits, rows, token_ids, columns)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._recent = [*self._recent, *token_ids][-self._num_kept :] if self._num_kept else []


class MinTokens:
    """No token that ends the request before it has `min_tokens` of output."""

    def __init__(self, min_tokens: int, ends: Sequence[int]) -> None:
        self._missing = min_tokens
        self._ends = list(ends)

    def adjust(self, logits: Tensor, drafted: Sequence[int], columns: Columns) -> None:
        num_before = len(drafted) - len(logits) + 1  # tokens of the block before the first row
        num_rows = max(0, min(len(logits), self._missing - num_before))
        rows = [row for row in range(num_rows) for _ in self._ends]
        _forbid(logits, rows, self._ends * num_rows, columns)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._missing -= len(token_ids)


class LogitBias:
    """Adds to the logits of some tokens."""

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._token_ids = torch.tensor([token_id for token_id, _ in biases])
        self._biases = torch.tensor([bias for _, bias in biases], dtype=torch.float32)

    def adjust(self, logits: Tensor, drafted: Sequence[int], columns: Columns) -> None:
        found, places = columns.find(self._token_ids)
        logits[:, found] += self._biases[places]

    def commit(self, token_ids: Sequence[int]) -> None:
        """A bias does not change."""


class Penalties:
    """Repetition, frequency and presence penalties over tokens that occurred before the row.

    As in vLLM: repetition divides a positive logit of a token that prompt or output holds and multiplies a
    negative one; then frequency × its count in the output and presence, if it has any, are subtracted.
    """

    def __init__(self, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._repetition = sampling.repetition_penalty
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        # The prompt counts for repetition only: tokens with count 0.
        self._counts = Counter(dict.fromkeys(prompt_token_ids, 0) if self._repetition != 1.0 else {})
        self._refresh()

    def adjust(self, logits: Tensor, drafted: Sequence[int], columns: Columns) -> None:
        found, places = columns.find(self._token_ids)
        changes = self._changes_within(len(logits), drafted, columns)
        # Read before anything is written: a drafted token's own rows start from the original logits.
        within = logits[changes.rows, changes.found]
        logits[:, found] = self._penalised(logits[:, found], self._output_counts[places])
        logits[changes.rows, changes.found] = self._penalised(within, changes.counts)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._counts.update(token_ids)
        self._refresh()

    def _refresh(self) -> None:
        self._token_ids = torch.tensor(list(self._counts), dtype=torch.int64)  # [K]
        self._output_counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)  # [K]

    def _changes_within(self, num_rows: int, drafted: Sequence[int], columns: Columns) -> "_Changes":
        """Counts that the tokens of the block itself change, row by row."""
        rows: list[int] = []
        token_ids: list[int] = []
        counts: list[int] = []
        for row in range(num_rows):
            before = Counter(drafted[: len(drafted) - num_rows + 1 + row])
            rows += [row] * len(before)
            token_ids += before
            counts += [self._counts[token_id] + count for token_id, count in before.items()]
        found, places = columns.find(torch.tensor(token_ids, dtype=torch.int64))
        return _Changes(
            torch.tensor(rows, dtype=torch.int64)[places],
            found,
            torch.tensor(counts, dtype=torch.float32)[places],
        )

    def _penalised(self, logits: Tensor, output_counts: Tensor) -> Tensor:
        """Of tokens that occurred: logits [..., k], how often in the output [k] → [..., k]"""
        scaled = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        return scaled - self._frequency * output_counts - self._presence * (output_counts > 0)


@dataclass(frozen=True, slots=True)
class _Changes:
    """Places whose token occurred in the block before the row."""

    rows: Tensor  # [C]
    found: Tensor  # [C] columns
    counts: Tensor  # [C] how often in the output, block included
