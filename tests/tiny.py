"""Tiny random checkpoints and a byte-level chat tokenizer, made in milliseconds without the network.

model_dir = tiny_model_dir(tmp_path, "qwen3")  # weights only, vocabulary of 128
model_dir = tiny_chat_model_dir(tmp_path)  # weights and tokenizer: what a server needs
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

ARCHITECTURES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2, as in SmolLM2
TOKENIZER_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_config(architecture: str = "llama", **overrides: Any) -> PreTrainedConfig:
    """A 3-layer transformers config with grouped-query attention; `overrides` are its own fields."""
    fields: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture == "mistral":
        fields["sliding_window"] = None
    config = ARCHITECTURES[architecture](**(fields | overrides))
    config._attn_implementation = "eager"
    return config


def tiny_model_dir(
    tmp_path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """A random checkpoint in Hugging Face's layout under `tmp_path`; equal arguments give equal weights.

    Biases and norm weights are random too, so that a model that drops one gives other logits.
    """
    model_dir = tmp_path / f"tiny-{architecture}"
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Wide enough that greedy choices are not near-ties.
            parameter.copy_(1 + 0.2 * noise if _is_norm(parameter) else 0.2 * noise)
    model.to(dtype).save_pretrained(model_dir, max_shard_size=max_shard_size)
    return model_dir


def tiny_tokenizer_dir(model_dir: Path) -> Path:
    """Writes a byte-level tokenizer with ChatML's template into `model_dir` (one token a byte, no merges).

    Every string has an encoding, and one character outside ASCII takes several tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(model_dir)
    return model_dir


def tiny_chat_model_dir(tmp_path: Path, architecture: str = "llama", **overrides: Any) -> Path:
    """A random checkpoint whose vocabulary is the tiny tokenizer's, with that tokenizer beside it."""
    model_dir = tiny_model_dir(tmp_path, architecture, **({"vocab_size": TOKENIZER_VOCAB_SIZE} | overrides))
    return tiny_tokenizer_dir(model_dir)


def _is_norm(parameter: torch.nn.Parameter) -> bool:
    """Norm weights are the only vectors that transformers starts at one; biases start at zero."""
    return parameter.dim() == 1 and bool((parameter == 1).all())
