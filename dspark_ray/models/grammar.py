"""Grammars: compiled for a vocabulary, and walked along a request's text and its drafts.

A grammar is described by an xgrammar *structural tag* (serving/constraints.py writes it), compiled where a
hostile one can do no harm (serving/grammar_worker.py) and travels compiled. An engine only loads it.

Slow to import (xgrammar brings transformers along): import it where a grammar is really wanted.
"""

import hashlib
import json
import random
import re
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xgrammar
from torch import Tensor

from dspark_ray.core.errors import ConfigError, RequestError
from dspark_ray.core.types import CompiledGrammar
from dspark_ray.models.adjust import FORBIDDEN, Columns
from dspark_ray.models.tokenizer import Tokenizer

MAX_COMPILED_BYTES = 4 << 20
MAX_JSON_BLANKS = 8
"""Blank tokens in a row in a JSON text. Any number is legal, and a small model may write nothing else up to
its limit. A line break and its indentation are one or two. (A bound within the grammar, xgrammar's
`max_whitespace_cnt`, makes the compiled form of a schema seven times as large.)"""
_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+: (Check failed: .* is false: )?")  # where xgrammar raised it
_TRIAL_TOKENS = 128
_TRIAL_LIMIT_S = 0.5  # of CPU time: 4 ms a token, where 20 µs are usual


class GrammarVocabulary:
    """The text of every token and the tokens that end an answer. Safe to use from several threads."""

    def __init__(
        self, tokens: Sequence[str | bytes], kind: xgrammar.VocabType, stop_token_ids: Sequence[int]
    ):
        """`tokens` [V] as the vocabulary spells them; an empty one is never allowed unless it stops."""
        self._info = xgrammar.TokenizerInfo(
            list(tokens),  # type: ignore[arg-type]
            kind,
            vocab_size=len(tokens),
            stop_token_ids=list(stop_token_ids),
        )
        self.size = len(tokens)
        self.stop_token_ids = tuple(stop_token_ids)
        digest = hashlib.sha256(repr((list(tokens), kind.value, self.stop_token_ids)).encode())
        self._digest = digest.hexdigest()

    @classmethod
    def load(cls, model_dir: Path) -> "GrammarVocabulary":
        """Of a model directory, as wide as the model's logits. Raises `ConfigError`."""
        tokenizer = Tokenizer.load(model_dir)
        try:
            size = int(json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cannot read vocab_size from {model_dir / 'config.json'}: {error}") from error
        # Special tokens have no text of their own: inside a JSON string they would be cut out of the answer.
        tokens = [
            "" if index in tokenizer.special_ids else token
            for index, token in enumerate(tokenizer.tokens(range(size)))
        ]
        kind = xgrammar.VocabType.BYTE_FALLBACK if "<0x0A>" in tokens else xgrammar.VocabType.BYTE_LEVEL
        return cls(tokens, kind, tokenizer.eos_token_ids)

    def digest_of(self, tag: str) -> str:
        """What a compiled grammar is known by."""
        return hashlib.sha256(f"{self._digest}\n{tag}".encode()).hexdigest()

    def compile(self, tag: str) -> CompiledGrammar:
        """The grammar of a structural tag; raises `RequestError` for one that is wrong or too large.

        May take unbounded time and memory for a hostile one: only a process that may be killed calls it
        with what clients sent. It ends with a trial, so that no step is slow that this one was not.
        """
        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        try:
            compiled = compiler.compile_structural_tag(tag)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = _LOG_PREFIX.sub("", str(error).strip())[:512]
            raise RequestError(f"the grammar cannot be compiled: {reason}", code="invalid_grammar") from error
        text = compiled.serialize_json()
        if len(text) > MAX_COMPILED_BYTES:
            raise RequestError(
                f"the grammar takes {len(text)} bytes compiled; at most {MAX_COMPILED_BYTES} are allowed",
                code="invalid_grammar",
            )
        self._try_out(compiled)
        return CompiledGrammar(self.digest_of(tag), text, tag)

    def load_grammar(self, grammar: CompiledGrammar) -> xgrammar.CompiledGrammar:
        """Raises `RequestError` for one that was compiled for another vocabulary."""
        try:
            return xgrammar.CompiledGrammar.deserialize_json(grammar.compiled, self._info)
        except RuntimeError as error:
            raise RequestError(
                "the grammar was compiled for another vocabulary; ingress and engine must serve one model",
                code="invalid_grammar",
            ) from error

    @cached_property
    def blanks(self) -> "np.ndarray":
        """Which tokens are white space and nothing else, [V] bool."""
        texts = self._info.decoded_vocab
        return np.array([bool(text) and not text.strip(b" \t\r\n") for text in texts])

    def walk(self, compiled: xgrammar.CompiledGrammar, tag: str = "") -> "GrammarWalk":
        """At the beginning of a text; `tag` is the grammar's description, by which a JSON text is known."""
        max_blanks = MAX_JSON_BLANKS if '"type": "json_schema"' in tag else None
        return GrammarWalk(xgrammar.GrammarMatcher(compiled), self, max_blanks)

    def _try_out(self, compiled: xgrammar.CompiledGrammar) -> None:
        """Walks random legal tokens; raises `RequestError` for an ambiguous grammar that takes long."""
        walk = self.walk(compiled)
        rng, started_s = random.Random(0), time.process_time()
        for _ in range(_TRIAL_TOKENS):
            if walk.ended:
                return
            if time.process_time() - started_s > _TRIAL_LIMIT_S:
                message = "the grammar takes too long to follow; make it less ambiguous"
                raise RequestError(message, code="invalid_grammar")
            allowed = walk.allowed()
            choices = range(self.size) if allowed is None else np.flatnonzero(allowed)
            walk.accept(int(choices[rng.randrange(len(choices))]))


class GrammarWalk:
    """One text's place in a grammar."""

    def __init__(
        self, matcher: xgrammar.GrammarMatcher, vocabulary: GrammarVocabulary, max_blanks: int | None
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._max_blanks = max_blanks
        self._blanks = [0]  # at each place since the beginning, the blank tokens in a row before it
        self._bits = xgrammar.allocate_token_bitmask(1, vocabulary.size)  # [1, ⌈V / 32⌉] int32

    @property
    def ended(self) -> bool:
        """The token that ends the text has been accepted."""
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> bool:
        """Whether the token is legal here; only then the walk goes on."""
        if self.ended or not self._matcher.accept_token(token_id):
            return False
        if self._max_blanks is not None:
            self._blanks.append(self._blanks[-1] + 1 if self._vocabulary.blanks[token_id] else 0)
        return True

    def step_back(self, num_tokens: int) -> None:
        """Takes back the newest accepted tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            if self._max_blanks is not None:
                del self._blanks[-num_tokens:]

    def allowed(self) -> "np.ndarray | None":
        """Which tokens are legal here, [V] bool; None: all. Where no token is, the text may end."""
        tired = self._max_blanks is not None and self._blanks[-1] >= self._max_blanks
        if not self._matcher.fill_next_token_bitmask(self._bits, 0):
            return ~self._vocabulary.blanks if tired else None
        bits = self._bits[0].numpy().view(np.uint8)
        allowed = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").view(bool)
        if not allowed.any():
            allowed[list(self._vocabulary.stop_token_ids)] = True
        if tired and (rest := allowed & ~self._vocabulary.blanks).any():
            return rest
        return allowed


class GrammarAdjuster:
    """`LogitsAdjuster` of one request: forbids what its grammar does not allow after the row's tokens."""

    def __init__(self, walk: GrammarWalk) -> None:
        self._walk = walk

    def adjust(self, logits: Tensor, drafted: Sequence[int], columns: Columns) -> None:
        first = len(drafted) + 1 - len(logits)  # drafted tokens before the first row
        num_accepted = 0
        for position in range(len(drafted) + 1):
            if self._walk.ended:
                break  # rows behind the end are never reached
            if position >= first:
                _forbid(logits[position - first], self._walk.allowed(), columns)
            if position == len(drafted) or not self._walk.accept(drafted[position]):
                break  # rows behind an illegal token are not reached either
            num_accepted += 1
        self._walk.step_back(num_accepted)

    def commit(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._walk.accept(token_id)


def _forbid(logits: Tensor, allowed: "np.ndarray | None", columns: Columns) -> None:
    """logits [W], allowed [V]"""
    if allowed is None:
        return
    legal = columns.pick(torch.from_numpy(allowed))
    logits.masked_fill_(~legal, FORBIDDEN)
