"""The canary: a drafter that is never right is said loudly, and trying it leaves the engine as it was."""

from pathlib import Path

import pytest

from dspark_ray.engine.canary import try_drafter, warn_if_drafter_is_dead
from dspark_ray.engine.engine import Engine
from tests.drafter_families import family_dir
from tests.tiny import TOKENIZER_VOCAB_SIZE, tiny_tokenizer_dir
from tests.tiny_engine import request, run, tiny_engine


def engine_for(path: Path, vocab_size: int) -> Engine:
    drafter = {"kind": "dspark", "path": str(path)}
    return tiny_engine(path, vocab_size=vocab_size, speculation={"mode": "adaptive", "drafter": drafter})


def test_trying_a_drafter_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    path = family_dir(tmp_path / "drafter", "dspark", 5)
    tried, fresh = engine_for(path, 5), engine_for(path, 5)
    report = try_drafter(tried, [[1, 2, 3], [4, 1]])
    assert report.num_drafts > 0
    assert report.tau > 1.0
    assert tried.counters == fresh.counters
    requests = [request("a", (1, 2, 3), max_tokens=20, temperature=0.0)]
    assert run(tried, requests) == run(fresh, requests)
    assert tried.counters.accepted_tokens == fresh.counters.accepted_tokens


def test_a_useless_drafter_is_said_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model").mkdir()
    tiny_tokenizer_dir(tmp_path / "model")
    engine = engine_for(
        family_dir(tmp_path / "drafter", "dspark", TOKENIZER_VOCAB_SIZE), TOKENIZER_VOCAB_SIZE
    )
    report = warn_if_drafter_is_dead(engine, tmp_path / "model")
    assert report is not None
    assert not report.is_alive
    assert "NO GOOD FOR THIS TARGET" in caplog.text


def test_without_a_checkpoint_there_is_nothing_to_try(tmp_path: Path) -> None:
    assert warn_if_drafter_is_dead(tiny_engine(None), tmp_path) is None
