"""From our `speculation` section to vLLM's `speculative_config`, and what vLLM cannot do of it."""

from typing import Any

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import VerificationMode

# Drafters that are models, sample from a distribution, and so may be judged by it.
_SAMPLING_DRAFTERS = ("dspark", "dflash", "eagle3", "mtp", "draft_model")


def speculative_config(config: AppConfig) -> dict[str, Any] | None:
    """The dictionary that `EngineArgs.speculative_config` takes; None without speculation.

    Raises `ConfigError` for a mode that vLLM does not have.
    """
    speculation, drafter = config.speculation, config.speculation.drafter
    if drafter.kind == "none" or speculation.mode is VerificationMode.OFF:
        return None
    settings: dict[str, Any] = {"method": drafter.kind, "num_speculative_tokens": _num_tokens(config)}
    if drafter.kind == "ngram":
        settings |= {"prompt_lookup_min": drafter.ngram_min, "prompt_lookup_max": drafter.ngram_max}
    if drafter.path is not None:
        settings["model"] = drafter.path
    elif drafter.hub_id is not None:
        repository, _, revision = drafter.hub_id.partition("@")
        settings |= {"model": repository} | ({"revision": revision} if revision else {})
    if drafter.kind in _SAMPLING_DRAFTERS and config.vllm.device == "gpu":
        settings["draft_sample_method"] = config.vllm.draft_sample_method
    if is_adaptive(config):
        settings["enable_adaptive_verification"] = True
    return settings | config.vllm.speculative_args


def is_adaptive(config: AppConfig) -> bool:
    """Whether vLLM is to choose how much of each draft it verifies."""
    speculation = config.speculation
    return speculation.mode is VerificationMode.ADAPTIVE and speculation.drafter.kind == "dspark"


def _num_tokens(config: AppConfig) -> int:
    speculation = config.speculation
    match speculation.mode:
        case VerificationMode.ADAPTIVE if speculation.drafter.kind == "dspark":
            return speculation.num_draft_tokens
        case VerificationMode.ADAPTIVE:
            raise ConfigError(
                "speculation.mode adaptive: vLLM verifies adaptively with drafter kind dspark only, and "
                f"this one is {speculation.drafter.kind!r}: set speculation.mode to fixed"
            )
        case VerificationMode.FIXED if speculation.fixed_tokens == 0:
            raise ConfigError(
                "speculation.fixed_tokens 0: vLLM drafts what it verifies; set speculation.mode to off"
            )
        case VerificationMode.FIXED:
            return speculation.fixed_tokens or speculation.num_draft_tokens
        case mode:
            raise ConfigError(
                f"speculation.mode {mode.value}: vLLM has off, fixed and adaptive; choose one of them, or "
                "set engine.kind to native"
            )
