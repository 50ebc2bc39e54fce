"""The frozen target as the trainer sees it: hidden states of one sequence, and the matrices it shares."""

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from dspark_kernels.attention import PagedBatch
from torch import Tensor

from dspark_ray.core.digest import digest_json, sha256_file
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.targets.decoder import Decoder, load_target
from dspark_ray.models.weights import safetensors_files


class FrozenTarget(Protocol):
    """What cache and trainer need of a target model; injected, so that tests use a tiny one."""

    embedding: Tensor  # [V, H]
    head_weight: Tensor  # [V, H]
    final_norm: Tensor  # [H] weight of the norm before the LM head
    eos_token_ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Of the weights: caches made from other ones are refused."""

    def hidden_states(self, token_ids: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Outputs of `layer_ids` side by side [S, n · H] and the normed last hidden states [S, H]."""

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """The weights of one decoder layer, to start a draft layer from."""

    def drafter_shape(self) -> dict[str, Any]:
        """The fields of a drafter's configuration that are the target's."""


class TransformersTarget:
    """A Hugging Face causal language model, gradients off."""

    def __init__(self, source: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """`source`: a directory, which needs no tokenizer, or a name as `resolve_model` takes it."""
        from transformers import AutoModelForCausalLM  # slow to import, and only needed here

        self._model_dir = source if source.is_dir() else resolve_model(str(source))
        self._model = (
            AutoModelForCausalLM.from_pretrained(self._model_dir, dtype=dtype).eval().requires_grad_(False)
        )
        self.embedding = self._model.get_input_embeddings().weight
        self.head_weight = self._model.get_output_embeddings().weight
        self.final_norm = self._model.model.norm.weight
        eos = self._model.config.eos_token_id
        self.eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)

    @cached_property
    def digest(self) -> str:
        return digest_json([sha256_file(file) for file in safetensors_files(self._model_dir)])

    @cached_property
    def _decoder(self) -> Decoder:
        """The serving decoder: the drafter trains on the hidden states that it will be served."""
        return load_target(self._model_dir, self._model.dtype, self._model.config.max_position_embeddings)

    @torch.inference_mode()
    def hidden_states(self, token_ids: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        length = len(token_ids)
        positions = torch.arange(length)
        batch = PagedBatch(
            query_start=torch.tensor([0, length], dtype=torch.int32),
            kv_len=torch.tensor([length], dtype=torch.int32),
            block_tables=torch.zeros((1, 1), dtype=torch.int32),
            block_size=length,
            max_query=length,
            max_kv=length,
        )
        kv = self._decoder.new_kv(length)
        out = self._decoder.forward(token_ids, positions, kv, positions, batch, layer_ids)
        return out.taps, out.hidden

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        return self._model.model.layers[layer].state_dict()

    def drafter_shape(self) -> dict[str, Any]:
        hf = self._model.config
        rope = dict(hf.rope_parameters)
        return {
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_key_value_heads": hf.num_key_value_heads,
            "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            "intermediate_size": hf.intermediate_size,
            "vocab_size": hf.vocab_size,
            "num_target_layers": hf.num_hidden_layers,
            "rms_norm_eps": hf.rms_norm_eps,
            "rope_theta": float(rope.pop("rope_theta")),
            "rope_scaling": {} if rope.get("rope_type", "default") == "default" else rope,
        }
