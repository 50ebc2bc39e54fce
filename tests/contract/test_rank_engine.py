"""An engine over several ranks against the same engine over one: texts, journals, and lost ranks."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dspark_ray.core.errors import ConfigError, RankError
from dspark_ray.core.types import Request
from dspark_ray.engine.build import build_engine
from dspark_ray.engine.engine import Engine
from dspark_ray.models.targets.decoder import load_target
from dspark_ray.runtime.ranks import TargetSpec
from tests.tiny import tiny_model_dir
from tests.tiny_engine import STEEP_TABLE, collect, request, run, tiny_config, tiny_drafter_dir, tiny_engine
from tests.tiny_ranks import Led, led

NODES = {
    "two ranks": ["a", "a"],
    "four ranks": ["a"] * 4,
    "two nodes": ["a", "b"],
    "two nodes, four ranks": ["a", "a", "b", "b"],
}
SHAPE = {  # what tests.tiny_engine's drafters are made for
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}


@pytest.fixture
def spec(tmp_path: Path) -> TargetSpec:
    return TargetSpec(tiny_model_dir(tmp_path, **SHAPE), torch.float32, 128)


def requests() -> list[Request]:
    """Greedy and sampled with a seed, so that texts can be compared; prompts that repeat themselves."""
    kinds: list[dict[str, float | int]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}]
    return [
        request(f"r{i}", [3 + i, 5, 8, 3 + i, 5, 8, 13][: 4 + i % 4], max_tokens=24, **kinds[i % 2])
        for i in range(10)
    ]


def whole(spec: TargetSpec, **sections: dict[str, object]) -> dict[str, list[int]]:
    target = load_target(spec.model_dir, spec.dtype, spec.max_positions, spec.quantization)
    return run(tiny_engine(None, target=target, **sections), requests())


def check_journals(ranks: Led) -> None:
    """Everyone was told the same."""
    first, *others = ranks.journals()
    assert first
    for other in others:
        assert other == first  # rank 0 has what they made of the last message, so they have noted it


@pytest.mark.parametrize("nodes", NODES)
def test_plain_texts_are_those_of_one_rank(spec: TargetSpec, nodes: str) -> None:
    expected = whole(spec, speculation={"mode": "off"})
    with led(spec, NODES[nodes]) as ranks:
        assert (
            run(tiny_engine(None, target=ranks.target, speculation={"mode": "off"}), requests()) == expected
        )
        check_journals(ranks)


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_speculation_goes_through_all_ranks(spec: TargetSpec, tmp_path: Path, mode: str) -> None:
    expected = whole(spec, speculation={"mode": "off"})
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", 61, draft_vocab=None)
    with led(spec, ["a", "a", "a", "a"]) as ranks:
        for drafter in (None, checkpoint):
            engine = tiny_engine(drafter, target=ranks.target, table=STEEP_TABLE, speculation={"mode": mode})
            texts, budgets = run_counted(engine)
            counters = engine.stats().counters
            assert counters.drafted_tokens > 0
            assert counters.accepted_tokens > 0 or drafter is checkpoint
            assert mode == "fixed" or counters.trimmed_tokens > 0
            assert mode == "fixed" or len(budgets) > 3
            assert texts == expected
        check_journals(ranks)


def run_counted(engine: Engine) -> tuple[dict[str, list[int]], set[int]]:
    """Texts, and the sizes of budget there were."""
    texts: dict[str, list[int]] = {}
    for item in requests():
        engine.add_request(item)
        texts[item.request_id] = []
    budgets = set()
    while engine.has_work():
        collect(engine.step(), texts)
        budgets.add(int(engine.recent_steps()[-1].budget_tokens))
    return texts, budgets


def test_log_probabilities_of_a_prompt_are_those_of_one_rank(spec: TargetSpec) -> None:
    def answers(engine: Engine) -> Sequence[float]:
        engine.add_request(request("r", [3, 5, 8, 13, 21], temperature=0.0, prompt_logprobs=2, logprobs=1))
        output = engine.step()[0]
        return [entry.logprob for entry in (*output.prompt_logprobs, *output.logprobs)]

    alone = tiny_engine(None, target=load_target(spec.model_dir, spec.dtype, spec.max_positions))
    with led(spec, ["a", "b"]) as ranks:
        found = answers(tiny_engine(None, target=ranks.target))
    assert len(found) == 5
    assert found == pytest.approx(answers(alone), abs=1e-4)


def test_a_preempted_request_and_a_long_prompt(spec: TargetSpec) -> None:
    """Few blocks and small steps: chunks of prompts, blocks that change hands."""
    sections = {
        "model": {"max_model_len": 64},
        "engine": {"kv_num_blocks": 24, "max_running": 8, "max_step_rows": 9},
        "speculation": {"mode": "off"},
    }
    long = [request(f"r{i}", [*range(3 + i, 23 + i)], temperature=0.0, max_tokens=20) for i in range(5)]
    target = load_target(spec.model_dir, spec.dtype, spec.max_positions)
    expected = run(tiny_engine(None, target=target, **sections), long)
    with led(spec, ["a", "a"]) as ranks:
        engine = tiny_engine(None, target=ranks.target, **sections)
        assert run(engine, long) == expected
        assert engine.stats().num_preemptions > 0


def test_a_rank_that_hangs_is_named_with_the_step(spec: TargetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_into_it() -> None:
        with led(spec, ["a", "a", "a", "a"], step_timeout_s=1.0) as ranks:
            hang(ranks, 2, monkeypatch)
            run(tiny_engine(None, target=ranks.target, speculation={"mode": "off"}), requests()[:1])

    # The first message makes the storage, the second is the first step.
    with pytest.raises(RankError, match=r"rank 2 is behind in message 2: it has taken 2 and finished 1"):
        run_into_it()


def hang(ranks: Led, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank `rank` takes its next pass and does not begin it."""

    def forward(*args: object, **kwargs: object) -> None:
        raise RankError("this rank would hang")

    monkeypatch.setattr(ranks.followers[rank - 1]._decoder, "forward", forward)


def test_a_rank_on_another_node_that_hangs_is_named(
    spec: TargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_into_it() -> None:
        with led(spec, ["a", "a", "b", "b"], step_timeout_s=2.0) as ranks:
            hang(ranks, 2, monkeypatch)
            run(tiny_engine(None, target=ranks.target, speculation={"mode": "off"}), requests()[:1])

    with pytest.raises(RankError, match=r"rank 2 .* in message 2"):
        run_into_it()


def test_one_process_does_not_take_several_ranks_for_one(spec: TargetSpec) -> None:
    """A table or a text of the whole model would not be the divided one's."""
    config = tiny_config(engine={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="starts no other ranks: set it to 1"):
        build_engine(config, model_dir=spec.model_dir)
