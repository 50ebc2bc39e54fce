"""How fast drafters train: blocks a second of whole optimizer steps, for DSpark, DFlash and EAGLE-3.

    python benchmarks/drafters/throughput.py --threads 2 --json benchmarks/results/training-throughput.json
    torchrun --nproc-per-node 2 benchmarks/drafters/throughput.py --threads 1 --parallel fsdp

The shapes are a training configuration's, with the default target; texts, hidden states and probabilities are
random, which costs the same: reading the cache from disk is left out, the target does not run. The kinds
take turns; the figure is the median of the rounds. Under torchrun all processes share each step.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_ray.models.fetch import resolve_model
from dspark_ray.training.cache import CachedSequence
from dspark_ray.training.config import TrainingConfig, load_training_config
from dspark_ray.training.contest import KINDS, contest_config
from dspark_ray.training.forward import share_weights
from dspark_ray.training.learner import Learner
from dspark_ray.training.ranks import Ranks, join_ranks
from dspark_ray.training.setup import build_network
from dspark_ray.training.target import TransformersTarget

ROOT = Path(__file__).resolve().parents[2]
NUM_TEXTS, PROMPT_TOKENS = 32, 48


@dataclass(frozen=True, slots=True)
class RandomTexts:
    """As much of a cache as a learner asks for."""

    sequences: list[CachedSequence]

    def sequence(self, number: int) -> CachedSequence:
        return self.sequences[number]

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(sequence.tokens) for sequence in self.sequences])


def random_texts(config: TrainingConfig, target: TransformersTarget) -> RandomTexts:
    """Answers of 96 to 256 tokens."""
    generator = torch.Generator().manual_seed(0)
    vocab_size, hidden = target.head_weight.shape
    made = []
    for number in range(NUM_TEXTS):
        response = 96 + 160 * number // (NUM_TEXTS - 1)
        length, shape = PROMPT_TOKENS + response, (response, config.cache.top_k)
        width = len(config.architecture.target_layer_ids) * hidden
        made.append(
            CachedSequence(
                tokens=torch.randint(vocab_size, (length,), generator=generator),
                prompt_length=PROMPT_TOKENS,
                taps=torch.randn(length, width, generator=generator).bfloat16(),
                top_ids=torch.randint(vocab_size, shape, generator=generator),
                top_probs=torch.rand(shape, generator=generator).softmax(-1),
                temperature=1.0,
            )
        )
    return RandomTexts(made)


class Contender:
    """One kind in training."""

    def __init__(self, config: TrainingConfig, target: TransformersTarget, ranks: Ranks) -> None:
        torch.manual_seed(config.seed)
        size = config.architecture.draft_vocab_size or target.head_weight.shape[0]
        network = build_network(config.architecture, target, torch.arange(size), None)
        shared = share_weights(target.embedding, target.head_weight, torch.arange(size), bf16=config.bf16)
        self.learner = Learner(config, network, shared, ranks)
        self.texts = random_texts(config, target)
        self.rates: list[float] = []

    def run(self, steps: int) -> float:
        """Blocks a second over so many steps."""
        numbers, before, began = list(range(NUM_TEXTS)), self.learner.blocks, time.perf_counter()
        for _ in range(steps):
            batches = self.learner.sample_batch(self.texts, numbers, self.texts.lengths)  # type: ignore[arg-type]
            self.learner.train_step(batches)
        return (self.learner.blocks - before) / (time.perf_counter() - began)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    ranks = join_ranks()
    base = load_training_config(options.config, parallel=options.parallel)
    target = TransformersTarget(resolve_model("default"))
    contenders = {kind: Contender(contest_config(base, kind), target, ranks) for kind in options.kinds}
    for contender in contenders.values():
        contender.run(1)  # allocates, and packs weights
    for _ in range(options.rounds):
        for contender in contenders.values():
            contender.rates.append(contender.run(options.steps))
    if ranks.is_first:
        _tell(options, base, contenders, ranks)
    ranks.leave()


def _tell(
    options: argparse.Namespace, base: TrainingConfig, contenders: dict[str, Contender], ranks: Ranks
) -> None:
    results: list[dict[str, Any]] = []
    for kind, contender in contenders.items():
        held, whole = contender.learner.num_parameters()
        rate = statistics.median(contender.rates)
        results.append(
            {
                "kind": kind,
                "parameters": whole,
                "parameters_held": held,
                "blocks_per_s": round(rate, 1),
                "lowest": round(min(contender.rates), 1),
                "highest": round(max(contender.rates), 1),
            }
        )
        print(f"{kind:8} {rate:8.1f} blocks/s  {whole / 1e6:6.2f} M parameters, {held / 1e6:.2f} M held")
    if options.json is not None:
        machine = {"cores": os.cpu_count(), "threads": options.threads, "processes": ranks.count}
        step = {
            "parallel": base.parallel,
            "sequences_per_step": base.sequences_per_step,
            "anchors_per_sequence": base.anchors_per_sequence,
            "bf16": base.bf16,
        }
        report = {"machine": machine, "step": step, "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ROOT / "configs" / "training" / "smollm2-dspark-block7.yaml"
    parser.add_argument("--config", type=Path, default=default, help="a DSpark training configuration")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of each kind in a round")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
