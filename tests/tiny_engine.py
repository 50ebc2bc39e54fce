"""Engines over tiny random models, made in memory: real steps in a fraction of a millisecond.

engine = tiny_engine(mode="adaptive", vocab_size=5)  # DSpark drafter with random weights
run(engine, [request(...), ...])
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark_kernels.cpu_ops import CpuOps
from dspark_kernels.dispatch import cpu_version
from dspark_kernels.linear import PackedLinear

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.types import AdapterRef, Request, RequestOutput, SamplingParams
from dspark_ray.engine.acceptance import verify
from dspark_ray.engine.ahead import Ahead
from dspark_ray.engine.build import DRAFTERS  # with every drafter registered
from dspark_ray.engine.device_acceptance import verify_on_device
from dspark_ray.engine.engine import Engine
from dspark_ray.models.adjust import AdjusterFactory
from dspark_ray.models.drafters.base import Drafter, DrafterContext
from dspark_ray.models.drafters.checkpoint import save_checkpoint
from dspark_ray.models.drafters.network import DSparkConfig, DSparkNetwork
from dspark_ray.models.targets.config import DecoderConfig
from dspark_ray.models.targets.decoder import Decoder, Linear
from dspark_ray.models.weights import CPU, WeightSource
from dspark_ray.scheduling.step_table import StepTable

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 48, 2, 1, 16, 3


def steep_table(cheap_rows: int) -> StepTable:
    """Cheap up to so many rows, so that drafting pays, and steep above: adaptive budgets differ from step to
    step, and drafts are trimmed."""
    return StepTable(
        rows=np.array([1, *(cheap_rows * k // 4 for k in (4, 5, 6, 8, 16, 64))]),
        verify_ms=np.array([1.0, 1.05, 1.2, 1.5, 2.4, 12.0, 60.0]),
        requests=np.array([1, 64]),
        draft_ms=np.array([0.01, 0.02]),
    )


STEEP_TABLE = steep_table(16)  # for a dozen requests


def decoder_config(vocab_size: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=256,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,) * LAYERS,
    )


def tiny_decoder(
    vocab_size: int,
    *,
    seed: int = 0,
    sharpness: float = 1.0,
    dtype: torch.dtype = torch.float32,
    linear: Linear = PackedLinear,
    device: torch.device = CPU,
    added: dict[str, torch.Tensor] | None = None,
) -> Decoder:
    """A random target; `sharpness` scales its logits, `added` is added to tensors by name."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab_size, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(vocab_size, HIDDEN) * sharpness * 2,
    }
    for index in range(LAYERS):
        prefix = f"model.layers.{index}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": random(width, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": random(kv_width, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": random(kv_width, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": random(HIDDEN, width),
            f"{prefix}.mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    for name, delta in (added or {}).items():
        tensors[name] += delta
    return Decoder(decoder_config(vocab_size), WeightSource(tensors, device=device), dtype, 256, linear)


def tiny_drafter_dir(
    path: Path, vocab_size: int, *, draft_vocab: Sequence[int] | None, seed: int = 1
) -> Path:
    """A random DSpark checkpoint on disk whose Markov bias and confidences really vary."""
    config = DSparkConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INNER,
        vocab_size=vocab_size,
        num_target_layers=LAYERS,
        target_layer_ids=(0, 1),
        mask_token_id=0,
        block_size=4,
        draft_vocab_size=None if draft_vocab is None else len(draft_vocab),
        markov_rank=8,
        qk_norm=True,
    )
    torch.manual_seed(seed)
    network = DSparkNetwork(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "markov" in name or "confidence" in name:
                parameter.normal_(std=0.6)
    mapping = None if draft_vocab is None else torch.tensor(sorted(draft_vocab))
    save_checkpoint(path, config, network.state_dict(), mapping)
    return path


def tiny_config(**sections: dict[str, Any]) -> AppConfig:
    """Small KV and γ = 4; sections override keys."""
    base: dict[str, dict[str, Any]] = {
        "model": {"max_model_len": 128, "dtype": "float32"},
        "engine": {"kv_block_size": 4, "kv_num_blocks": 512, "max_running": 64, "max_step_rows": 256},
        "speculation": {"num_draft_tokens": 4, "mode": "fixed"},
    }
    return parse_app_config(
        {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    )


def tiny_engine(
    checkpoint: Path | None,
    *,
    vocab_size: int = 5,
    table: StepTable | None = STEEP_TABLE,
    target: Decoder | None = None,
    eos_token_ids: tuple[int, ...] = (),
    adjusters: Sequence[AdjusterFactory] = (),
    **sections: dict[str, Any],
) -> Engine:
    """`checkpoint` None with mode `off` is plain decoding, otherwise prompt look-up."""
    config = tiny_config(**sections)
    target = target or tiny_decoder(vocab_size)
    context = DrafterContext(
        target=target,
        num_draft_tokens=config.speculation.num_draft_tokens,
        num_slots=config.engine.kv_num_blocks * config.engine.kv_block_size,
        kv_block_size=config.engine.kv_block_size,
        max_positions=config.model.max_model_len,
        path=str(checkpoint),
        temperatures=None,
        ngram_min=1,
        ngram_max=3,
        confidence=config.speculation.confidence,
    )
    drafter: Drafter | None = None
    if config.speculation.mode.value != "off":
        kind = config.speculation.drafter.kind if checkpoint else "ngram"
        drafter = DRAFTERS.get("dspark" if kind == "none" else kind)(context)
    return Engine(
        config, target, drafter, table, ManualClock(), eos_token_ids=eos_token_ids, adjusters=adjusters
    )


PATHS = ("host", "device")
"""Who chooses tokens: code of the host, or what runs on a GPU, here on tensors of the CPU."""
AHEAD = "ahead"
"""As on the device, in steps that are launched before the one before them is read."""


def on_path(path: str, engine: Engine) -> Engine:
    """The engine, choosing tokens as on a GPU where `path` is not "host"."""
    on_device = path != "host"
    engine.ahead = Ahead(engine) if path == AHEAD else None
    engine.acceptor = verify_on_device if on_device else verify
    for owner in (engine.drafter, getattr(engine.drafter, "heads", None)):
        if hasattr(owner, "chooses_on_device"):
            owner.chooses_on_device = on_device
    return engine


def request(
    request_id: str, prompt: Sequence[int], *, adapter: AdapterRef | None = None, **sampling: Any
) -> Request:
    return Request(request_id, tuple(prompt), SamplingParams(**sampling), adapter=adapter)


def skip_without_invariant_kernels() -> None:
    """For tests of bf16 rows that must not depend on their batch."""
    ops = cpu_version()
    if not isinstance(ops, CpuOps) or not ops.has_linear:
        pytest.skip("this CPU has no compiled bf16 linear")


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Everything to its end; request id → output tokens."""
    for item in requests:
        engine.add_request(item)
    texts: dict[str, list[int]] = {item.request_id: [] for item in requests}
    while engine.has_work():
        collect(engine.step(), texts)
    return texts


def collect(outputs: Sequence[RequestOutput], texts: dict[str, list[int]]) -> None:
    for output in outputs:
        texts[output.request_id] += output.token_ids
