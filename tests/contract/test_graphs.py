"""Captured passes: the same texts with and without. Here a replay calls the pass again."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dspark_ray.core.config import parse_app_config
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.graphs import GraphedTarget
from dspark_ray.models.drafters.base import DraftRequest, GraphedDrafter
from dspark_ray.models.graphs import MOST_ROWS, capture_sizes
from dspark_ray.models.targets.decoder import DecoderOutput
from dspark_ray.profiling.profile import ProfileSettings, profile_engine
from tests.tiny_engine import (
    AHEAD,
    PATHS,
    on_path,
    request,
    run,
    tiny_decoder,
    tiny_drafter_dir,
    tiny_engine,
)

VOCAB = 29


class Rerun:
    """Replays a pass by running it again, into the tensors that it gave first."""

    def __init__(self, run: Callable[[], DecoderOutput | torch.Tensor]) -> None:
        self._run, self.output, self.replays = run, run(), 0

    @property
    def is_drafters(self) -> bool:
        return isinstance(self.output, torch.Tensor)

    def replay(self) -> DecoderOutput | torch.Tensor:
        self.replays += 1
        again = self._run()
        if isinstance(self.output, torch.Tensor):
            return self.output.copy_(again)
        self.output.hidden.copy_(again.hidden)
        self.output.taps.copy_(again.taps)
        return self.output


class RerunCapturer:
    def __init__(self) -> None:
        self.captured: list[Rerun] = []

    def capture(self, run: Callable[[], DecoderOutput | torch.Tensor]) -> Rerun:
        self.captured.append(Rerun(run))
        return self.captured[-1]

    @property
    def replays(self) -> int:
        """Of the target's passes."""
        return sum(one.replays for one in self.captured if not one.is_drafters)

    @property
    def draft_replays(self) -> int:
        return sum(one.replays for one in self.captured if one.is_drafters)


def with_graphs(engine: Engine) -> RerunCapturer:
    capturer = RerunCapturer()
    engine.graphs = GraphedTarget(engine.config, engine.target, engine.kv, capturer)
    if isinstance(engine.drafter, GraphedDrafter):
        engine.drafter.use_graphs(capturer, engine.config.engine.max_running)
    return capturer


def requests(count: int) -> list:
    rng = np.random.default_rng(5)
    rules = (
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 4},
        {"temperature": 1.0, "seed": 1, "top_p": 0.9},
    )
    return [
        request(f"r{i}", rng.integers(VOCAB, size=2 + 5 * i % 17).tolist(), max_tokens=6 + i, **rules[i % 3])
        for i in range(count)
    ]


@pytest.mark.parametrize("path", [*PATHS, AHEAD])
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_texts_are_the_same_with_and_without(tmp_path, mode, count, path):
    checkpoint = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=None)
    target = tiny_decoder(VOCAB, sharpness=3.0)
    texts = []
    for graphed in (False, True):
        engine = tiny_engine(
            checkpoint, vocab_size=VOCAB, target=target, speculation={"mode": mode}, engine={"max_running": 4}
        )
        capturer = with_graphs(engine) if graphed else None
        texts.append(run(on_path(path, engine), requests(count)))
        if capturer is not None:
            assert capturer.replays > 0.7 * engine.counters.target_steps - count  # prompts are not replayed
            of_target = [one for one in capturer.captured if not one.is_drafters]
            assert 0 < len(of_target) <= len(engine.graphs.sizes)
            assert (capturer.draft_replays > 0) == (mode != "off")
    assert texts[0] == texts[1]


def test_batches_above_the_largest_size_and_prompts_run_as_they_are(tmp_path):
    engine = tiny_engine(None, vocab_size=VOCAB, target=tiny_decoder(VOCAB), engine={"max_running": 64})
    capturer = with_graphs(engine)
    engine.graphs.runner.sizes = (1, 2, 4)
    for item in requests(7):
        engine.add_request(item)
    engine.step()  # prompts
    assert capturer.replays == 0
    engine.step()  # seven anchors at least
    assert capturer.replays == 0
    while engine.has_work():
        engine.step()
    assert capturer.replays > 0  # the last of them


def test_pad_rows_leave_the_cache_alone():
    engine = tiny_engine(None, vocab_size=VOCAB, target=tiny_decoder(VOCAB), speculation={"mode": "off"})
    with_graphs(engine)
    engine.graphs.runner.sizes = (16,)
    engine.add_request(request("a", [1, 2, 3], temperature=0.0, max_tokens=8))
    engine.step()
    written = engine.kv.k.abs().sum((0, 2, 3)) > 0
    assert written.sum() == 3
    engine.step()
    assert (engine.kv.k.abs().sum((0, 2, 3)) > 0).sum() == 4  # one row more, not 16


def test_capturing_everything_writes_nothing_and_comes_from_the_largest():
    engine = tiny_engine(None, vocab_size=VOCAB, target=tiny_decoder(VOCAB), engine={"max_running": 3})
    capturer = with_graphs(engine)
    engine.graphs.capture_all(())
    assert [len(one.output.hidden) for one in capturer.captured] == sorted(engine.graphs.sizes, reverse=True)
    assert not engine.kv.k.any()
    assert engine.graphs.sizes[-1] == 3 * 5  # three requests, an anchor and four draft tokens each


def test_a_drafters_pass_knows_rows_and_not_requests(tmp_path):
    """Blocks of any width, of as many requests, replay what was captured for as many rows or some more."""
    engine = tiny_engine(
        tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=None),
        vocab_size=VOCAB,
        target=tiny_decoder(VOCAB),
        engine={"max_running": 4},
    )
    drafter, plain = engine.drafter, []
    cases = [(1, 4), (2, 2), (4, 1), (3, 2), (4, 4), (2, 3)]  # requests, slots
    wanted = [
        [
            DraftRequest([3, 5 + i, 7], [i], request("r", [1], temperature=0.0).sampling, np.zeros(slots))
            for i in range(count)
        ]
        for count, slots in cases
    ]
    with torch.inference_mode():
        plain = [drafter.propose(block) for block in wanted]
        capturer = RerunCapturer()
        drafter.use_graphs(capturer, 4)
        for block, expected in zip(wanted, plain, strict=True):
            found = drafter.propose(block)
            assert found.token_ids == expected.token_ids
            np.testing.assert_allclose(found.confidences, expected.confidences, rtol=1e-5)
        assert capturer.draft_replays == len(cases)
        assert sorted(len(one.output) for one in capturer.captured) == [4, 8, 16]
        drafter.capture_all()
    assert sorted(len(one.output) for one in capturer.captured) == [1, 2, 4, 8, 16]


def test_sizes():
    assert capture_sizes(1) == (1,)
    assert capture_sizes(5) == (1, 2, 4, 5)
    for most in (7, 64, 100, MOST_ROWS, 5000):
        sizes = capture_sizes(most)
        assert sizes[-1] == min(most, MOST_ROWS)
        assert list(sizes) == sorted(set(sizes))
        gaps = [(b - a) / b for a, b in itertools.pairwise(sizes) if a >= 64]
        assert max(gaps, default=0) <= 0.2


def test_the_step_table_has_their_stairs():
    engine = tiny_engine(
        None, vocab_size=VOCAB, target=tiny_decoder(VOCAB), engine={"max_running": 4, "max_step_rows": 64}
    )
    with_graphs(engine)
    table = profile_engine(engine, settings=ProfileSettings(rows=(3, 40), requests=(1,), rounds=1))
    assert table.staircase_rows == engine.graphs.sizes[-1] == 20
    assert set(engine.graphs.sizes) | {3, 21, 40, 64} == set(table.rows.tolist())
    assert table.verify_cost_ms(9) == table.verify_cost_ms(16)


def test_graphs_can_be_turned_off():
    assert parse_app_config({}).engine.cuda_graphs
    assert not parse_app_config({"engine": {"cuda_graphs": False}}).engine.cuda_graphs
    assert torch.device("cpu").type != "cuda"  # they are made on a GPU only
