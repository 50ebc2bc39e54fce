"""What a training YAML says, checked key by key (see configs/training/)."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from dspark_ray.core.errors import ConfigError
from dspark_ray.core.section import Section

# What each kind is by default, where it differs from DSpark.
_KIND_DEFAULTS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": {"markov_rank": 0, "confidence_head": False, "sample_from_anchor": False},
    "eagle3": {"num_layers": 1, "markov_rank": 0, "confidence_head": False},
    "mtp": {"num_layers": 1, "block_size": 1, "markov_rank": 0, "confidence_head": False},
}


class ArchitectureConfig(Section):
    """The drafter's shape; attention, MLP and RoPE shapes are the target's."""

    kind: Literal["dspark", "dflash", "eagle3", "mtp"] = "dspark"
    num_layers: int = Field(2, ge=1, description="eagle3 and mtp: 1")
    block_size: int = Field(7, ge=1, le=32, description="γ; eagle3: the horizon; mtp: 1")
    target_layer_ids: tuple[int, ...] = Field(description="taps: 0-based layers whose output is read")
    draft_vocab_size: int | None = Field(8192, ge=2, description="None: the whole vocabulary")
    mask_token_id: int | None = Field(
        None, ge=0, description="a token that never occurs in text (dspark, dflash)"
    )
    markov_rank: int = Field(64, ge=0, description="of the sequential head; 0: none (dspark)")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence_head: bool = True
    sample_from_anchor: bool = Field(True, description="False: one mask more, masks predict themselves")
    qk_norm: bool = False
    context_window: int | None = Field(None, ge=16, description="context positions seen; None: all")
    init_layers: tuple[int, ...] = Field(
        (), description="target layers the draft layers start from; () random"
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_kind(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {**_KIND_DEFAULTS.get(values.get("kind", "dspark"), {}), **values}
        return values

    @model_validator(mode="after")
    def _check(self) -> "ArchitectureConfig":
        if self.init_layers and len(self.init_layers) != self.num_layers:
            raise ValueError("architecture.init_layers needs one target layer per draft layer")
        if list(self.target_layer_ids) != sorted(set(self.target_layer_ids)) or not self.target_layer_ids:
            raise ValueError("architecture.target_layer_ids must increase")
        if self.kind in ("dspark", "dflash") and self.mask_token_id is None:
            raise ValueError(f"architecture.mask_token_id is needed for kind {self.kind!r}")
        if self.kind != "dspark" and (self.markov_rank or self.confidence_head):
            raise ValueError(
                f"architecture: kind {self.kind!r} has neither a sequential nor a confidence head"
            )
        if self.kind in ("eagle3", "mtp") and self.num_layers != 1:
            raise ValueError(f"architecture.num_layers must be 1 for kind {self.kind!r}")
        if self.kind == "mtp" and (self.block_size != 1 or len(self.target_layer_ids) != 1):
            raise ValueError("architecture: kind 'mtp' has one tap and block_size 1")
        if self.kind == "dspark" and not self.markov_rank and not self.confidence_head:
            raise ValueError("architecture: without heads it is kind 'dflash'")
        return self


class CacheConfig(Section):
    """The target cache on disk."""

    folder: Path
    top_k: int = Field(64, ge=1, description="target probabilities kept per position")
    max_length: int = Field(1024, ge=8, description="longest sequence; a longer response is cut")
    max_gb: float = Field(20.0, gt=0)
    refresh_minutes: float = Field(10.0, gt=0, description="how often data files are looked at for new lines")


class OptimizerConfig(Section):
    """AdamW with cosine decay after warm-up, clipping and an averaged copy."""

    learning_rate: float = Field(1e-3, gt=0)
    final_fraction: float = Field(0.05, ge=0, le=1, description="learning rate at the end, relative")
    warmup_steps: int = Field(100, ge=0)
    total_steps: int = Field(8000, ge=1)
    weight_decay: float = Field(0.01, ge=0)
    beta2: float = Field(0.95, gt=0, lt=1)
    clip_norm: float = Field(1.0, gt=0)
    ema_decay: float = Field(0.999, ge=0, lt=1)


class LossConfig(Section):
    """Weights of the loss terms (0.1, 0.9, 1.0 in the paper) and γ' of the position weights."""

    cross_entropy: float = Field(0.1, ge=0)
    total_variation: float = Field(0.9, ge=0)
    confidence: float = Field(1.0, ge=0)
    position_decay: float = Field(4.0, gt=0)


class TrainingConfig(Section):
    """One training run. Same folder, same config: it continues where it stopped."""

    target: Path = Field(description="as model.source: default, a directory or a hub id")
    data: tuple[Path, ...] = Field(description="JSON lines files; they may grow during the run")
    output: Path = Field(description="folder of the run: state, log, exported checkpoint")
    start_from: Path | None = Field(None, description="checkpoint whose weights a new run starts from")
    trainable: Literal["all", "confidence"] = Field(
        "all", description="confidence: that head alone, best on texts that the rest was not trained on"
    )
    architecture: ArchitectureConfig
    cache: CacheConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    sequences_per_step: int = Field(8, ge=1, description="of all processes together")
    accumulate: int = Field(1, ge=1, description="batches that a process's sequences of a step are run in")
    anchors_per_sequence: int = Field(64, ge=1)
    bf16: bool = Field(True, description="matrix products in bfloat16 (weights and optimizer stay fp32)")
    num_threads: int | None = Field(None, ge=1)
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="what processes hold: each the whole drafter, or shards of it"
    )
    bad_data: Literal["skip", "stop"] = Field(
        "skip", description="what a bad line or a loss that is not finite does; the lines are named"
    )
    tensorboard: bool = Field(False, description="figures to OUTPUT/tensorboard too")
    seed: int = 0
    minutes: float | None = Field(None, gt=0, description="stop, resumable, after this wall time")
    save_minutes: float = Field(5.0, gt=0)
    log_steps: int = Field(20, ge=1)
    validation_steps: int = Field(250, ge=1)
    validation_sequences: int = Field(32, ge=1)
    validation_every: int = Field(32, ge=2, description="one sequence in this many is held out")

    @model_validator(mode="after")
    def _check(self) -> "TrainingConfig":
        if self.trainable == "confidence" and self.start_from is None:
            raise ValueError("trainable: confidence needs start_from, the drafter that the head belongs to")
        return self


def load_training_config(path: Path, **overrides: Any) -> TrainingConfig:
    """The YAML at `path`; raises `ConfigError` with one line per wrong key. Overrides are top-level keys."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        return TrainingConfig.model_validate({**document, **overrides})
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise ConfigError(f"{path} is not a training configuration: {error}") from error
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{path} is not valid:\n" + "\n".join(lines)) from error
