"""The default model as it lies in the cache: whole, named right, and tokenised as it was trained."""

import json
from pathlib import Path

import pytest
import torch

from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.tokenizer import IncrementalDetokenizer, Tokenizer
from dspark_ray.models.weights import load_safetensors


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return resolve_model("default", verify=True)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def test_config(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (576, 30, 64)
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 1e5)
    assert config["tie_word_embeddings"]


def test_weights(model_dir: Path) -> None:
    tensors = load_safetensors(model_dir)
    assert len(tensors) == 2 + 30 * 9  # embedding, last norm; seven matrices and two norms a layer
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["model.embed_tokens.weight"].shape == (49152, 576)


def test_turns_end_with_im_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert tokenizer.vocab_size == 49152


def test_chat_prompt(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_spaces_before_digits_stay_whole(tokenizer: Tokenizer) -> None:
    """Digits are split before the byte-level rule: two spaces are one token, also ahead of a number."""
    two_spaces, five = tokenizer.encode("  5")
    assert (tokenizer.decode([two_spaces]), tokenizer.decode([five])) == ("  ", "5")


def test_streamed_text_is_the_text(tokenizer: Tokenizer) -> None:
    text = "def f(x):\n    return x ** 2  # naïve 平方 🙂"
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["###"])
    pieces = [detokenizer.push([token_id]).text for token_id in tokenizer.encode(text)]
    assert "".join(pieces) + detokenizer.flush() == text
