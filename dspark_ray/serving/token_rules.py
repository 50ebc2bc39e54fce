"""Sampling parameters that name tokens or words, as token ids of the model."""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_ray.core.errors import RequestError
from dspark_ray.serving.schemas import GenerationFields
from dspark_ray.serving.text import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The same for every choice of a job; the fields are those of `SamplingParams`."""

    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[tuple[int, ...], ...]
    allowed_token_ids: tuple[int, ...]


def token_rules(fields: GenerationFields, tokenizer: Tokenizer) -> TokenRules:
    """Raises `RequestError` for tokens the model does not have."""
    check_token_ids(fields.allowed_token_ids, tokenizer, "allowed_token_ids")
    return TokenRules(
        logit_bias=_biases(fields.logit_bias, tokenizer),
        bad_words=_bad_words(fields.bad_words, tokenizer),
        allowed_token_ids=tuple(fields.allowed_token_ids),
    )


def check_token_ids(token_ids: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    """Raises `RequestError` unless all are in the vocabulary."""
    if min(token_ids, default=0) < 0:
        raise RequestError("token ids must not be negative", param=param, code="invalid_value")
    highest = max(token_ids, default=0)
    if highest >= tokenizer.vocab_size:
        message = f"token id {str(highest)[:24]} is not in the vocabulary of {tokenizer.vocab_size}"
        raise RequestError(message, param=param, code="invalid_value")


def _biases(biases: dict[str, float], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    by_id: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 9:
            message = f"logit_bias: {key[:24]!r} is not a token id; keys are token ids in decimal"
            raise RequestError(message, param="logit_bias", code="invalid_value")
        if int(key) in by_id:
            message = f"logit_bias names the token id {int(key)} twice"
            raise RequestError(message, param="logit_bias", code="invalid_value")
        by_id[int(key)] = bias
    check_token_ids(list(by_id), tokenizer, "logit_bias")
    return tuple(by_id.items())


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenised at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            if token_ids := tuple(tokenizer.encode(text, add_special_tokens=False)):
                found[token_ids] = None
    return tuple(found)
