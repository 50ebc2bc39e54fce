"""Commands with several ranks, the others in processes of this machine: same figures, and how they end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark_ray.cli.main import app
from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.errors import ConfigError, RankError
from dspark_ray.profiling.compare import build_contenders
from dspark_ray.runtime.local_ranks import LocalRanks
from tests.tiny import tiny_chat_model_dir
from tests.tiny_engine import request, run

TIMES = ("tokens_per_s", "wall_s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_chat_model_dir(folder)
    lines = [{"prompt": f"abc abc abc {number} abc abc"} for number in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def args(folder: Path, ranks: int, **speculation: Any) -> dict[str, Any]:
    return {
        "model": {
            "source": str(folder / "tiny-llama"),
            "dtype": "float32",
            "max_model_len": 128,
            "device": "cpu",
        },
        "engine": {
            "tensor_parallel_size": ranks,
            "num_threads": 1,
            "kv_num_blocks": 64,
            "max_running": 4,
            "max_step_rows": 16,
        },
        "speculation": {"drafter": {"kind": "ngram"}, "mode": "fixed", **speculation},
    }


def command(folder: Path, name: str, ranks: int, *options: str) -> str:
    path = folder / f"{name}-{ranks}.yaml"
    path.write_text(json.dumps({"applications": [{"args": args(folder, ranks)}]}))
    result = CliRunner().invoke(
        app, [name, "-c", str(path), "-p", str(folder / "prompts.jsonl"), *options], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_a_command_writes_what_one_rank_writes(folder: Path) -> None:
    figures = {}
    for ranks in (1, 2):
        out = folder / f"out-{ranks}.json"
        command(folder, "evaluate", ranks, "--max-tokens", "12", "--json", str(out))
        report = json.loads(out.read_text())["rows"][0]["report"]
        figures[ranks] = {name: value for name, value in report.items() if name not in TIMES}
    assert figures[2] == figures[1]
    assert len(figures[2]) > 5


def config(folder: Path, ranks: int, **speculation: Any) -> AppConfig:
    return parse_app_config(args(folder, ranks, **speculation))


@pytest.fixture
def pair(folder: Path) -> Iterator[LocalRanks]:
    ranks = LocalRanks(config(folder, 2), folder / "tiny-llama")
    yield ranks
    ranks.close()


def test_engines_share_ranks_that_end_with_their_parent(
    folder: Path, pair: LocalRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(folder / "cache"))
    names = ("off", "fixed", "ngram")
    engines = build_contenders(
        config(folder, 2), folder / "tiny-llama", names, kv_tokens=256, load=pair.load
    )  # with a KV cache each
    item = request("a", [5, 6, 7, 5, 6, 7], temperature=0.0, max_tokens=8)
    texts = [run(engines[name], [item]) for name in (*names, "off")]
    assert all(text == texts[0] for text in texts)
    table = engines["ngram"].budget.table
    assert table is not None
    assert table.made_from["ranks"] == "2, STRICT_PACK"
    (other,) = pair._others
    other.pipe.close()  # as if this process had died
    other.process.join(20.0)
    assert other.process.exitcode == 1
    with pytest.raises(RankError, match="rank 1 has ended"):
        run(engines["off"], [request("b", [5, 6, 7], temperature=0.0, max_tokens=4)])
    pair.close()
    pair.close()


def test_a_number_that_does_not_fit_is_said_and_nothing_is_left(folder: Path) -> None:
    ranks = LocalRanks(config(folder, 3), folder / "tiny-llama")
    with pytest.raises(ConfigError, match="size 3 does not fit 4 attention heads"):
        ranks.load()
    assert not ranks._others


def test_what_another_rank_says_of_itself_is_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone has other weights: rank 0 only sees that it is gone."""
    ranks = LocalRanks(config(folder, 2), folder / "tiny-llama")
    monkeypatch.setattr("dspark_ray.runtime.local_ranks._Other", _lost(folder / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        ranks.load()


def _lost(model_dir: Path) -> Any:
    from dspark_ray.runtime.local_ranks import _Other

    return lambda config, _, rank: _Other(config, model_dir, rank)


def test_training_data_from_two_ranks(folder: Path) -> None:
    out = folder / "data.jsonl"
    options = ["--model", str(folder / "tiny-llama"), "--prompts", str(folder / "prompts.jsonl")]
    result = CliRunner().invoke(
        app,
        ["generate-data", str(out), *options, "--ranks", "2", "--concurrency", "2", "--threads", "1"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    assert len(out.read_text().splitlines()) == 3
