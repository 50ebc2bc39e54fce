"""The plugin's guards and its two sides, around stand-ins; tests/vllm has the real classes."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import StepPlan
from dspark_ray.vllm_engine import plugin, version
from dspark_ray.vllm_engine.link import LINK_VARIABLE, LinkAddresses
from dspark_ray.vllm_engine.plugin import CoreSide, RankSide, check_signatures, register
from dspark_ray.vllm_engine.terms import StepTerms


class FakePlans:
    def __init__(self) -> None:
        self.waiting: list[StepPlan] = []

    def newest(self) -> StepPlan | None:
        return self.waiting.pop() if self.waiting else None


def test_the_schedule_carries_the_terms_while_a_plan_holds() -> None:
    plans, clock, connected = FakePlans(), ManualClock(1000.0), []

    def connect() -> Any:
        connected.append(1)
        return plans

    core = CoreSide(connect, clock)

    def schedule() -> Any:
        return core.schedule(lambda scheduler, *args: SimpleNamespace(args=args), "scheduler", True)

    assert not hasattr(schedule(), "dspark_terms")
    plans.waiting.append(StepPlan("", 1, 1, "", 50.0, 100.0))
    output = schedule()
    assert output.args == (True,)
    assert output.dspark_terms == StepTerms(1000.0, 50.0, None)
    clock.advance(90.0)
    assert schedule().dspark_terms == StepTerms(1090.0, 50.0, None)
    clock.advance(20.0)
    assert not hasattr(schedule(), "dspark_terms")  # the scheduler actor has died, or is slow
    assert connected == [1]


def test_other_engines_of_this_machine_are_left_alone() -> None:
    """`register` in a process without the link's variable imports no vLLM and patches nothing."""
    code = (
        "import sys; from dspark_ray.vllm_engine.plugin import register; register(); "
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed_version", lambda: "0.40.0")
    monkeypatch.setenv(LINK_VARIABLE, LinkAddresses("inproc://p", "inproc://r").environment()[LINK_VARIABLE])
    with pytest.raises(ConfigError, match=r"vLLM 0\.40\.0 is installed; this adapter is made for 0\.32 or"):
        register()


class Scheduler:
    def schedule(self, throttle_prefills: bool = False) -> None: ...


class GPUModelRunner:
    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> None: ...


class AdaptiveVerificationManager:
    def get_num_tokens(self, num_tokens_per_req: Any, draft_tokens: Any) -> None: ...
    def set_cost_curves(self, draft_curve: Any, verify_curve: Any) -> None: ...


def test_other_methods_are_refused_by_name() -> None:
    known = (Scheduler, GPUModelRunner, AdaptiveVerificationManager)
    check_signatures(known, "0.33.1")

    class Other(AdaptiveVerificationManager):
        def get_num_tokens(self, batch: Any) -> None:  # type: ignore[override]
            ...

    Other.__name__ = "AdaptiveVerificationManager"
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.33\.1: .*get_num_tokens takes self, batch, not self, num"
    ):
        check_signatures((Scheduler, GPUModelRunner, Other), "0.33.1")
    held = SimpleNamespace(**{name: None for name in plugin._ATTRIBUTES if name != "_max_total_logits"})
    with pytest.raises(ConfigError, match="no _max_total_logits"):
        RankSide(held, "0.33.1", None)


def test_vllm_must_find_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(name="dspark-ray")]
    monkeypatch.setattr(plugin.importlib.metadata, "entry_points", lambda group: found)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert plugin.is_loaded_by_vllm()
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert not plugin.is_loaded_by_vllm()
    monkeypatch.setenv("VLLM_PLUGINS", "other,dspark-ray")
    assert plugin.is_loaded_by_vllm()
    found.clear()
    assert not plugin.is_loaded_by_vllm()
