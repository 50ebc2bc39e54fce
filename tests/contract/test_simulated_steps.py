"""The simulator against the engine, step by step: same requests, same drafts, same table, same decisions.

The engine is the timed one on a clock that only its steps move; drafts of both come from one bank of blocks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import parse_app_config
from dspark_ray.core.types import IntArray, Request, SamplingParams
from dspark_ray.engine import timed
from dspark_ray.engine.offline import Completion, generate_all
from dspark_ray.engine.sequence import Sequence as EngineSequence
from dspark_ray.engine.timed import TimedEngine, build_timed_engine, token_at
from dspark_ray.models.drafters.base import DraftBlock, DraftRequest
from dspark_ray.scheduling.live_costs import StepSize
from dspark_ray.scheduling.speculation import Load, Speculation
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.survival import survival
from dspark_ray.simulator.acceptance import AcceptanceBank, Blocks
from dspark_ray.simulator.run import prepare, simulate
from dspark_ray.simulator.scenario import Scenario
from dspark_ray.simulator.step_times import StepTimes
from dspark_ray.simulator.workload import Batch

GAMMA, BLOCKS = 4, 997
TABLE = StepTable(
    rows=[1, 4, 8, 16, 32, 64, 128],
    verify_ms=[10.0, 10.6, 11.7, 14.0, 18.5, 30.0, 58.0],
    requests=[1, 8, 32],
    draft_ms=[1.0, 1.6, 4.0],
    draft_fixed_ms=[0.6, 0.8, 1.4],
    prompt_rows=[1, 32, 128, 512],
    prompt_ms=[9.0, 11.0, 30.0, 120.0],
    context_ms_per_token=0.001,
)
KNOWN = StepTable(  # before any step corrected it: wrong by up to a half, and in its shape
    rows=[1, 8, 64],
    verify_ms=[8.0, 11.0, 45.0],
    requests=[1, 32],
    draft_ms=[1.5, 5.0],
    prompt_rows=[1, 512],
    prompt_ms=[8.0, 150.0],
)
ENGINE = {"max_running": 32, "kv_num_blocks": 1024, "prefix_cache": False}

Steps = list[tuple[StepSize, int, float]]  # size, requests drafted after it, milliseconds


class InTurn(AcceptanceBank):
    """The n-th request to start begins at a place that is known."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__([blocks])
        self._started = 0

    def start(self, tasks: IntArray, rng: np.random.Generator) -> IntArray:
        numbers = self._started + np.arange(len(tasks))
        self._started += len(tasks)
        return np.array([place_of(number) for number in numbers])


def place_of(request: int) -> int:
    return request * 31 % BLOCKS


class BankDrafter(timed.TimedDrafter):
    """Drafts the bank's blocks: a request is at its start's place plus one for every step since."""

    def __init__(self, bank: AcceptanceBank, confidences: np.ndarray, engine: TimedEngine) -> None:
        assert isinstance(engine.drafter, timed.TimedDrafter)
        self.__dict__.update(engine.drafter.__dict__)
        self._bank, self._confidences = bank, confidences
        self._steps: dict[int, int] = {}
        choose = engine.budget.wants_draft

        def counted(decoding: list[EngineSequence], load: Load) -> list[EngineSequence]:
            for sequence in decoding:
                self._steps[sequence.arrival] = self._steps.get(sequence.arrival, 0) + 1
            return choose(decoding, load)

        engine.budget.wants_draft = counted  # type: ignore[method-assign]

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        width = len(requests[0].uniforms)
        self._pace.spend(self._table.draft_cost_ms(len(requests), width / GAMMA))
        places = [(place_of(r.number) + self._steps[r.number]) % BLOCKS for r in requests]
        blocks = [
            [token_at(len(r.token_ids) + k + (k >= self._bank.accepted[place])) for k in range(width)]
            for r, place in zip(requests, places, strict=True)
        ]
        return DraftBlock(blocks, self._confidences[places, :width], [None] * len(blocks))


class Both:
    """The same requests through both."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, max_step_rows: int = 512
    ) -> None:
        rng = np.random.default_rng(3)
        self.confidences = (rng.random((BLOCKS, GAMMA)) ** 0.6).astype(np.float32)
        stood = rng.random((BLOCKS, GAMMA)) < self.confidences
        accepted = np.logical_and.accumulate(stood, axis=1).sum(axis=1)
        self.blocks = Blocks(survival(self.confidences).astype(np.float32), accepted)
        TABLE.save(folder / "table.json")
        self._speculation = {"mode": mode, "num_draft_tokens": GAMMA}
        self._engine = {**ENGINE, "max_step_rows": max_step_rows}
        self._folder = folder
        self._steps: Steps = []
        noted = Speculation.note_step

        def note(
            planner: Speculation,
            step: StepSize,
            num_drafting: int,
            measured_ms: float,
            width: int | None = None,
        ) -> float:
            self._steps.append((step, num_drafting, round(measured_ms, 6)))
            return noted(planner, step, num_drafting, measured_ms, width)

        monkeypatch.setattr(Speculation, "note_step", note)
        monkeypatch.setattr(timed, "_OWN_TIME_MS", 0.0)  # on this clock an idle moment is no program's time

    def engine(self, requests: Batch, clients: int | None) -> tuple[Steps, list[Completion]]:
        tables = {"step_tables": [str(self._folder / "table.json")]}
        config = parse_app_config(
            {"engine": {**self._engine, "kind": "timed", "timed": tables}, "speculation": self._speculation}
        )
        clock = ManualClock()

        def sleep(seconds: float) -> None:
            clock.advance(1e3 * seconds)

        engine = build_timed_engine(config, "one", clock, sleep)
        engine.budget.table = KNOWN
        if engine.drafter is not None:
            engine.drafter = BankDrafter(InTurn(self.blocks), self.confidences, engine)
        sent = [
            Request(f"r{n}.1", tuple(range(2, 2 + prompt)), SamplingParams(max_tokens=int(output)))
            for n, (prompt, output) in enumerate(
                zip(requests.prompt_tokens, requests.output_tokens, strict=True)
            )
        ]
        self._steps.clear()
        done = generate_all(
            engine,
            sent,
            concurrency=clients or len(sent),
            clock=clock,
            arrivals_ms=None if clients else requests.arrival_ms.tolist(),
            sleep=sleep,
        )
        return list(self._steps), done

    def simulator(self, requests: Batch, clients: int | None) -> tuple[Steps, dict[str, Any]]:
        arrivals: dict[str, Any] = {"kind": "closed", "clients": clients}
        if clients is None:
            log = self._folder / "log.jsonl"
            rows = zip(requests.arrival_ms, requests.prompt_tokens, requests.output_tokens, strict=True)
            lines = [f'{{"arrived_ms": {a}, "prompt_tokens": {p}, "output_tokens": {o}}}' for a, p, o in rows]
            log.write_text("\n".join(lines) + "\n")
            arrivals = {"kind": "replay", "log": str(log)}
        scenario = Scenario.model_validate(
            {
                "duration_s": 100_000.0 if clients else float(requests.arrival_ms[-1]) / 1e3 + 30,
                "replicas": [{"step_table": "known", "engine": self._engine}],
                "speculation": self._speculation,
                "arrivals": arrivals,
                "tasks": [
                    {
                        "name": "all",
                        "prompt_tokens": {"mean": 20},
                        "output_tokens": {"mean": 30, "most": int(requests.output_tokens.max())},
                        "acceptance": {"conditional": [0.5] * GAMMA},
                    }
                ],
                "law": "exact",
            }
        )
        setting = prepare(scenario, {"known": KNOWN}, {"known": StepTimes(TABLE)})
        object.__setattr__(setting, "bank", InTurn(self.blocks))
        self._steps.clear()
        figures = simulate(scenario, setting=setting, requests=requests if clients else None).figures
        return list(self._steps), figures


def equal_answers(count: int, seed: int, rate_per_s: float | None = None) -> Batch:
    """Answers of one length, since the engine is told `max_tokens`; prompts differ."""
    rng = np.random.default_rng(seed)
    arrival = np.zeros(count) if rate_per_s is None else np.cumsum(rng.exponential(1e3 / rate_per_s, count))
    if rate_per_s is not None:
        arrival -= arrival[0]
    prompts = rng.integers(2, 60, size=count)
    return Batch(arrival, prompts, np.full(count, 40), np.zeros(count, dtype=np.int64))


@pytest.mark.parametrize("mode", ["off", "fixed", "algorithm1", "adaptive"])
@pytest.mark.parametrize("clients", [1, 6, 24])
def test_a_closed_loop_takes_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, clients: int
) -> None:
    both = Both(tmp_path, monkeypatch, mode)
    requests = equal_answers(3 * clients + 3, seed=clients)
    engine, done = both.engine(requests, clients)
    simulator, figures = both.simulator(requests, clients)
    assert simulator == engine
    if mode == "adaptive":
        assert len({step.draft_rows for step, _, _ in engine}) > 4  # else there is nothing to agree about
    tpot = np.mean([(one.ended_ms - one.first_token_ms) / (len(one.token_ids) - 1) for one in done])
    assert figures["tpot_ms"]["mean"] == pytest.approx(tpot)


@pytest.mark.parametrize("rate_per_s", [2.0, 12.0, 40.0])
def test_random_arrivals_take_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate_per_s: float
) -> None:
    both = Both(tmp_path, monkeypatch, "adaptive")
    requests = equal_answers(36, seed=9, rate_per_s=rate_per_s)
    engine, done = both.engine(requests, None)
    simulator, figures = both.simulator(requests, None)
    assert simulator == engine
    tpot = np.mean([(one.ended_ms - one.first_token_ms) / (len(one.token_ids) - 1) for one in done])
    assert figures["tpot_ms"]["mean"] == pytest.approx(tpot)


def test_prompts_are_cut_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are left out: to the timed model the last row of a prompt, if alone, looks like an anchor."""
    both = Both(tmp_path, monkeypatch, "fixed", max_step_rows=160)
    requests = equal_answers(60, seed=5)
    engine, simulator = both.engine(requests, 24)[0], both.simulator(requests, 24)[0]
    assert [(size, count) for size, count, _ in simulator] == [(size, count) for size, count, _ in engine]
    assert any(size.decode_rows + size.prompt_rows == 160 for size, _, _ in engine)
