"""Tokens on their own: their bytes together are the text's."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from dspark_ray.models.token_text import TokenTexts
from dspark_ray.models.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer_dir


@pytest.mark.parametrize("text", ["plain text", "é😀 ∞", "\x00\x7f\xad\n\t", "日本語"])
def test_the_bytes_of_byte_level_tokens(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer_dir(tmp_path))
    texts = TokenTexts(tokenizer)
    token_ids = tokenizer.encode(text)
    assert b"".join(texts(token_id).data for token_id in token_ids) == text.encode()
    assert texts(token_ids[0]) is texts(token_ids[0])


def test_a_special_token_is_told_as_it_is_spelled(tmp_path: Path) -> None:
    texts = TokenTexts(Tokenizer.load(tiny_tokenizer_dir(tmp_path)))
    assert texts(2).text == "<|im_end|>"


def test_sentencepiece_spaces_and_bytes() -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "re": 2, "<0xE2>": 3}
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), ()))
    assert [texts(token_id).text for token_id in (1, 2)] == [" the", "re"]
    assert texts(3).data == b"\xe2"
