"""The pure parts of the comparisons over HTTP: systems, prompts, and how rounds are summed up."""

from pathlib import Path

import numpy as np
import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.prompts import RawPrompt
from dspark_ray.profiling.ratio import Run

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "benchmarks" / "serving"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_shipped_systems_load_and_those_without_their_variables_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from servers import load_systems

    for name in ("VLLM_VENV", "LLAMA_SERVER", "GGUF", "EAGLE3_DIR", "MTP_DIR"):
        monkeypatch.delenv(name, raising=False)
    model_dir = '/a "quoted" folder'
    base, some = load_systems(FOLDER / "systems.yaml", None, {"MODEL_DIR": model_dir})
    assert (ROOT / base).is_file()
    assert "left out: vllm plain (VLLM_VENV not set)" in capsys.readouterr().out
    assert [s.name for s in some if s.name.startswith("transformers")] == [
        "transformers",
        "transformers prompt look-up",
    ]
    assert next(s.model for s in some if s.name == "transformers") == model_dir
    variables = dict.fromkeys(
        ("MODEL_DIR", "VLLM_VENV", "LLAMA_SERVER", "GGUF", "EAGLE3_DIR", "MTP_DIR"), "x"
    )
    _, all_of_them = load_systems(FOLDER / "systems.yaml", None, variables)
    assert len({system.port for system in all_of_them}) == len(all_of_them) > len(some)
    with pytest.raises(ConfigError, match="has no vllm dspark"):
        load_systems(FOLDER / "systems.yaml", ["vllm dspark"], {})


def test_files_are_mixed_and_prompts_repeated() -> None:
    from harness import mixed, repeated

    first, second = [RawPrompt(n, text="a") for n in (1, 2, 3)], [RawPrompt(9, text="b")]
    together = mixed([first, second])
    assert [prompt.line for prompt in together] == [1, 9, 2, 3]
    assert [prompt.line for prompt in repeated(together, 6)] == [1, 9, 2, 3, 1, 9]


def test_rounds_become_medians_and_ratios_within_a_round() -> None:
    from harness import medians, ratios

    def result(system: str, number: int, speed: float, tau: float | None) -> tuple[dict, Run]:
        row = {"system": system, "round": number, "tokens_per_s": speed, "failures": []}
        return row | ({} if tau is None else {"tau": tau}), Run(speed, np.ones(4), np.ones(4) / speed)

    speeds = {"plain": (100.0, 50.0, 80.0), "fast": (150.0, 75.0, 120.0)}
    rounds = [
        [result("plain", n, speeds["plain"][n], None), result("fast", n, speeds["fast"][n], 1.5 + n)]
        for n in range(3)
    ]
    rows = [{"load": "8:4", **row} for one in rounds for row, _ in one]
    plain, fast = medians(rows, ratios("8:4", rounds))
    assert plain == {"load": "8:4", "system": "plain", "rounds": 3, "tokens_per_s": 80.0}
    assert fast["tokens_per_s"] == 120.0
    assert fast["tau"] == 2.5
    assert fast["ratio"] == [1.5, 1.5, 1.5]
