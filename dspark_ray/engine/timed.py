"""The timed engine: the real engine around a model that sleeps instead of computing.

Target steps and drafting last as long as a given step table says, and drafts are accepted as a given model
of acceptance says, so that routing, scheduling and autoscaling can be run as a fleet of unequal GPUs on a
machine that has none. Admission, KV blocks, budgets, plans and counters are the engine's own. The
text means nothing, and every answer has exactly `max_tokens` tokens. All figures from it are simulated: its
stats say so.
"""

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from dspark_kernels.attention import PagedBatch
from numpy.typing import NDArray
from torch import Tensor

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.config import AppConfig, TimedConfig
from dspark_ray.core.errors import ArtefactError, ConfigError
from dspark_ray.core.types import EngineStats, Request, SamplingParams, VerificationMode
from dspark_ray.engine.engine import Engine
from dspark_ray.models.drafters.base import ContextRows, DraftBlock, DraftRequest, Outcome
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.targets.config import DecoderConfig
from dspark_ray.models.targets.decoder import Decoder, DecoderOutput
from dspark_ray.models.targets.lora import AdapterRows
from dspark_ray.scheduling.step_table import StepTable

TIMED = "timed"

_FIRST_TOKEN, _NUM_TOKENS = 32, 64  # printable in byte-level vocabularies
_SURE = 1e3  # logit of the one token there is; the others have 0
_OWN_TIME_MS = 10.0  # time of the program between two steps that counts as part of the next one

Sleep = Callable[[float], None]
"""Seconds."""


def token_at(position: int) -> int:
    """The token at `position` (0-based) of every text."""
    return _FIRST_TOKEN + position * 7 % _NUM_TOKENS


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How likely drafts are to be accepted. Requests are of one kind each, chosen by their id."""

    means: NDArray[np.float64]  # [kinds, γ] conditional acceptance by position, given those before
    concentration: float | None  # of the Beta distribution that confidences are drawn from; None: the means

    @classmethod
    def load(cls, config: TimedConfig, num_draft_tokens: int) -> "Acceptance":
        """From the config or its trace, a JSON list of rows; short rows go on with their last value."""
        rows = config.acceptance
        if config.acceptance_trace is not None:
            rows = _read_trace(Path(config.acceptance_trace))
        padded = [[*row, *[row[-1]] * num_draft_tokens][:num_draft_tokens] for row in rows]
        return cls(np.array(padded, dtype=np.float64), config.concentration)

    def confidences(self, kinds: Sequence[int], width: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """[R, width] of one block for each request; a token is right with exactly this probability."""
        means = self.means[np.asarray(kinds, dtype=np.int64), :width]
        if self.concentration is None:
            return means
        inside = np.clip(means, 1e-3, 1 - 1e-3)
        return rng.beta(inside * self.concentration, (1 - inside) * self.concentration)


class Pace:
    """Sleeps what was asked for, less the program's own time since the last call."""

    def __init__(self, clock: Clock, sleep: Sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._due_ms = -np.inf

    def spend(self, cost_ms: float) -> None:
        now_ms = self._clock.now_ms()
        is_running = now_ms - self._due_ms < _OWN_TIME_MS  # else the engine was idle in between
        self.wait_until((self._due_ms if is_running else now_ms) + cost_ms)

    def wait_until(self, due_ms: float) -> None:
        self._due_ms = due_ms
        if (left_ms := due_ms - self._clock.now_ms()) > 0:
            self._sleep(left_ms / 1e3)


class TimedTarget(Decoder):
    """A decoder without weights: the token after position p is `token_at(p + 1)`, whatever came before."""

    is_batch_invariant = True

    def __init__(self, table: StepTable, pace: Pace, clock: Clock) -> None:
        self.config = self._local = _NO_MODEL
        self.dtype = self.kv_dtype = torch.float32
        self.device = torch.device("cpu")
        self.group_step_ms: Callable[[], float | None] = lambda: None  # the barrier of a lock-step group
        self._table = table
        self._pace = pace
        self._clock = clock
        self._started_ms = -np.inf

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KVStorage,
        slots: Tensor,
        batch: PagedBatch,
        taps: tuple[int, ...] = (),
        adapters: AdapterRows | None = None,
        logit_rows: Tensor | None = None,
    ) -> DecoderOutput:
        """Hidden states are the positions, [N, 1]. There are no adapters here."""
        self._meet_group()
        self._pace.spend(self._step_ms(len(token_ids), batch, logit_rows))
        hidden = positions.to(torch.float32).unsqueeze(1)
        logits = None if logit_rows is None else self.logits(hidden[logit_rows])
        return DecoderOutput(hidden, hidden[:, :0], logits)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden), _FIRST_TOKEN + _NUM_TOKENS)
        following = _FIRST_TOKEN + (hidden.long() + 1) * 7 % _NUM_TOKENS
        return logits.scatter_(1, following, _SURE)

    def _step_ms(self, num_rows: int, batch: PagedBatch, logit_rows: Tensor | None) -> float:
        """A request that decodes wants the logits of all its rows, a prompt those of its last one at most."""
        if logit_rows is None:
            return self._table.verify_cost_ms(num_rows, int(batch.kv_len.sum()), len(batch.kv_len))
        rows = batch.query_start.diff()
        wanted = torch.bincount(batch.markers(num_rows)[logit_rows], minlength=len(rows))
        decoding = wanted == rows
        decode_rows = int(rows[decoding].sum())
        context_tokens = int(batch.kv_len[decoding].sum())
        num_requests = int(decoding.sum()) or None
        return self._table.step_cost_ms(decode_rows, num_rows - decode_rows, context_tokens, num_requests)

    def _meet_group(self) -> None:
        """A step of a lock-step group begins when its slowest member's last one has ended."""
        group_ms, now_ms = self.group_step_ms(), self._clock.now_ms()
        if group_ms is not None and now_ms - self._started_ms < group_ms:
            self._pace.wait_until(self._started_ms + group_ms)
        self._started_ms = self._clock.now_ms()


class TimedDrafter:
    """`dspark_ray.models.drafters.base.Drafter`: right with the probability that it claims."""

    taps: tuple[int, ...] = ()
    vocab_map: Tensor | None = None
    context_digests: tuple[str, ...] = ()

    def __init__(
        self, acceptance: Acceptance, num_draft_tokens: int, table: StepTable, pace: Pace, seed: int
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._acceptance = acceptance
        self._table = table
        self._pace = pace
        self._rng = np.random.default_rng(seed)

    def commit(self, rows: ContextRows) -> None:
        """Keeps no context."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        width = len(requests[0].uniforms)
        self._pace.spend(self._table.draft_cost_ms(len(requests), width / self.num_draft_tokens))
        kinds = [(request.sampling.seed or 0) % len(self._acceptance.means) for request in requests]
        confidences = self._acceptance.confidences(kinds, width, self._rng).astype(np.float32)
        blocks = []
        for request, row in zip(requests, confidences, strict=True):
            right = request.uniforms < row
            first = len(request.token_ids)
            # A wrong token is the one after the right one: it never is what the target wants there.
            blocks.append([token_at(first + k + (not ok)) for k, ok in enumerate(right)])
        return DraftBlock(blocks, confidences, [None] * len(blocks))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Its confidences are true already."""

    def wants_full_verification(self) -> bool:
        return False

    def describe(self) -> str:
        kinds = "; ".join(" ".join(f"{mean:.2f}" for mean in row) for row in self._acceptance.means[:3])
        return f"timed: conditional acceptance {kinds}{' ...' if len(self._acceptance.means) > 3 else ''}"


class TimedEngine(Engine):
    """An engine that says in its stats that its times are simulated."""

    def add_request(self, request: Request) -> None:
        """Takes any request; of its sampling only the number of tokens counts."""
        name = request.request_id.rpartition(".")[
            0
        ]  # without the attempt: a resumed request stays of its kind
        kind = zlib.crc32((name or request.request_id).encode())
        sampling = SamplingParams(
            temperature=0.0, max_tokens=request.sampling.max_tokens, seed=kind, ignore_eos=True
        )
        super().add_request(replace(request, sampling=sampling))

    def stats(self) -> EngineStats:
        return replace(super().stats(), kind=TIMED)


def build_timed_engine(
    config: AppConfig, engine_id: str, clock: Clock | None = None, sleep: Sleep = time.sleep
) -> TimedEngine:
    """The engine of a configuration with `engine.kind` timed; `ArtefactError` for a wrong table or trace."""
    timed = config.engine.timed
    if timed is None:
        raise ConfigError("engine.timed is required for engine.kind 'timed'")
    clock = clock or SystemClock()
    table, speculation = StepTable.load(Path(timed.step_tables[0])), config.speculation
    pace = Pace(clock, sleep)
    target = TimedTarget(table, pace, clock)
    drafter = None
    if speculation.mode is not VerificationMode.OFF:
        acceptance = Acceptance.load(timed, speculation.num_draft_tokens)
        seed = timed.seed + zlib.crc32(engine_id.encode())
        drafter = TimedDrafter(acceptance, speculation.num_draft_tokens, table, pace, seed)
    engine = TimedEngine(config, target, drafter, table, clock, engine_id=engine_id)
    target.group_step_ms = lambda: engine.budget.group_step_ms
    return engine


def _read_trace(path: Path) -> tuple[tuple[float, ...], ...]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        checked = TimedConfig(step_tables=("-",), acceptance=rows).acceptance
    except (OSError, ValueError, TypeError) as error:
        raise ArtefactError(
            f"{path} is no acceptance trace, a JSON list of lists of numbers from 0 to 1: {error}"
        ) from error
    return checked


_NO_MODEL = DecoderConfig(
    model_type="timed (sleeps instead of computing; its figures are simulated)",
    vocab_size=_FIRST_TOKEN + _NUM_TOKENS,
    hidden_size=1,
    intermediate_size=0,
    num_layers=0,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    rms_norm_eps=0.0,
    rope={},
    max_position_embeddings=0,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    windows=(None,),
)
