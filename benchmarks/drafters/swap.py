"""Two trials of `dspark-ray swap-drafter`, without a server: a damaged drafter, and one that mends it.

    python benchmarks/drafters/swap.py configs/smollm2-135m-cpu.yaml --prompts prompts.jsonl [--share 0.25]

The shipped drafter serves and a copy with noise in its weights is tried: it should be rolled back. Then the
copy serves and the shipped one is tried: it should be promoted. Prints and writes how many judged drafts the
verdicts took, and what they were based on.
"""

import argparse
import itertools
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dspark_ray.cli.common import load_config, load_engine
from dspark_ray.core.types import Request, SamplingParams, SwapOrder
from dspark_ray.engine.engine import Engine
from dspark_ray.models.prompts import read_prompts

RESULT = Path(__file__).resolve().parents[1] / "results" / "hot-swap.json"


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--noise", type=float, default=0.5, help="over each tensor's own spread")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    local = load_engine(load_config(options.config))
    prompts = [prompt.token_ids for prompt in read_prompts(options.prompts, local.tokenizer)]
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    numbers = itertools.count()
    requests = (Request(f"r{n}", tuple(prompts[n % len(prompts)]), sampling) for n in numbers)
    shipped = local.config.speculation.drafter.path
    assert shipped is not None
    assert local.engine.hot_swap is not None
    with tempfile.TemporaryDirectory() as folder:
        damaged = _damaged(Path(shipped), Path(folder), options.noise)
        order = SwapOrder(str(damaged), share=options.share)
        trials = {"a damaged drafter": _trial(local.engine, order, requests, options.running)}
        # By hand, so that it serves whatever its figures.
        swap = local.engine.hot_swap
        swap.start(swap.build(replace(order, automatic=False)))
        swap.promote("the benchmark wants it")
        order = SwapOrder(shipped, share=options.share)
        trials["the shipped one in its place"] = _trial(local.engine, order, requests, options.running)
    result = {"share": options.share, "noise": options.noise, "running": options.running, "trials": trials}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(trials, indent=1))


def _damaged(shipped: Path, folder: Path, noise: float) -> Path:
    """A copy of the checkpoint whose layers are noisy; uncalibrated, since its temperatures are another's."""
    torch.manual_seed(0)
    tensors = load_file(shipped / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("layers.") and tensor.dim() == 2:
            tensors[name] = tensor + noise * tensor.float().std() * torch.randn(tensor.shape)
            tensors[name] = tensors[name].to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((shipped / "config.json").read_bytes())
    return folder


def _trial(engine: Engine, order: SwapOrder, requests: Any, running: int) -> dict[str, Any]:
    """Serves until the trial has ended by itself."""
    swap = engine.hot_swap
    assert swap is not None
    swap.start(swap.build(order))
    steps = engine.counters.target_steps
    while swap.state.status == "trial":
        while len(engine.admission.running) + len(engine.admission.waiting) < running:
            engine.add_request(next(requests))
        engine.step()
    for sequence in [*engine.admission.running, *engine.admission.waiting]:
        engine.abort(sequence.request.request_id)
    arms = dict(zip(("before", "candidate"), (asdict(arm) for arm in swap.state.arms), strict=True))
    return {
        "status": swap.state.status,
        "reason": swap.state.reason,
        "steps": engine.counters.target_steps - steps,
        **arms,
    }


if __name__ == "__main__":
    main()
