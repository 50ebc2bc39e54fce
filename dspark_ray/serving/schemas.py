"""What clients may send: strictly typed request bodies of `/v1/chat/completions` and `/v1/completions`."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dspark_ray.core.errors import RequestError
from dspark_ray.serving.unsupported import supported_only

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
INT32 = 1 << 31
INT64 = 1 << 63
_EMPTY_MESSAGE_FIELDS = ("annotations", "audio", "function_call", "refusal", "tool_calls")


class Body(BaseModel):
    """Base of every schema: no coercion of types, no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI pads chunks against traffic analysis; there is no padding here


class GenerationFields(Body):
    """What both routes share."""

    model: str
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1, lt=INT32, description="-1 and 0: no limit")
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[StopString], BeforeValidator(_as_list)] = Field(
        default_factory=list, max_length=MAX_STOP_STRINGS
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self


def _text_of_parts(content: Any) -> Any:
    """A list of text parts as one string; anything else is left to the type check."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"only content parts of type 'text' are supported, got {str(kind)[:64]!r}")
        if not isinstance(part.get("text"), str):
            raise ValueError("a content part of type 'text' needs a string 'text'")
        texts.append(part["text"])
    return "".join(texts)


class Message(Body):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of_parts)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, value: Any) -> Any:
        """An answer sent back as it came carries these fields, empty; filled ones are refused."""
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if k not in _EMPTY_MESSAGE_FIELDS or v not in (None, [])}


class ChatCompletionRequest(GenerationFields):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_limits_agree(self) -> "ChatCompletionRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`; `prompts()` gives the four shapes of `prompt` as one."""

    prompt: Any = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists"
    )

    @model_validator(mode="after")
    def _check_prompt(self) -> "CompletionRequest":
        if len(self.prompts()) * self.n > MAX_CHOICES:
            raise ValueError(f"prompts × n must not exceed {MAX_CHOICES}")
        return self

    @property
    def token_limit(self) -> int:
        return self.max_tokens or 16  # OpenAI's default for this route

    def prompts(self) -> list[str | list[int]]:
        """One text or list of token ids each; raises `ValueError` for any other shape."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if _all_token_ids(prompt):
                return [prompt]
            if all(isinstance(item, str) for item in prompt):
                return prompt
            if all(isinstance(item, list) and item and _all_token_ids(item) for item in prompt):
                return prompt
        raise ValueError("prompt must be a string, a list of strings, or non-empty lists of token ids")


def _all_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in items)


BodyT = TypeVar("BodyT", bound=GenerationFields)


def parse_body(schema: type[BodyT], body: dict[str, Any]) -> BodyT:
    """`body` checked against `schema`; raises `RequestError` with the first fault and its parameter."""
    kept = supported_only(body, frozenset(schema.model_fields))
    try:
        return schema.model_validate(kept)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        raise _request_error(fault) from error


def _request_error(fault: Any) -> RequestError:
    path = [part for part in map(str, fault["loc"]) if not part.startswith("function-before")]
    param = ".".join(path)[:128] or None
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "missing":
        return RequestError(
            f"missing required parameter: '{param}'", param=param, code="missing_required_parameter"
        )
    code = "invalid_type" if fault["type"].endswith("_type") else "invalid_value"
    return RequestError(f"invalid '{param}': {message}" if param else message, param=param, code=code)
