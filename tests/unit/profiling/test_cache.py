"""Step tables are measured once for each identity, and never used for another."""

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.core.config import AppConfig, EngineConfig, parse_app_config
from dspark_ray.core.errors import ArtefactError, CheckpointError
from dspark_ray.profiling import cache
from dspark_ray.profiling.cache import build_profiled_engine, cached_table, table_path
from dspark_ray.profiling.identity import table_identity
from dspark_ray.scheduling.step_table import StepTable
from tests.tiny import tiny_model_dir


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "UNDISTURBED", -1.0)  # whatever else runs beside the tests


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Counts profiling runs, and makes them instant."""
    made: list[dict[str, Any]] = []

    def fake(engine: object, *, made_from: dict[str, Any], on_progress: object) -> StepTable:
        made.append(made_from)
        return StepTable(np.array([1, 64]), np.array([1.0, 9.0]), made_from=made_from)

    monkeypatch.setattr(cache, "profile_engine", fake)
    return made


def config(**speculation: Any) -> AppConfig:
    return parse_app_config(
        {
            "model": {"max_model_len": 64, "dtype": "float32"},
            "engine": {"kv_num_blocks": 32, "max_running": 4, "max_step_rows": 64},
            "speculation": {"drafter": {"kind": "ngram"}, "mode": "adaptive", **speculation},
        }
    )


def test_what_was_measured_beside_other_work_is_used_and_not_kept(
    model_dir: Path,
    profiles: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cache, "UNDISTURBED", 0.5)
    monkeypatch.setattr("time.thread_time", lambda: 0.0)  # the thread never had a CPU
    for count in (1, 2):
        engine = build_profiled_engine(config(), model_dir=model_dir, progress=False)
        assert engine.budget.table is not None
        assert len(profiles) == count
    assert "they are not kept, and the next start measures again" in caplog.text


def test_measured_once(model_dir: Path, profiles: list[dict[str, Any]]) -> None:
    first = build_profiled_engine(config(), model_dir=model_dir, progress=False)
    second = build_profiled_engine(config(), model_dir=model_dir, progress=False)
    assert len(profiles) == 1
    assert first.budget.table is not None
    assert second.budget.table is not None
    assert first.budget.table.digest == second.budget.table.digest


def test_another_configuration_is_another_table(model_dir: Path, profiles: list[dict[str, Any]]) -> None:
    build_profiled_engine(config(), model_dir=model_dir, progress=False)
    build_profiled_engine(config(num_draft_tokens=3), model_dir=model_dir, progress=False)
    assert len(profiles) == 2


def test_another_mode_is_the_same_table(model_dir: Path, profiles: list[dict[str, Any]]) -> None:
    build_profiled_engine(config(), model_dir=model_dir, progress=False)
    build_profiled_engine(config(mode="fixed"), model_dir=model_dir, progress=False)
    assert len(profiles) == 1


def test_off_needs_none(model_dir: Path, profiles: list[dict[str, Any]]) -> None:
    engine = build_profiled_engine(config(mode="off"), model_dir=model_dir, progress=False)
    assert engine.budget.table is None
    assert profiles == []


def test_replicas_that_start_together_measure_once(model_dir: Path, profiles: list[dict[str, Any]]) -> None:
    threads = [
        threading.Thread(
            target=build_profiled_engine, args=(config(),), kwargs={"model_dir": model_dir, "progress": False}
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(profiles) == 1


def test_a_damaged_table_is_measured_again(model_dir: Path, profiles: list[dict[str, Any]]) -> None:
    build_profiled_engine(config(), model_dir=model_dir, progress=False)
    path = table_path(table_identity(config(), model_dir))
    path.write_text("{")
    build_profiled_engine(config(), model_dir=model_dir, progress=False)
    assert len(profiles) == 2
    assert cached_table(table_identity(config(), model_dir)) is not None


def test_a_configured_table_for_something_else_is_refused(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    StepTable(np.array([1, 8]), np.array([1.0, 2.0]), made_from={"hardware": "another"}).save(path)
    with pytest.raises(ArtefactError, match="profile again"):
        build_profiled_engine(config(step_table=str(path)), model_dir=model_dir, progress=False)


def test_a_table_written_by_hand_is_used(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    StepTable(np.array([1, 8]), np.array([1.0, 2.0])).save(path)
    engine = build_profiled_engine(config(step_table=str(path)), model_dir=model_dir, progress=False)
    assert engine.budget.table is not None
    assert engine.budget.table.rows.tolist() == [1, 8]


def test_a_drafter_that_is_not_there(model_dir: Path) -> None:
    absent = config(drafter={"kind": "dspark", "path": "/absent"})
    with pytest.raises(CheckpointError, match="/absent"):
        build_profiled_engine(absent, model_dir=model_dir, progress=False)


def test_a_flat_table_is_said_loudly(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.json"
    StepTable(np.array([1, 64]), np.array([5.0, 5.1])).save(path)
    with caplog.at_level(logging.WARNING):
        build_profiled_engine(config(step_table=str(path)), model_dir=model_dir, progress=False)
    assert "every draft token" in caplog.text


def test_a_cache_that_cannot_be_written(
    model_dir: Path,
    profiles: list[dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "step_tables").write_text("in the way")
    engine = build_profiled_engine(config(), model_dir=model_dir, progress=False)
    assert engine.budget.table is not None
    assert len(profiles) == 1
    assert "cannot be kept" in caplog.text


def test_tables_of_several_ranks_are_their_own(model_dir: Path) -> None:
    def identity(**engine: Any) -> dict[str, Any]:
        return table_identity(config().model_copy(update={"engine": EngineConfig(**engine)}), model_dir)

    assert "ranks" not in identity()  # tables of before there were any stay valid
    pair, spread = identity(tensor_parallel_size=2), identity(tensor_parallel_size=2, rank_placement="SPREAD")
    assert len({str(found.get("ranks")) for found in (pair, spread, identity())}) == 3


def test_tables_of_a_gpu_know_which_attention_was_there(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(wanted: str = "auto") -> dict[str, Any]:
        engine = EngineConfig(attention=wanted)
        return table_identity(config().model_copy(update={"engine": engine}), model_dir)

    versions = {"flashinfer": "0.6.1"}
    monkeypatch.setattr("dspark_ray.profiling.identity.installed_versions", lambda: versions)
    assert "attention" not in identity()  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert identity()["attention"] == {"wanted": "auto", "flashinfer": "0.6.1"}
    assert identity("flashinfer") != identity()
    assert "attention" not in identity("own")
    versions.clear()
    assert "attention" not in identity()  # tables of before there were any stay valid
