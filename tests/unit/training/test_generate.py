"""Self-written data: openings are continued, endings appended, and wrong files refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.prompts import OnBadLine, Prompt, read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.training.answers import answer_prompts, answered_lines
from dspark_ray.training.data import read_samples
from dspark_ray.training.generate import (
    GenerationSettings,
    Opening,
    SelfWriter,
    Written,
    load_openings,
    write_samples,
)
from tests.tiny import tiny_chat_model_dir
from tests.tiny_engine import tiny_decoder, tiny_engine


def write_some(tmp_path: Path, settings: GenerationSettings, count: int) -> tuple[list[str], list[dict]]:
    """The decoded prompts and the samples of `count` texts."""
    tokenizer = Tokenizer.load(tiny_chat_model_dir(tmp_path))
    vocab_size = tokenizer.vocab_size
    engine = tiny_engine(
        None, vocab_size=vocab_size, target=tiny_decoder(vocab_size), speculation={"mode": "off"}
    )
    samples: list[dict] = []
    for sample in SelfWriter(engine, tokenizer, settings).samples(lambda: len(samples) < count):
        samples.append(sample)
    assert not engine.has_work()
    return [tokenizer.decode(s["prompt_ids"], skip_special_tokens=False) for s in samples], samples


def test_user_turns_continue_an_opening_and_get_its_ending(tmp_path: Path) -> None:
    settings = GenerationSettings(
        openings=(Opening(opening="Why is", ending=" Be brief.", max_tokens=12),),
        free_share=0.0,
        max_answer_tokens=8,
        concurrency=4,
    )
    prompts, samples = write_some(tmp_path, settings, 6)
    assert all("Why is" in prompt and " Be brief." in prompt for prompt in prompts)
    assert len(set(prompts)) > 1
    assert {sample["temperature"] for sample in samples} <= set(settings.temperatures)
    assert all(0 < len(sample["response_ids"]) <= 8 for sample in samples)


def test_without_openings_the_model_writes_the_whole_turn(tmp_path: Path) -> None:
    settings = GenerationSettings(max_user_tokens=12, max_answer_tokens=4, concurrency=4)
    prompts, _ = write_some(tmp_path, settings, 4)
    assert len(set(prompts)) > 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{opening: Why}", "- {opening: Why, color: red}", "- 3", "[", "- {max_tokens: many}"]
)
def test_a_file_that_is_no_list_of_openings_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "openings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"openings\.yaml"):
        load_openings(path)


def test_the_shipped_openings_load() -> None:
    openings = load_openings(Path("configs/training/openings/general.yaml"))
    assert len(openings) > 50
    assert any(opening.ending for opening in openings)


def test_given_prompts_are_answered_once_each_and_resumed(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_chat_model_dir(tmp_path))
    vocab_size = tokenizer.vocab_size
    engine = tiny_engine(
        None, vocab_size=vocab_size, target=tiny_decoder(vocab_size), speculation={"mode": "off"}
    )
    given = tmp_path / "prompts.jsonl"
    lines = ['{"turns": ["a", "b"]}', '{"prompt": "c"}', '{"messages": [{"role": "user", "content": "d"}]}']
    given.write_text("\n".join(lines * 2))
    prompts, out = read_prompts(given, tokenizer), tmp_path / "out.jsonl"

    def answer(keep_going: int) -> None:
        answered = answered_lines(out)
        left = iter(range(keep_going))
        samples = answer_prompts(
            engine,
            [p for p in prompts if p.line not in answered],
            temperatures=(0.0, 1.0),
            max_tokens=5,
            seed=0,
            concurrency=2,
            keep_going=lambda: next(left, None) is not None,
        )
        write_samples(out, samples)

    answer(keep_going=8)
    assert 0 < len(answered_lines(out)) < 6
    with out.open("a") as file:
        file.write('{"prompt_ids": [1, 2')  # killed while it wrote
    answer(keep_going=1000)
    assert not engine.has_work()
    result = read_samples(out, vocab_size=vocab_size, max_length=64)
    assert not result.errors
    assert sorted(map(tuple, (p.token_ids for p in prompts))) == sorted(s.prompt_ids for s in result.samples)
    assert {s.temperature for s in result.samples} == {0.0, 1.0}


def test_what_was_written_is_counted_while_it_is(tmp_path: Path) -> None:
    written, seen = Written(), []

    def samples() -> Iterator[dict[str, object]]:
        for length in (2, 3):
            seen.append(str(written))
            yield {"response_ids": [1] * length}

    write_samples(tmp_path / "new" / "data.jsonl", samples(), written)
    assert seen == ["0 texts, 0 answer tokens", "1 texts, 2 answer tokens"]
    assert str(written) == "2 texts, 5 answer tokens"
    assert len((tmp_path / "new" / "data.jsonl").read_text().splitlines()) == 2


def test_prompts_that_cannot_be_answered_are_named(tmp_path: Path) -> None:
    """Over-long ones, and answers of one token, are left out or stop the writing."""
    engine = tiny_engine(None, vocab_size=11, target=tiny_decoder(11), speculation={"mode": "off"})
    prompts = [Prompt(1, (1, 2)), Prompt(2, (1,) * 5000), Prompt(3, (3, 4))]
    told: list[str] = []

    def answers(max_tokens: int, on_bad_line: OnBadLine | None) -> list[dict[str, object]]:
        settings = {"temperatures": (0.0,), "seed": 0, "concurrency": 2, "keep_going": lambda: True}
        some = answer_prompts(engine, prompts, max_tokens=max_tokens, on_bad_line=on_bad_line, **settings)
        return list(some)

    assert sorted(answer["prompt_line"] for answer in answers(4, told.append)) == [1, 3]
    assert [message.split(":")[0] for message in told] == ["line 2 of the prompts"]
    with pytest.raises(ConfigError, match="line 2 of the prompts"):
        answers(4, None)
    told.clear()
    assert answers(1, told.append) == []
    assert [told.count(f"line {line} of the prompts has no answer") for line in (1, 2, 3)] == [1, 0, 1]
    assert not engine.has_work()
