"""The conditions under which speculative text must be plain text, and what a comparison must have seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dspark_ray.core.types import Request
from dspark_ray.engine.engine import Engine
from tests.tiny_engine import collect

MODES = ("fixed", "threshold", "algorithm1", "adaptive")
PLENTY = 256  # KV blocks
SCARCE = {4: 16, 16: 32}  # by concurrency: fewer than its requests need, so that some are preempted
MIN_BUDGETS = 3


@dataclass(frozen=True, slots=True)
class Conditions:
    """How an engine is set up."""

    mode: str
    concurrency: int
    prefix_cache: bool
    preempts: bool

    def __str__(self) -> str:
        cache = "cache" if self.prefix_cache else "no cache"
        return f"{self.mode}, {self.concurrency}, {cache}" + (", preempted" if self.preempts else "")

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """Of its configuration."""
        num_blocks = SCARCE[self.concurrency] if self.preempts else PLENTY
        return {
            "speculation": {"mode": self.mode, "threshold": 0.2},
            "model": {"max_model_len": 64},
            "engine": {
                "max_running": self.concurrency,
                "prefix_cache": self.prefix_cache,
                "kv_num_blocks": num_blocks,
            },
        }


GRID = [
    Conditions(mode, concurrency, prefix_cache, preempts)
    for mode, concurrency, prefix_cache, preempts in product(MODES, (1, 4, 16), (True, False), (False, True))
    if not preempts or concurrency in SCARCE  # one request alone takes a block from nobody
]


def check_texts(
    engine: Engine, items: Sequence[Request], plain: dict[str, list[int]], conditions: Conditions
) -> None:
    """`engine` writes the texts of `plain`, and the comparison proves something: there were drafts, accepted
    ones, and for adaptive trimmed ones and several budgets."""
    budgets = set()
    texts: dict[str, list[int]] = {item.request_id: [] for item in items}
    for item in items:
        engine.add_request(item)
    while engine.has_work():
        collect(engine.step(), texts)
        budgets.add(engine.recent_steps()[-1].budget_tokens)
    assert texts == {item.request_id: plain[item.request_id] for item in items}
    counters = engine.counters
    assert counters.drafted_tokens > 0
    assert counters.accepted_tokens > 0
    assert counters.drafted_tokens == counters.verified_tokens + counters.trimmed_tokens
    assert counters.verified_tokens == counters.accepted_tokens + counters.rejected_tokens
    if conditions.mode == "adaptive":
        assert counters.trimmed_tokens > 0
        assert len(budgets) >= MIN_BUDGETS
    assert (engine.stats().num_preemptions > 0) == conditions.preempts
    assert engine.pool.num_used == 0
