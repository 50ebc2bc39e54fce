"""`/tokenize` and `/detokenize`: what a prompt costs, without running it. The bodies are vLLM's."""

from typing import Any

from pydantic import Field

from dspark_ray.serving.body import Body, validate
from dspark_ray.serving.parsing import ServedModel, chat_prompt, check_chars, check_model
from dspark_ray.serving.schemas import ChatPromptFields
from dspark_ray.serving.token_rules import check_token_ids


class TokenizeText(Body):
    """A plain prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatPromptFields):
    """A conversation."""

    model: str | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class Detokenize(Body):
    """Token ids back to text, special tokens included."""

    model: str | None = None
    tokens: list[int] = Field(max_length=1 << 20)


def tokenize(body: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    """`POST /tokenize`. Raises `RequestError`; may take long for long texts."""
    check_model(body, model)
    fields: TokenizeText | TokenizeChat
    if "messages" in body:
        fields = validate(TokenizeChat, body)
        token_ids = chat_prompt(fields, model, open_turn=fields.add_generation_prompt).token_ids
    else:
        fields = validate(TokenizeText, body)
        check_chars(len(fields.prompt), model, "prompt")
        token_ids = model.tokenizer.encode(fields.prompt, add_special_tokens=fields.add_special_tokens)
    return {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": token_ids,
        "token_strs": model.tokenizer.tokens(token_ids) if fields.return_token_strs else None,
    }


def detokenize(body: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    """`POST /detokenize`. Raises `RequestError`."""
    check_model(body, model)
    fields = validate(Detokenize, body)
    check_token_ids(fields.tokens, model.tokenizer, "tokens")
    return {"prompt": model.tokenizer.decode(fields.tokens, skip_special_tokens=False)}
