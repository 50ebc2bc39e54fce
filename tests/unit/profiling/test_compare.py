"""Comparisons: every variant in every round, ratios within a round, shared weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.errors import ConfigError
from dspark_ray.profiling import cache
from dspark_ray.profiling.compare import build_contenders, compare, kv_tokens_needed, run_comparison
from dspark_ray.scheduling.step_table import StepTable
from tests.tiny import tiny_model_dir

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 4, 4, 4, 4], [5, 6, 7, 8]]


@pytest.fixture(autouse=True)
def _instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(engine: object, *, made_from: dict[str, Any], on_progress: object) -> StepTable:
        return StepTable(np.array([1, 64]), np.array([1.0, 9.0]), made_from=made_from)

    monkeypatch.setattr(cache, "profile_engine", fake)
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def config(kind: str = "ngram") -> AppConfig:
    return parse_app_config(
        {
            "model": {"max_model_len": 128, "dtype": "float32"},
            "engine": {"kv_num_blocks": 32, "max_running": 4, "max_step_rows": 64},
            "speculation": {"drafter": {"kind": kind, "ngram_min": 1}, "mode": "adaptive"},
        }
    )


def test_rounds_and_ratios(model_dir: Path) -> None:
    names = ["off", "fixed", "adaptive"]
    seen: list[tuple[str, int, int]] = []
    engines = build_contenders(config(), model_dir, names, kv_tokens=2000)
    result = compare(
        engines,
        PROMPTS,
        concurrencies=[1, 2],
        rounds=2,
        max_tokens=16,
        on_run=lambda name, concurrency, number, run: seen.append((name, concurrency, number)),
    )
    assert seen[:3] == [("off", 1, 0), ("fixed", 1, 0), ("adaptive", 1, 0)]
    assert seen[6:9] == [("fixed", 1, 1), ("adaptive", 1, 1), ("off", 1, 1)]  # the order rotates
    assert len(result.measurements) == 2 * 2 * 3
    assert all(m.ratio_to_off == 1.0 for m in result.measurements if m.variant == "off")
    assert all(m.same_text_share == 1.0 for m in result.measurements)
    ratios = {(row["concurrency"], row["system"], row["to"]): row for row in result.ratios()}
    assert len(ratios) == 2 * 3 * 2
    assert all(0 < row["low"] <= row["high"] for row in ratios.values())
    medians = result.medians()
    assert [(row["concurrency"], row["variant"]) for row in medians[:3]] == [(1, n) for n in names]


def test_weights_are_shared_and_modes_differ(model_dir: Path) -> None:
    engines = build_contenders(config(), model_dir, ["off", "fixed", "adaptive", "ngram"], kv_tokens=2000)
    assert len({id(engine.target) for engine in engines.values()}) == 1
    assert engines["off"].drafter is None
    assert engines["fixed"].drafter is engines["adaptive"].drafter is not None
    assert [engine.config.speculation.mode.value for engine in engines.values()] == [
        "off", "fixed", "adaptive", "adaptive",
    ]  # fmt: skip
    assert not any(engine.config.engine.prefix_cache for engine in engines.values())


def test_a_result_says_where_and_how(model_dir: Path) -> None:
    result = run_comparison(
        config(), model_dir, PROMPTS, names=["off", "ngram"], concurrencies=[2], rounds=1, max_tokens=8
    )
    assert result["machine"]["torch"]
    assert result["settings"] == {"prompts": 3, "max_tokens": 8, "rounds": 1}
    assert set(result["step_tables"]) == {"off", "ngram"}


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [(["off", "magic"], "ngram", "magic"), (["off"], "none", "nothing to compare")],
)
def test_what_cannot_be_compared(model_dir: Path, names: list[str], kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_contenders(config(kind), model_dir, names, kv_tokens=2000)


def test_a_comparison_needs_plain_decoding(model_dir: Path) -> None:
    engines = build_contenders(config(), model_dir, ["fixed"], kv_tokens=2000)
    with pytest.raises(ConfigError, match="'off'"):
        compare(engines, PROMPTS, concurrencies=[1], rounds=1, max_tokens=4)


def test_kv_for_the_longest() -> None:
    assert kv_tokens_needed(PROMPTS, 2, 10) == 8 + 5 + 2 * (10 + 64)
    assert kv_tokens_needed([[1]], 3, 10) == 3 + 3 * (10 + 64)


def test_a_number_of_tokens_is_a_variant(model_dir: Path) -> None:
    engines = build_contenders(config(), model_dir, ["off", "fixed-2"], kv_tokens=2000)
    assert engines["fixed-2"].config.speculation.fixed_tokens == 2
    result = compare(engines, PROMPTS, concurrencies=[1], rounds=1, max_tokens=16)
    assert all(m.mean_budget_tokens <= 2 for m in result.measurements)
