"""Writes one line a step to a file (`observability.record_path`): see core/step_record.py for the format.

Drafts are recorded with the survival that they were judged by, so that the simulator can run other policies
on them. A draft that was trimmed says nothing about the tokens past the trim: record with mode `fixed` for
that purpose.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dspark_ray.core.clock import Clock
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.step_record import RecordedDraft, RecordedRequest, RecordedStep, header
from dspark_ray.engine.recent import StepRecord
from dspark_ray.engine.sequence import Sequence


@dataclass(slots=True)
class _Flight:
    number: int
    arrived_ms: float
    first_token_ms: float | None = None


class StepRecorder:
    """Owned by the step loop. Lines are buffered by the file and flushed when idle and twice a second."""

    _FLUSH_EVERY_MS = 500.0

    def __init__(self, folder: Path, engine_id: str, clock: Clock) -> None:
        """Opens `folder`/ENGINE_ID.jsonl anew; `ConfigError` if it cannot be written."""
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', engine_id)}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"observability.record_path: cannot write {self.path}: {error.strerror}"
            ) from error
        self._file.write(header() + "\n")
        self._clock = clock
        self._flushed_ms = clock.now_ms()
        self._flights: dict[str, _Flight] = {}
        self._arrivals = 0
        self._recording_ms = 0.0  # of the last line
        self._drafts: list[RecordedDraft] = []
        self._ended: list[RecordedRequest] = []

    def arrived(self, request_id: str) -> None:
        self._flights[request_id] = _Flight(self._arrivals, self._clock.now_ms())
        self._arrivals += 1

    def verified(self, sequence: Sequence, num_verified: int, num_accepted: int, num_emitted: int) -> None:
        """A draft's outcome, as `DraftLog` counts it: what comes after a stop is unknown."""
        draft = sequence.draft
        flight = self._flights.get(sequence.request.request_id)
        if draft is None or flight is None:
            return
        survival = tuple(round(float(score), 4) for score in draft.survival[: len(draft.token_ids)])
        known = num_verified if num_emitted > num_accepted else num_emitted
        accepted = min(num_accepted, num_emitted)
        self._drafts.append(
            RecordedDraft(flight.number, sequence.request.sampling.rule.value, survival, known, accepted)
        )

    def emitted(self, sequence: Sequence) -> None:
        """A request got tokens in this step, maybe its last ones."""
        flight = self._flights.get(sequence.request.request_id)
        if flight is not None and flight.first_token_ms is None:
            flight.first_token_ms = self._clock.now_ms()
        if sequence.finish_reason is not None:
            self.ended(sequence)

    def ended(self, sequence: Sequence) -> None:
        """A request leaves the engine, aborted ones included."""
        flight = self._flights.pop(sequence.request.request_id, None)
        if flight is not None:
            self._ended.append(
                RecordedRequest(
                    request=flight.number,
                    arrived_ms=round(flight.arrived_ms, 3),
                    first_token_ms=None if flight.first_token_ms is None else round(flight.first_token_ms, 3),
                    ended_ms=round(self._clock.now_ms(), 3),
                    prompt_tokens=sequence.num_prompt,
                    cached_tokens=sequence.num_cached,
                    output_tokens=sequence.num_output,
                )
            )

    def step(
        self, record: StepRecord, num_drafted: int, draft_tokens: int, draft_ms: float, context_tokens: int
    ) -> None:
        """Ends the step's line; what was drafted after it: requests, tokens of each, and the time it took."""
        began_ms = self._clock.now_ms()
        line = RecordedStep(
            ended_ms=round(record.ended_ms, 3),
            measured_ms=round(record.measured_ms, 4),
            predicted_ms=round(record.predicted_ms, 4),
            rows=record.rows,
            num_decoding=record.num_decoding,
            verified_tokens=record.budget_tokens,
            num_drafted=num_drafted,
            context_tokens=context_tokens,
            drafts=tuple(self._drafts),
            ended=tuple(self._ended),
            draft_tokens=draft_tokens if num_drafted else 0,
            draft_ms=round(draft_ms, 4),
            recording_ms=round(self._recording_ms, 4),
        )
        self._file.write(line.to_line() + "\n")
        self._drafts, self._ended = [], []
        if not self._flights or record.ended_ms - self._flushed_ms > self._FLUSH_EVERY_MS:
            self._file.flush()
            self._flushed_ms = record.ended_ms
        self._recording_ms = self._clock.now_ms() - began_ms
