"""Section `model`: a target of Qwen3-8B's shape with random weights and a 5-layer DSpark drafter.

Figures, in order: bandwidth of the memory and the share of it at 1 token; the step table (verification by
rows, drafting by requests, captured sizes as stairs); the heads' share of a round; acceptance on the device
and by the host; drafting with captured passes and without; whole steps against what their parts take;
adaptive lengths against fixed ones, real steps with acceptance drawn from a made-up law. Random weights take
the time that real ones take.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dspark_kernels import torch_ops
from dspark_kernels.choose import markov_chain
from dspark_kernels.dispatch import cuda_version
from timing import Results, arguments, median_ms, stream_ms
from torch import Tensor

from dspark_ray.core.clock import SystemClock
from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine.acceptance import VerifyRequest, verify
from dspark_ray.engine.batch import pack
from dspark_ray.engine.build import DRAFTERS
from dspark_ray.engine.device_acceptance import verify_on_device
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.graphs import GraphedTarget
from dspark_ray.models.drafters.base import DrafterContext, GraphedDrafter
from dspark_ray.models.drafters.checkpoint import save_checkpoint
from dspark_ray.models.drafters.dspark import DSparkDrafter
from dspark_ray.models.drafters.network import DSparkConfig, DSparkNetwork
from dspark_ray.models.graphs import CudaCapturer
from dspark_ray.models.targets.config import TARGETS, DecoderConfig
from dspark_ray.models.targets.decoder import Decoder
from dspark_ray.models.weights import WeightSource
from dspark_ray.profiling.profile import ProfileSettings, profile_engine
from dspark_ray.profiling.step_timer import StepTimer
from dspark_ray.scheduling.lengths import LengthView, verify_adaptive, verify_fixed
from dspark_ray.scheduling.step_table import StepTable, cost_curve

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
TINY = QWEN3_8B | {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 512,
}
NOMINAL_TB_S = {"H200": 4.8, "H100": 3.35, "A100": 2.0, "L40S": 0.864, "B200": 8.0}  # makers' figures
BLOCK = 7
CONTEXT = 512


class RandomWeights(WeightSource):
    """Tensors of any name, made on the device when they are taken."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__({}, dtype=dtype, device=device)
        self._made = dtype

    def take_optional(self, name: str, shape: Sequence[int], part: object = None) -> Tensor:
        assert part is None
        return random_tensor(name, shape, self.device, self._made)


def random_tensor(name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    if "norm" in name:
        return torch.ones(tuple(shape), device=device, dtype=dtype)
    return torch.empty(tuple(shape), device=device, dtype=dtype).normal_(std=shape[-1] ** -0.5)


def main() -> int:
    args = arguments()
    device, results = torch.device(args.device), Results(args.json)
    raw = TINY if args.tiny else QWEN3_8B
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    most = 4 if args.tiny else 256
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(raw, device, dtype, most, Path(folder))
    results.put("machine", machine(device))
    results.measure("memory", lambda: memory_share(engine, device, args.tiny))
    grid = (1, 4, 8) if args.tiny else ProfileSettings().rows
    settings = ProfileSettings(
        rows=grid, context_tokens=32 if args.tiny else CONTEXT, rounds=1 if args.tiny else 3, max_s=45.0
    )
    table: StepTable | None = None

    def profile() -> dict[str, Any]:
        nonlocal table
        table = profile_engine(engine, settings=settings)
        return table.to_dict()

    results.measure("step_table", profile)
    if table is not None:
        known = table
        results.measure("heads", lambda: heads_share(engine, known, device, most))
        results.measure("acceptance", lambda: acceptance(raw["vocab_size"], device, most))
        results.measure("drafting", lambda: drafting(engine, device, most))
        results.measure("steps", lambda: whole_steps(engine, known, most, 3 if args.tiny else 20))
        results.measure("policies", lambda: policies(engine, known, most, 2 if args.tiny else 8))
    return 1 if results.failures else 0


def machine(device: torch.device) -> dict[str, str]:
    found = {"torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        import triton

        found |= {"gpu": torch.cuda.get_device_name(device), "triton": triton.__version__}
        found["kernels"] = "torch" if cuda_version() is torch_ops else "triton"
    return found


def make_engine(
    raw: dict[str, Any], device: torch.device, dtype: torch.dtype, most: int, folder: Path
) -> Engine:
    target_config = TARGETS.get("qwen3")(raw)
    config = engine_config(raw, most, "bfloat16" if dtype == torch.bfloat16 else "float32")
    target = Decoder(target_config, RandomWeights(device, dtype), dtype, config.model.max_model_len)
    random_drafter(folder, raw, target_config, device)
    engine_settings = config.engine
    drafter = DRAFTERS.get("dspark")(
        DrafterContext(
            target=target,
            num_draft_tokens=BLOCK,
            num_slots=engine_settings.kv_num_blocks * engine_settings.kv_block_size,
            kv_block_size=engine_settings.kv_block_size,
            max_positions=config.model.max_model_len,
            path=str(folder),
            temperatures=None,
            ngram_min=1,
            ngram_max=2,
        )
    )
    engine = Engine(config, target, drafter, None, SystemClock())
    if device.type == "cuda" and cuda_version() is not torch_ops:
        capturer = CudaCapturer()
        engine.graphs = GraphedTarget(config, target, engine.kv, capturer)
        engine.graphs.capture_all(drafter.taps)
        assert isinstance(drafter, GraphedDrafter)
        drafter.use_graphs(capturer, most)
        drafter.capture_all()
    return engine


def engine_config(raw: dict[str, Any], most: int, dtype: str) -> AppConfig:
    length = 64 if raw is TINY else 2048
    blocks = most * (-(-(CONTEXT if raw is not TINY else 32) // 16) + 2)
    return parse_app_config(
        {
            "model": {"max_model_len": length, "dtype": dtype},
            "engine": {
                "kv_num_blocks": blocks,
                "max_running": most,
                "max_step_rows": 32 if raw is TINY else 2048,
            },
            "speculation": {"num_draft_tokens": BLOCK, "mode": "adaptive"},
        }
    )


def random_drafter(folder: Path, raw: dict[str, Any], target: DecoderConfig, device: torch.device) -> None:
    layers = target.num_layers
    config = DSparkConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=2 if raw is TINY else 5,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        vocab_size=target.vocab_size,
        num_target_layers=layers,
        target_layer_ids=tuple(range(1, layers - 1, max(1, (layers - 4) // 4))),  # as the released ones
        mask_token_id=0,
        block_size=16,
        markov_rank=16 if raw is TINY else 256,
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DSparkNetwork(config).state_dict().items()}
    state = {name: random_tensor(name, shape, device, torch.bfloat16).cpu() for name, shape in shapes.items()}
    save_checkpoint(folder, config, state, None)


def memory_share(engine: Engine, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Bytes of weights that one token needs, over the time it takes and what the memory can do."""
    source = torch.empty(1 << (20 if tiny else 31), dtype=torch.uint8, device=device)
    copy_ms = stream_ms(source.clone, device, 10)
    bandwidth = 2 * len(source) / copy_ms / 1e9  # TB/s, read and written
    c = engine.target.config
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    layer = c.hidden_size * (heads + c.num_heads * c.head_dim + 3 * c.intermediate_size)
    weights = (c.num_layers * layer + c.vocab_size * c.hidden_size) * engine.target.dtype.itemsize
    timer = StepTimer(engine, SystemClock())
    step = timer.target_step(1, 32, 1)
    with torch.inference_mode():
        packed = pack(step.work, engine.pool.block_size)
        on_device = stream_ms(lambda: engine.forward(packed), device)
        waited = median_ms(lambda: timer.verify_ms(step), device)
    timer.close()
    nominal = next(
        (
            tb
            for name, tb in NOMINAL_TB_S.items()
            if device.type == "cuda" and name in torch.cuda.get_device_name()
        ),
        None,
    )
    reached = weights / on_device / 1e9
    return {
        "weight_bytes": weights,
        "one_token_ms": on_device,
        "one_token_with_verdict_ms": waited,
        "reached_tb_s": reached,
        "copy_tb_s": bandwidth,
        "nominal_tb_s": nominal,
        "share_of_nominal": None if nominal is None else reached / nominal,
        "bound": "at least 0.8 of the nominal bandwidth",
    }


def heads_share(engine: Engine, table: StepTable, device: torch.device, most: int) -> dict[str, Any]:
    """The sequential head's time for blocks of 4 to 16 tokens, and its share of a round."""
    requests = min(128, most)
    heads = engine.drafter.heads  # type: ignore[union-attr]
    round_ms = table.verify_cost_ms(4 * requests) + table.draft_cost_ms(requests)
    found: dict[str, Any] = {"requests": requests, "round_ms": round_ms, "by_gamma": {}}
    for gamma in (4, 8, 16):
        base = torch.randn(requests, gamma, heads.w2.shape[1], device=device).to(heads.w2.dtype)
        anchors = torch.zeros(requests, dtype=torch.int64, device=device)
        with torch.inference_mode():
            ms = stream_ms(partial(markov_chain, base, heads.w1, heads.w2, anchors, None), device)
        found["by_gamma"][gamma] = {"ms": ms, "share_of_round": ms / round_ms}
    return found


def acceptance(vocab: int, device: torch.device, most: int) -> list[dict[str, Any]]:
    """Judging an anchor and three drafted tokens of each request, until the host knows: here and there."""
    rng, found = np.random.default_rng(0), []
    rules = {
        "greedy": SamplingParams(temperature=0.0),
        "sampled": SamplingParams(temperature=1.0),
        "filtered": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    }
    for requests in [r for r in (1, 16, 128) if r <= most]:
        logits = 3 * torch.randn(4 * requests, vocab, device=device)
        q = torch.softmax(torch.randn(3 * requests, vocab, device=device), dim=-1).view(requests, 3, -1)
        for name, sampling in rules.items():
            asked = [
                VerifyRequest(4 * i, rng.integers(vocab, size=3).tolist(), q[i], sampling, rng)
                for i in range(requests)
            ]
            with torch.inference_mode():
                here = median_ms(partial(verify, logits, asked, None), device, 5)
                there = median_ms(partial(verify_on_device, logits, asked, None), device, 5)
            found.append({"requests": requests, "rule": name, "host_ms": here, "device_ms": there})
    return found


def drafting(engine: Engine, device: torch.device, most: int) -> list[dict[str, Any]]:
    """A block for each request, with the drafter's captured passes and without."""
    drafter, found = engine.drafter, []
    assert isinstance(drafter, DSparkDrafter)
    timer, graphs = StepTimer(engine, SystemClock()), drafter.backbone.graphs
    for requests in [r for r in (1, 16, 64) if r <= most]:
        draft = partial(timer.draft_ms, requests, CONTEXT)
        row: dict[str, Any] = {"requests": requests, "captured_ms": None}
        if graphs is not None:
            row["captured_ms"] = median_ms(draft, device, 10)
        drafter.backbone.graphs = None
        row["plain_ms"] = median_ms(draft, device, 10)
        drafter.backbone.graphs = graphs
        found.append(row)
    timer.close()
    return found


def whole_steps(engine: Engine, table: StepTable, most: int, count: int) -> list[dict[str, Any]]:
    """`Engine.step` of requests that decode, half of them greedy, against its target pass and its drafting as
    the table has them: the rest is the host's work that the device waits for."""
    found, longest = [], engine.config.model.max_model_len - 8
    for requests in [r for r in (1, 16, 64, 256) if r <= most]:
        for index in range(requests):
            sampling = SamplingParams(temperature=float(index % 2), max_tokens=longest, ignore_eos=True)
            engine.add_request(Request(f"step-{index}", (1, 2, 3 + index % 50), sampling))
        while len(engine.admission.decoding()) < requests:
            engine.step()
        times = []
        for _ in range(count):
            started = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - started) * 1e3)
        rows = engine.recent_steps()[-1].rows
        parts_ms = table.verify_cost_ms(rows) + table.draft_cost_ms(requests)
        step_ms = sorted(times)[count // 2]
        found.append({"requests": requests, "rows": rows, "step_ms": step_ms, "parts_ms": parts_ms})
        for index in range(requests):
            engine.abort(f"step-{index}")
    return found


def policies(engine: Engine, table: StepTable, most: int, steps: int) -> list[dict[str, Any]]:
    """Tokens per second of real steps whose acceptance is drawn: each request has its own chance a token."""
    timer = StepTimer(engine, SystemClock())
    rng, rows = np.random.default_rng(0), []
    for requests in [r for r in (1, 4, 16, 64, 256) if r <= most]:
        chances = rng.beta(4.0, 1.5, size=(steps, requests))  # the same draws for every policy
        by_policy = {f"fixed {k}": _throughput(timer, table, chances, k) for k in (0, 1, 2, 3, 5, 7)}
        by_policy["adaptive"] = _throughput(timer, table, chances, None)
        best = max(rate for name, rate in by_policy.items() if name != "adaptive")
        rows.append({"requests": requests, "tokens_per_s": by_policy, "ratio": by_policy["adaptive"] / best})
    timer.close()
    return rows


def _throughput(timer: StepTimer, table: StepTable, chances: np.ndarray, fixed: int | None) -> float:
    """chances [steps, requests]; fixed None: adaptive. → emitted tokens per second, the drafting included"""
    steps, requests = chances.shape
    rng = np.random.default_rng(1)
    tokens = spent_ms = 0.0
    context = min(CONTEXT, timer.max_context)
    for step in range(steps):
        survival = chances[step][:, None] ** np.arange(1, BLOCK + 1)
        context_tokens = requests * context
        cost = cost_curve(
            table,
            None,
            base_rows=requests,
            max_draft_tokens=requests * BLOCK,
            num_drafting=requests,
            context_tokens=context_tokens,
        )
        limits = np.full(requests, BLOCK)
        view = LengthView(survival, survival, limits, requests, requests, cost, fixed_tokens=fixed)
        lens = (verify_adaptive if fixed is None else verify_fixed)(view).lens
        rows = int(requests + lens.sum())
        spent_ms += timer.verify_ms(timer.target_step(rows, context, requests))
        if fixed != 0:
            spent_ms += timer.draft_ms(requests, context)
        stands = rng.random((requests, BLOCK)) < chances[step][:, None]
        accepted = np.minimum(stands.cumprod(axis=1).sum(axis=1), lens)
        tokens += requests + float(accepted.sum())
    return tokens / spent_ms * 1e3


if __name__ == "__main__":
    sys.exit(main())
