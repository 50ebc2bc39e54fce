"""What inference forms of drafters share: fused weights, paged context, what must fit the target."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from dspark_kernels.activation import silu_mul
from dspark_kernels.attention import PagedBatch
from dspark_kernels.linear import PackedLinear
from numpy.typing import NDArray
from torch import Tensor

from dspark_ray.core.errors import CheckpointError, ConfigError
from dspark_ray.models.drafters.base import DeviceRequests, DrafterContext, DraftRequest
from dspark_ray.models.drafters.checkpoint import D2T_TENSOR, load_checkpoint
from dspark_ray.models.drafters.confidence import drafter_digest
from dspark_ray.models.drafters.families import DrafterConfig
from dspark_ray.models.drafters.shape import WINDOW_STEP, DrafterShape
from dspark_ray.models.rope import RopeTable, build_rope
from dspark_ray.models.targets.decoder import Decoder

Weights = dict[str, Tensor]


class LayerWeights:
    """One draft layer's weights, those that are read together stored together."""

    def __init__(self, weights: Weights, prefix: str, qk_norm: bool) -> None:
        def take(name: str) -> Tensor:
            return weights[f"{prefix}.{name}"]

        self.input_norm = take("input_layernorm.weight")
        self.qkv = PackedLinear(
            torch.cat([take(f"self_attn.{n}_proj.weight") for n in ("q", "k", "v")]), None
        )
        self.q_norm = take("self_attn.q_norm.weight") if qk_norm else None
        self.k_norm = take("self_attn.k_norm.weight") if qk_norm else None
        self.o = PackedLinear(take("self_attn.o_proj.weight"), None)
        self.post_norm = take("post_attention_layernorm.weight")
        self.gate_up = PackedLinear(torch.cat([take(f"mlp.{n}_proj.weight") for n in ("gate", "up")]), None)
        self.down = PackedLinear(take("mlp.down_proj.weight"), None)

    def mlp(self, normed: Tensor) -> Tensor:
        """The SwiGLU branch, [N, H] → [N, H]."""
        return self.down(silu_mul(self.gate_up(normed)))


def context_kv_weight(weights: Weights, num_layers: int) -> PackedLinear:
    """K and V projections of all layers in one matrix: [L · 2 · KV · D, width]."""
    layers = range(num_layers)
    parts = [weights[f"layers.{i}.self_attn.{n}_proj.weight"] for i in layers for n in ("k", "v")]
    return PackedLinear(torch.cat(parts), None)


def drafter_rope(config: DrafterShape, context: DrafterContext) -> RopeTable:
    """Tables up to γ positions past the last one that is ever emitted: a block may reach that far."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, **config.rope_scaling}
    max_positions = context.max_positions + config.block_size
    assert isinstance(context.target, Decoder)
    return build_rope(rope, config.head_dim, max_positions, max_positions).to(context.target.device)


class ContextPages:
    """Where the context of a drafter's blocks lies: each request's own KV blocks, or the end of them."""

    def __init__(self, config: DrafterShape, context: DrafterContext) -> None:
        self._config, self.block_size = config, context.kv_block_size
        assert context.path is not None
        self.digest = drafter_digest(Path(context.path))
        if config.context_window is not None and WINDOW_STEP % context.kv_block_size:
            raise ConfigError(
                f"a drafter with a context window needs an engine.kv_block_size that divides {WINDOW_STEP}, "
                f"not {context.kv_block_size}"
            )

    def tables(
        self, requests: Sequence[DraftRequest], ends: Sequence[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The KV blocks of each request's context below `ends` [R], and the positions in them: [R, ≥ 1]
        and [R]."""
        size = self.block_size
        last = [-(-end // size) for end in ends]
        first = [min(self._first_block(r), end) for r, end in zip(requests, last, strict=True)]
        widest = max(1, *(end - start for start, end in zip(first, last, strict=True)))
        tables = np.zeros((len(requests), widest), dtype=np.int32)
        for row, (request, start, end) in enumerate(zip(requests, first, last, strict=True)):
            tables[row, : end - start] = request.blocks[start:end]
        lengths = [max(0, end - start * size) for start, end in zip(first, ends, strict=True)]
        return tables, np.array(lengths, dtype=np.int32)

    def batch(self, requests: Sequence[DraftRequest], ends: Sequence[int], num_rows: int) -> PagedBatch:
        """`num_rows` query rows of each request over its context positions below `ends` [R]; on the host."""
        tables, lengths = self.tables(requests, ends)
        return PagedBatch(
            query_start=torch.arange(0, (len(requests) + 1) * num_rows, num_rows, dtype=torch.int32),
            kv_len=torch.from_numpy(lengths),
            block_tables=torch.from_numpy(tables),
            block_size=self.block_size,
            max_query=num_rows,
            max_kv=int(lengths.max()),
            row_request=torch.arange(len(requests), dtype=torch.int32).repeat_interleave(num_rows),
        )

    def batch_on_device(self, requests: DeviceRequests, num_rows: int) -> PagedBatch:
        """As `batch` up to the anchors, whose positions only the device knows."""
        size, positions, tables = self.block_size, requests.positions, requests.block_tables
        count, width = tables.shape
        first = torch.maximum(
            self._config.context_start(positions) // size, (requests.context_from + size - 1) // size
        )
        first = torch.minimum(first, (positions + size - 1) // size)
        places = first[:, None] + torch.arange(width, device=tables.device)
        starts = torch.arange(0, (count + 1) * num_rows, num_rows, dtype=torch.int32, device=tables.device)
        return PagedBatch(
            query_start=starts,
            kv_len=(positions - first * size).clamp(min=0).int(),
            block_tables=tables.gather(1, places.clamp(max=width - 1)),
            block_size=size,
            max_query=num_rows,
            max_kv=width * size,
            row_request=torch.arange(count, dtype=torch.int32, device=tables.device).repeat_interleave(
                num_rows
            ),
        )

    def _first_block(self, request: DraftRequest) -> int:
        """That the window reaches, and of which this drafter has stored everything."""
        window = self._config.context_start(len(request.token_ids) - 1) // self.block_size
        return max(window, -(-request.context_from.get(self.digest, 0) // self.block_size))


def load_for_target(context: DrafterContext, kind: str) -> tuple[DrafterConfig, Weights, Decoder]:
    """The checkpoint at `context.path` in the target's dtype, checked against the target.

    Raises `ConfigError` without a path or for more tokens than the drafter was made for, `CheckpointError`
    for a checkpoint that is damaged or was made for a target of another shape.
    """
    assert isinstance(context.target, Decoder)
    if context.path is None:
        raise ConfigError(f"speculation.drafter.path is required for kind {kind!r}")
    config, weights = load_checkpoint(Path(context.path), context.target.config.num_layers)
    _check_fits(config, context.target, context)
    dtype, device = context.target.dtype, context.target.device
    cast = {name: t.to(device, dtype if t.is_floating_point() else None) for name, t in weights.items()}
    return config, cast, context.target


def draft_vocabulary(config: DrafterShape, weights: Weights) -> tuple[Tensor | None, Tensor | None]:
    """(target ids of the draft vocabulary, ascending so that an id is found by bisection; the order of the
    checkpoint's rows that makes them so), both [Vd]; None and None without a reduced vocabulary."""
    if config.draft_vocab_size is None:
        return None, None
    deltas = weights[D2T_TENSOR]
    vocab_map = torch.arange(config.draft_vocab_size, device=deltas.device) + deltas
    order = vocab_map.argsort()
    return vocab_map[order], order


def describe_vocabulary(config: DrafterShape) -> str:
    """For the start-up log."""
    return (
        f"{config.output_size} of {config.vocab_size}" if config.draft_vocab_size else str(config.vocab_size)
    )


def _check_fits(config: DrafterShape, target: Decoder, context: DrafterContext) -> None:
    """The drafter was made for a target of this shape, and can draft as many tokens as asked."""
    t = target.config
    for name, have, want in (
        ("hidden_size", config.hidden_size, t.hidden_size),
        ("vocab_size", config.vocab_size, t.vocab_size),
        ("num_target_layers", config.num_target_layers, t.num_layers),
    ):
        if have != want:
            raise CheckpointError(f"{context.path}: the drafter's {name} is {have}, the target's is {want}")
    if context.num_draft_tokens > config.block_size:
        raise ConfigError(
            f"speculation.num_draft_tokens={context.num_draft_tokens} exceeds the drafter's block size "
            f"{config.block_size}; set it to at most {config.block_size}"
        )
