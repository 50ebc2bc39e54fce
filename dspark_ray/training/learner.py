"""One optimizer step at a time: the network, its average, the optimizer and the random state."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dspark_ray.core.errors import ConfigError, DsparkError
from dspark_ray.models.drafters.families import DrafterNetwork, new_network
from dspark_ray.models.drafters.network import DSparkNetwork
from dspark_ray.training.anchors import TrainingBatch, choose_anchors, pack
from dspark_ray.training.cache import TargetCache
from dspark_ray.training.config import OptimizerConfig, TrainingConfig
from dspark_ray.training.forward import SharedWeights, run_blocks
from dspark_ray.training.losses import LossParts, LossWeights, agreement, dspark_loss, position_weights
from dspark_ray.training.ranks import Ranks
from dspark_ray.training.shards import local, shard_like, shard_network, shards_like, whole


class NonFiniteLossError(DsparkError):
    """The loss became NaN or infinite; weights and the last saved state are intact."""

    def __init__(self, message: str, numbers: tuple[int, ...]) -> None:
        super().__init__(message, numbers)
        self.message = message
        self.numbers = numbers  # of this process's sequences in the cache

    def __str__(self) -> str:
        return self.message


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then cosine to `final_fraction` at `total_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


class Learner:
    """Everything a saved state holds. Steps depend on nothing else, so a resumed run repeats them exactly."""

    def __init__(
        self, config: TrainingConfig, network: DrafterNetwork, shared: SharedWeights, ranks: Ranks
    ) -> None:
        self.config = config
        self._ranks = ranks
        self.network = network
        self.shared = shared
        self.averaged = new_network(network.config).requires_grad_(False)
        self.averaged.load_state_dict(network.state_dict())
        if config.trainable == "confidence":
            _freeze_all_but_confidence(network)
        self._in_shards = config.parallel == "fsdp" and ranks.count > 1
        if self._in_shards:
            shard_network(network)
            shard_network(self.averaged)
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

    def sample_batch(self, cache: TargetCache, numbers: list[int], lengths: Tensor) -> list[TrainingBatch]:
        """This process's part of a step, in `accumulate` batches: random sequences of similar length (less
        padding), random anchors in each."""
        count = self.config.sequences_per_step
        pool = torch.randint(len(numbers), (4 * count,), generator=self.generator)
        pool = pool[lengths[pool].argsort(stable=True)]
        start = int(torch.randint(4, (1,), generator=self.generator)) * count
        chosen = [numbers[i] for i in pool[start : start + count].tolist()]
        sequences = [cache.sequence(number) for number in chosen]
        # For all sequences, other processes' too: the draws must not depend on how many processes there are.
        anchors = [choose_anchors(s, self.config.anchors_per_sequence, self.generator) for s in sequences]
        batches = []
        for part in range(self.config.accumulate):
            first = self._ranks.rank + part * self._ranks.count
            own = slice(first, None, self._ranks.count * self.config.accumulate)
            batch = pack(sequences[own], anchors[own], self.network.config.block_size)
            batches.append(replace(batch, numbers=tuple(chosen[own])))
        return batches

    def train_step(self, batches: Sequence[TrainingBatch]) -> LossParts:
        """One optimizer step over all processes' batches.

        Raises `NonFiniteLossError`, which names the sequences, before the weights are touched; in all
        processes alike.
        """
        rate = learning_rate(self.step, self.config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        row_weights = [self._slot_weights.expand(b.valid.shape)[b.valid] for b in batches]
        total_weight = self._ranks.sum(torch.stack([w.sum() for w in row_weights]).sum())
        self.optimizer.zero_grad(set_to_none=True)
        counted = torch.zeros(5)  # loss, its three parts, blocks
        for batch, weights in zip(batches, row_weights, strict=True):
            loss = self._loss(batch, weights, total_weight)
            loss.total.backward()
            parts = (loss.cross_entropy, loss.total_variation, loss.confidence)
            counted += torch.tensor([loss.total.item(), *parts, batch.num_blocks])
        if self._in_shards:  # their gradients are summed already
            counted = self._ranks.sum(counted)
        else:
            counted = self._ranks.sum_gradients(self.network.parameters(), counted)
        norm = whole(nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip_norm))
        if not (math.isfinite(counted[0].item()) and math.isfinite(norm.item())):
            numbers = tuple(number for batch in batches for number in batch.numbers)
            raise NonFiniteLossError(
                f"step {self.step}: loss {counted[0].item()}, gradient norm {norm.item()}", numbers
            )
        self.optimizer.step()
        self.step += 1
        self.blocks += int(counted[4])
        self._average()
        return LossParts(counted[0], *counted[1:4].tolist())

    def skip_step(self) -> None:
        """Counts a step that changed nothing."""
        self.step += 1

    def _loss(self, batch: TrainingBatch, row_weights: Tensor, total_weight: Tensor) -> LossParts:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bf16):
            out = run_blocks(self.network, batch, self.shared)
        agreed = agreement(out.logits, out.draft_ids, out.top_probs)
        return dspark_loss(agreed, out.confidence_logit, row_weights, self._weights, total_weight)

    @torch.no_grad()
    def _average(self) -> None:
        decay = min(self.config.optimizer.ema_decay, self.step / (self.step + 9.0))
        averaged, network = (local(n.parameters()) for n in (self.averaged, self.network))
        torch._foreach_lerp_(averaged, network, 1.0 - decay)

    def num_parameters(self) -> tuple[int, int]:
        """Held by this process, and of the whole drafter."""
        parameters = list(self.network.parameters())
        return sum(p.numel() for p in local(parameters)), sum(p.numel() for p in parameters)

    def whole_average(self) -> DrafterNetwork | None:
        """The averaged drafter for the first process, None for others. All processes call it."""
        if not self._in_shards:
            return self.averaged if self._ranks.is_first else None
        state = whole(self.averaged.state_dict(), keep=self._ranks.is_first)
        if not self._ranks.is_first:
            return None
        network = new_network(self.network.config).requires_grad_(False)
        network.load_state_dict(state)
        return network

    def state(self) -> dict[str, Any]:
        """What a run continues from, the same for any number of processes. All processes call it; only the
        first one's is whole."""
        keep = self._ranks.is_first
        return {
            "network": whole(self.network.state_dict(), keep=keep),
            "averaged": whole(self.averaged.state_dict(), keep=keep),
            "optimizer": whole(self.optimizer.state_dict(), keep=keep),
            "generator": self.generator.get_state(),
            "draft_to_target": self.shared.draft_to_target,
            "step": self.step,
            "blocks": self.blocks,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(shards_like(state["network"], self.network.state_dict()))
        self.averaged.load_state_dict(shards_like(state["averaged"], self.averaged.state_dict()))
        self.optimizer.load_state_dict(self._own_moments(state["optimizer"]))
        self.generator.set_state(state["generator"])
        self.step, self.blocks = state["step"], state["blocks"]

    def _own_moments(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state, its tensors cut as their parameters are."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        moments = {
            number: {
                name: value if value.ndim == 0 else shard_like(value, parameters[number])
                for name, value in of_parameter.items()
            }
            for number, of_parameter in state["state"].items()
        }
        return {**state, "state": moments}


def _freeze_all_but_confidence(network: DrafterNetwork) -> None:
    """On texts it was trained on, a drafter is right more often than it will be, and a head that learns
    there says too much, however it is scaled afterwards."""
    if not isinstance(network, DSparkNetwork) or network.confidence_head is None:
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
