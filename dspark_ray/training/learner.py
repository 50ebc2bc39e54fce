"""One optimizer step at a time: the network, its average, the optimizer and the random state."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dspark_ray.core.errors import ConfigError, DsparkError
from dspark_ray.models.drafters.network import DSparkNetwork
from dspark_ray.training.anchors import TrainingBatch, choose_anchors, pack
from dspark_ray.training.cache import TargetCache
from dspark_ray.training.config import OptimizerConfig, TrainingConfig
from dspark_ray.training.forward import SharedWeights, run_blocks
from dspark_ray.training.losses import LossParts, LossWeights, agreement, dspark_loss, position_weights


class NonFiniteLossError(DsparkError):
    """The loss became NaN or infinite; the last saved state is intact."""


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then cosine to `final_fraction` at `total_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


class Learner:
    """Everything a saved state holds. Steps depend on nothing else, so a resumed run repeats them exactly."""

    def __init__(self, config: TrainingConfig, network: DSparkNetwork, shared: SharedWeights) -> None:
        self.config = config
        self.network = network
        self.shared = shared
        self.averaged = DSparkNetwork(network.config).requires_grad_(False)
        self.averaged.load_state_dict(network.state_dict())
        if config.trainable == "confidence":
            _freeze_all_but_confidence(network)
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(network, config.optimizer.weight_decay),
            lr=config.optimizer.learning_rate,
            betas=(0.9, config.optimizer.beta2),
            fused=True,
        )
        self.generator = torch.Generator().manual_seed(config.seed)
        self.step = 0
        self.blocks = 0
        self._weights = LossWeights(**config.loss.model_dump())
        self._slot_weights = position_weights(network.config.block_size, config.loss.position_decay)

    def sample_batch(self, cache: TargetCache, numbers: list[int], lengths: Tensor) -> TrainingBatch:
        """Random sequences of similar length (less padding), random anchors in each."""
        count = self.config.sequences_per_step
        pool = torch.randint(len(numbers), (4 * count,), generator=self.generator)
        pool = pool[lengths[pool].argsort(stable=True)]
        start = int(torch.randint(4, (1,), generator=self.generator)) * count
        sequences = [cache.sequence(numbers[i]) for i in pool[start : start + count].tolist()]
        anchors = [choose_anchors(s, self.config.anchors_per_sequence, self.generator) for s in sequences]
        return pack(sequences, anchors, self.network.config.block_size)

    def train_step(self, batch: TrainingBatch) -> LossParts:
        """One optimizer step; raises `NonFiniteLossError` before the weights are touched."""
        rate = learning_rate(self.step, self.config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bf16):
            out = run_blocks(self.network, batch, self.shared)
        agreed = agreement(out.logits, out.draft_ids, out.top_probs)
        row_weights = self._slot_weights.expand(batch.valid.shape)[batch.valid]
        loss = dspark_loss(agreed, out.confidence_logit, row_weights, self._weights)
        self.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip_norm)
        if not (math.isfinite(loss.total.item()) and math.isfinite(norm.item())):
            raise NonFiniteLossError(
                f"step {self.step}: loss {loss.total.item()}, gradient norm {norm.item()}"
            )
        self.optimizer.step()
        self.step += 1
        self.blocks += batch.num_blocks
        self._average()
        return loss

    @torch.no_grad()
    def _average(self) -> None:
        decay = min(self.config.optimizer.ema_decay, self.step / (self.step + 9.0))
        torch._foreach_lerp_(list(self.averaged.parameters()), list(self.network.parameters()), 1.0 - decay)

    def state(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "draft_to_target": self.shared.draft_to_target,
            "step": self.step,
            "blocks": self.blocks,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.averaged.load_state_dict(state["averaged"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.step, self.blocks = state["step"], state["blocks"]


def _freeze_all_but_confidence(network: DSparkNetwork) -> None:
    """On texts it was trained on, a drafter is right more often than it will be, and a head that learns
    there says too much, however it is scaled afterwards."""
    if network.confidence_head is None:
        raise ConfigError("trainable: this drafter has no confidence head")
    network.requires_grad_(False)
    network.confidence_head.requires_grad_(True)


def _parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices only; norms, biases and the Markov embedding (a table, rarely touched rows) are not."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        (plain if parameter.ndim < 2 or "markov_w1" in name else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
