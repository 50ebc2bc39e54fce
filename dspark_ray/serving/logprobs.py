"""Log-probabilities in the shapes of the two routes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark_ray.core.types import TokenLogprobs, TokenText


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that stands in a text, or could have."""

    token: TokenText
    logprob: float


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of an answer, with the likeliest ones at its place."""

    token: TokenText
    logprob: float | None  # None: the first of a prompt, which nothing predicts
    top: tuple[Candidate, ...] = ()


TextOfToken = Callable[[int], TokenText]


def shown_tokens(
    token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs], text_of: TextOfToken
) -> tuple[ShownToken, ...]:
    """As many as there are log-probabilities of: none where they were not asked for."""
    return tuple(
        ShownToken(
            text_of(token_id),
            one.logprob,
            tuple(Candidate(text_of(other), value) for other, value in one.top),
        )
        for token_id, one in zip(token_ids, logprobs, strict=False)
    )


def shown_prompt(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_of: TextOfToken
) -> tuple[ShownToken, ...]:
    """A prompt that is echoed: its first token has no log-probability."""
    first = ShownToken(text_of(token_ids[0]), None)
    return (first, *shown_tokens(token_ids[1:], logprobs, text_of))


def chat_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = [
        {
            **_chat_entry(one.token, one.logprob),
            "top_logprobs": [_chat_entry(other.token, other.logprob) for other in one.top],
        }
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.data)}


def completion_logprobs(tokens: Sequence[ShownToken], offset: int) -> dict[str, Any]:
    """`logprobs` of a completion choice. offset: characters of its text before the first token

    The token that was chosen is among `top_logprobs` even where it is not one of the likeliest. Tokens of
    equal text (parts of a character) share a key there, as they do with OpenAI: the likeliest one is told.
    """
    offsets: list[int] = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.token.text)
    return {
        "tokens": [one.token.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_by_text(one) for one in tokens],
        "text_offset": offsets,
    }


def _by_text(one: ShownToken) -> dict[str, float] | None:
    if one.logprob is None:
        return None
    found: dict[str, float] = {}
    for other in (*one.top, Candidate(one.token, one.logprob)):
        found.setdefault(other.token.text, other.logprob)
    return found
