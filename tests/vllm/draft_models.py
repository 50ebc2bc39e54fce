"""vLLM's own drafter classes, without a server: a group of one rank, a KV cache of a few blocks, one request.

    model = load_draft_model(target_dir, checkpoint, "dspark", num_tokens=4)
    logits = model.block_logits(taps, [anchor, mask, mask, mask], position)

What vLLM's workers do around the class (shared embeddings, the positions, which rows are stored) is repeated
here from their speculators; weights are loaded by the class itself.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_KV_BLOCK = 32  # the smallest of vLLM's CPU attention
_NUM_BLOCKS = 4


def vllm_config(target_dir: Path, checkpoint: Path, method: str, num_tokens: int) -> Any:
    """What vLLM's own argument parsing makes of a target and a drafter."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(target_dir),
        dtype="float32",
        max_model_len=64,
        block_size=_KV_BLOCK,
        enforce_eager=True,
        skip_tokenizer_init=True,
        speculative_config={
            "model": str(checkpoint),
            "method": method,
            "num_speculative_tokens": num_tokens,
        },
    )
    # No runner of vLLM's runs DSpark on a CPU: V1 refuses the method, V2 needs Triton. None is used here.
    with mock.patch.object(VllmConfig, "_validate_v1_model_runner"):
        return arguments.create_engine_config()


@contextlib.contextmanager
def one_rank(config: Any, folder: Path) -> Iterator[None]:
    """vLLM's process groups, for this process alone."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(config):
        store = f"file://{folder / 'rendezvous'}"
        parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


class DraftModel:
    """One of vLLM's classes with its weights, its KV cache and one request's context in it."""

    def __init__(self, config: Any, target_tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import load_file
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

        draft = config.speculative_config.draft_model_config
        self._config = config
        self.model = initialize_model(vllm_config=config, model_config=draft)
        self.model.load_weights(iter(load_file(Path(draft.model) / "model.safetensors").items()))
        # vLLM's loaders share what a checkpoint leaves to the target.
        if not getattr(self.model, "has_own_embed_tokens", False):
            self.model.model.embed_tokens.weight.data = target_tensors["model.embed_tokens.weight"].float()
        if not getattr(self.model, "has_own_lm_head", False):
            self.model.lm_head.weight.data = target_tensors["lm_head.weight"].float()
        process_weights_after_loading(self.model, draft, torch.device("cpu"))
        self._layers = self._attention_layers()
        self._builder = self._metadata_builder()

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose outputs vLLM feeds to this drafter. It names the layers whose inputs they are."""
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

        return tuple(i - 1 for i in get_eagle3_aux_layers_from_config(self._config.speculative_config))

    @property
    def samples_from_anchor(self) -> bool:
        """As vLLM's DSpark speculator reads it."""
        draft = self._config.speculative_config.draft_model_config
        return bool(getattr(draft.hf_config, "sample_from_anchor", True))

    def _attention_layers(self) -> dict[str, Any]:
        layers = self._config.compilation_config.static_forward_context
        names = [layer.self_attn.attn.layer_name for layer in self.model.model.layers]
        for layer in (layers[name] for name in names):
            # The CPU backend keeps a key and its value side by side.
            layer.kv_cache = torch.zeros(_NUM_BLOCKS, layer.num_kv_heads, _KV_BLOCK, 2 * layer.head_size)
        return {name: layers[name] for name in names}

    def _metadata_builder(self) -> Any:
        """It also tells the layers how the CPU lays out their keys."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        layer = next(iter(self._layers.values()))
        spec = FullAttentionSpec(
            block_size=_KV_BLOCK,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=torch.float32,
        )
        return CPUAttentionMetadataBuilder(spec, list(self._layers), self._config, torch.device("cpu"))

    @contextlib.contextmanager
    def _rows(self, start: int, count: int, *, causal: bool) -> Iterator[None]:
        """vLLM's forward context of a request's rows `start` … `start + count`, all before them cached."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        slots = torch.arange(start, start + count)
        bounds = torch.tensor([0, count], dtype=torch.int32)
        metadata = self._builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=bounds,
                query_start_loc_cpu=bounds,
                seq_lens=torch.tensor([start + count], dtype=torch.int32),
                num_reqs=1,
                num_actual_tokens=count,
                max_query_len=count,
                max_seq_len=start + count,
                block_table_tensor=torch.arange(_NUM_BLOCKS, dtype=torch.int32)[None],
                slot_mapping=slots,
                causal=causal,
            ),
        )
        by_layer = dict.fromkeys(self._layers, metadata)
        slot_mapping = dict.fromkeys(self._layers, slots)
        with set_forward_context(by_layer, self._config, num_tokens=count, slot_mapping=slot_mapping):
            yield

    def block_hidden(self, taps: Tensor, block: list[int]) -> Tensor:
        """DSpark and DFlash: hidden states of a block's slots after a context. taps [S, n · H] → [T, H]"""
        length = len(taps)
        states = self.model.combine_hidden_states(taps)
        # The CPU's rms_norm op takes a weight a layer, and uses the first one for all of them.
        with mock.patch.object(self.model.model, "_normalize_context_k", self._normed_keys):
            self.model.precompute_and_store_context_kv(states, torch.arange(length), torch.arange(length))
        causal = any(self.model.get_draft_attn_causal())
        with self._rows(length, len(block), causal=causal):
            return self.model(torch.tensor(block), torch.arange(length, length + len(block)))

    def _normed_keys(self, keys: Tensor) -> Tensor:
        """Each layer's context keys by its own norm. [L, S, heads, D]"""
        norms = [layer.self_attn.k_norm for layer in self.model.model.layers]
        return torch.stack([norm(rows.contiguous()) for norm, rows in zip(norms, keys, strict=True)])

    def feedback_logits(self, taps: Tensor, tokens: list[int], num_context: int) -> Tensor:
        """EAGLE-3: logits of a block that follows `num_context` rows. `tokens` are the text and the drafts of
        the block; row t holds the taps at t and token t + 1. → [γ, V]"""
        states = self.model.combine_hidden_states(taps)
        with self._rows(0, num_context, causal=True):
            read = torch.tensor(tokens[1 : num_context + 1])
            normed, hidden = self.model(read, torch.arange(num_context), states[:num_context])
        logits = [self.model.compute_logits(normed[-1:])]
        for row in range(num_context, len(tokens) - 1):
            with self._rows(row, 1, causal=True):
                normed, hidden = self.model(torch.tensor([tokens[row + 1]]), torch.tensor([row]), hidden[-1:])
            logits.append(self.model.compute_logits(normed))
        return torch.cat(logits)
