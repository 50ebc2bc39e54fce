"""A sample of the hostile requests of tests/hostile.py, which runs all 10,000 of them by a command."""

from pathlib import Path

from dspark_ray.serving.grammar_compiler import GrammarCompiler
from tests.hostile import LocalTarget, attack, hostile_requests
from tests.tiny import tiny_chat_model_dir

COUNT = 300


async def test_hostile_requests_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    model_dir = tiny_chat_model_dir(tmp_path)
    compiler = GrammarCompiler.of_model(model_dir, timeout_s=5.0)
    try:
        target = LocalTarget(model_dir, compiler.compile)
        findings = await attack(target, hostile_requests(COUNT, seed=1))
    finally:
        await compiler.close()
    assert findings.problems == []
    assert findings.seen.total() == COUNT
    statuses = {line.rsplit(" ", 1)[1] for line in findings.seen}
    assert {"200", "400", "404", "409", "0"} <= statuses  # some were answered, and some clients left
