"""One line of JSON a step: what an engine records and what the simulator reads (`observability.record_path`).

A line holds the step itself, every draft that it verified, and every request that ended with it. Unknown
keys are refused, so that a file of another version is not half understood.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_ray.core.errors import ArtefactError

FORMAT = "dspark-steps/1"


@dataclass(frozen=True, slots=True)
class RecordedDraft:
    """One verified draft. What became of positions past `verified` is unknown unless one was rejected."""

    request: int  # number of the request in this file, from 0 in the order of arrival
    rule: str  # that decided: an `AcceptanceRule`
    survival: tuple[float, ...]  # calibrated, of the tokens drafted; ≤ γ of them
    verified: int
    accepted: int  # leading tokens that stood


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request at its end. Times are the engine's clock."""

    request: int
    arrived_ms: float
    first_token_ms: float | None  # None: it ended without a token
    ended_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One target step, drafting included."""

    ended_ms: float
    measured_ms: float
    predicted_ms: float  # 0: no step table
    rows: int
    num_decoding: int
    verified_tokens: int
    num_drafted: int  # requests drafted after it
    context_tokens: int  # cached keys that decoding requests attend to
    drafts: tuple[RecordedDraft, ...] = ()
    ended: tuple[RecordedRequest, ...] = ()
    draft_tokens: int = 0  # drafted of each of `num_drafted`
    draft_ms: float = 0.0  # of `measured_ms`, the drafting; 0 in records of before it was kept
    recording_ms: float = 0.0  # between the last step and this one, spent on writing the line of the last one

    def to_line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def header() -> str:
    """The first line of a record."""
    return json.dumps({"format": FORMAT})


def read_steps(path: Path) -> Iterator[RecordedStep]:
    """The steps of a record, in order; `ArtefactError` naming the line that is none.

    A last line that was cut short (the engine was killed) is left out.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArtefactError(f"cannot read the record {path}: {error}") from error
    if not lines or not _is_header(lines[0]):
        raise ArtefactError(f"{path}: this is not a record of steps ({FORMAT})")
    for number, line in enumerate(lines[1:], start=2):
        try:
            yield _step(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                return
            raise ArtefactError(f"{path}, line {number}: this is not a step: {error}") from error


def _is_header(line: str) -> bool:
    try:
        return bool(json.loads(line) == {"format": FORMAT})
    except ValueError:
        return False


def _step(data: dict[str, Any]) -> RecordedStep:
    drafts = [{**draft, "survival": tuple(draft["survival"])} for draft in data.pop("drafts")]
    ended = [RecordedRequest(**request) for request in data.pop("ended")]
    return RecordedStep(**data, drafts=tuple(RecordedDraft(**d) for d in drafts), ended=tuple(ended))
