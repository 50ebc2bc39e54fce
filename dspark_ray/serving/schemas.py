"""What clients may send: strictly typed request bodies of `/v1/chat/completions` and `/v1/completions`."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from dspark_ray.serving.body import Body, validate
from dspark_ray.serving.constraints import ConstraintFields
from dspark_ray.serving.messages import Message
from dspark_ray.serving.tools import ToolFields
from dspark_ray.serving.unsupported import supported_only

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128
MAX_LEVEL = 8
MAX_TARGET_TOKENS_PER_S = 1e4
MAX_KEY_CHARS = 256
MAX_START_S = 3600.0
MAX_TOP_LOGPROBS = 20
INT32 = 1 << 31
INT64 = 1 << 63


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


TokenId = Annotated[int, Field(ge=0)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI pads chunks against traffic analysis; there is no padding here


class SpeculationFields(Body):
    """`speculation`: of this request alone. It changes how fast the text comes, not what it is."""

    enabled: bool = True
    max_tokens: int | None = Field(None, ge=0, le=32, description="draft tokens verified in a step, at most")


class GenerationFields(ConstraintFields):
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
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    # Who goes first where there is not enough for all: docs/fleet.md.
    service_tier: Literal["auto", "default", "flex", "priority"] = "auto"
    priority: int = Field(0, ge=-MAX_LEVEL, le=MAX_LEVEL, description="the lower goes first")
    start_within_s: float | None = Field(
        None, gt=0.0, le=MAX_START_S, description="refused if it cannot start in time"
    )
    target_tokens_per_second: float | None = Field(None, gt=0.0, le=MAX_TARGET_TOKENS_PER_S)
    prompt_cache_key: str = Field("", max_length=MAX_KEY_CHARS)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = Field(0, ge=0, lt=INT32)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict, max_length=MAX_BIASES, description="token id → what is added to its logit"
    )
    bad_words: list[BadWord] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    allowed_token_ids: list[TokenId] = Field(default_factory=list, description="empty: all")
    deterministic: bool = Field(False, description="the same text whatever else runs, or an error")
    speculation: SpeculationFields | None = None
    speculation_details: bool = Field(False, description="chunks say how each token came about")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token; None: no log-probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """The text begins with the prompt."""
        return False

    @model_validator(mode="after")
    def _check_repeats(self) -> "GenerationFields":
        if self.deterministic and self.seed is None and self.temperature > 0 and self.top_k != 1:
            raise ValueError("deterministic needs a seed, or temperature 0: other texts are drawn anew")
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        if self.speculation_details and not self.stream:
            raise ValueError("speculation_details is only allowed when stream is true")
        return self


class ChatPromptFields(ToolFields):
    """What makes a conversation a prompt."""

    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)


class ChatCompletionRequest(GenerationFields, ChatPromptFields):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

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
    max_tokens: int | None = Field(None, ge=0, description="0: with echo, nothing but the prompt")
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @model_validator(mode="after")
    def _check_there_is_an_answer(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo")
        return self

    @model_validator(mode="after")
    def _check_prompt(self) -> "CompletionRequest":
        if len(self.prompts()) * self.n > MAX_CHOICES:
            raise ValueError(f"prompts × n must not exceed {MAX_CHOICES}")
        return self

    @property
    def token_limit(self) -> int:
        """At least 1: a request for nothing but its prompt generates a token that is not shown."""
        return 16 if self.max_tokens is None else max(1, self.max_tokens)  # 16 is OpenAI's default here

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


FieldsT = TypeVar("FieldsT", bound=GenerationFields)


def parse_body(schema: type[FieldsT], body: dict[str, Any]) -> FieldsT:
    """`body` checked against `schema`; raises `RequestError` with the first fault and its parameter."""
    return validate(schema, supported_only(body, frozenset(schema.model_fields)))
