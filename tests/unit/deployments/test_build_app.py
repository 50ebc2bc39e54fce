"""The application's builder, without a cluster: what it checks and how it resolves files."""

from pathlib import Path
from typing import Any

import pytest

from deployments import app
from deployments.app import PROJECT_DIR
from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.errors import ConfigError


def config(drafter: str, source: str = "default") -> AppConfig:
    return parse_app_config(
        {"model": {"source": source}, "speculation": {"drafter": {"kind": "dspark", "path": drafter}}}
    )


@pytest.fixture(autouse=True)
def _only_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """`build_app` returns the configuration that it would deploy."""
    monkeypatch.setattr(app, "assemble", lambda config, *factories: config)


def with_absolute_paths(config: AppConfig) -> AppConfig:
    built: Any = app.build_app(config)
    return built


def test_files_are_found_from_here_and_from_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafter").mkdir()
    assert with_absolute_paths(config("drafter")).speculation.drafter.path == str(tmp_path / "drafter")
    assert with_absolute_paths(config("configs")).speculation.drafter.path == str(PROJECT_DIR / "configs")
    assert with_absolute_paths(config(str(tmp_path))).speculation.drafter.path == str(tmp_path)


def test_a_missing_file_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.drafter\.path: 'models/nothing'"):
        with_absolute_paths(config("models/nothing"))


def test_a_source_that_is_no_directory_is_left_to_the_fetcher(tmp_path: Path) -> None:
    assert with_absolute_paths(config(str(tmp_path), "owner/name")).model.source == "owner/name"
    assert with_absolute_paths(config(str(tmp_path), str(tmp_path))).model.source == str(tmp_path)


def test_no_option_of_the_builder_is_a_string_annotation() -> None:
    """Serve skips the validation of `args` where the builder's annotation is a string."""
    from deployments.app import build_app

    assert build_app.__annotations__["args"] is AppConfig
