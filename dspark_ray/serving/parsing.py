"""From a request body to the engine's requests: one `Request` per choice, checked against the model."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import Priority, Request, SamplingParams, ServiceTier, TextOptions
from dspark_ray.serving.messages import for_template
from dspark_ray.serving.schemas import (
    ChatCompletionRequest,
    ChatPromptFields,
    CompletionRequest,
    GenerationFields,
    parse_body,
)
from dspark_ray.serving.text import Tokenizer
from dspark_ray.serving.token_rules import TokenRules, check_token_ids, token_rules

# Longer texts are refused before they are tokenised: no tokenizer makes so few tokens of so many characters.
MAX_CHARS_PER_TOKEN = 256


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    id: str
    max_model_len: int
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request: its choices and how they are to be answered."""

    id: str
    created: int  # Unix time, seconds
    model: str
    chat: bool
    requests: tuple[Request, ...]  # by choice index
    text: TextOptions
    stream: bool
    include_usage: bool
    num_per_prompt: int  # n: choices that share a prompt

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many choices it has."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.num_per_prompt])


def parse_chat(body: dict[str, Any], model: ServedModel, request_id: str | None = None) -> Job:
    """`POST /v1/chat/completions`. Raises `RequestError`; may take long for long texts."""
    check_model(body, model)
    fields = parse_body(ChatCompletionRequest, body)
    prompt = chat_prompt(fields, model)
    limit = _token_limit(prompt, fields.token_limit, model, "messages")
    return _job(fields, [prompt], [limit], model, request_id, chat=True)


def chat_prompt(fields: ChatPromptFields, model: ServedModel, *, open_turn: bool = True) -> list[int]:
    """The conversation in the model's template, tokenised; `open_turn`: up to the assistant's answer."""
    check_chars(sum(message.num_chars for message in fields.messages), model, "messages")
    text = model.tokenizer.chat_text(
        for_template(fields.messages),
        add_generation_prompt=open_turn,
        template_kwargs=fields.chat_template_kwargs,
    )
    return model.tokenizer.encode(text, add_special_tokens=False)


def parse_completion(body: dict[str, Any], model: ServedModel, request_id: str | None = None) -> Job:
    """`POST /v1/completions`. Raises `RequestError`; may take long for long texts."""
    check_model(body, model)
    fields = parse_body(CompletionRequest, body)
    prompts = [_prompt_token_ids(prompt, model) for prompt in fields.prompts()]
    limits = [_token_limit(prompt, fields.token_limit, model, "prompt") for prompt in prompts]
    return _job(fields, prompts, limits, model, request_id, chat=False)


def check_model(body: dict[str, Any], model: ServedModel) -> None:
    """Before anything else, so that a wrong model is not reported as a wrong parameter."""
    name = body.get("model")
    if isinstance(name, str) and name != model.id:
        raise RequestError(
            f"the model {name[:128]!r} does not exist; this server has {model.id!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def _prompt_token_ids(prompt: str | list[int], model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        check_chars(len(prompt), model, "prompt")
        token_ids = model.tokenizer.encode(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt", code="invalid_value")
        return token_ids
    check_token_ids(prompt, model.tokenizer, "prompt")
    return prompt


def check_chars(num_chars: int, model: ServedModel, param: str) -> None:
    if num_chars > model.max_model_len * MAX_CHARS_PER_TOKEN:
        raise _too_long(f"{param} has {num_chars} characters, which cannot fit", model, param)


def _token_limit(prompt: Sequence[int], wanted: int | None, model: ServedModel, param: str) -> int:
    """The output limit in tokens; raises `RequestError` where prompt and output cannot fit."""
    room = model.max_model_len - len(prompt)
    if room < 1:
        raise _too_long(f"{param} has {len(prompt)} tokens", model, param)
    if wanted is not None and wanted > room:
        shown = str(wanted)[:24]
        raise _too_long(
            f"{param} has {len(prompt)} tokens and {shown} more were asked for", model, "max_tokens"
        )
    return room if wanted is None else wanted


def _too_long(what: str, model: ServedModel, param: str) -> RequestError:
    message = f"this model's maximum context length is {model.max_model_len} tokens; {what}"
    return RequestError(message, param=param, code="context_length_exceeded")


def _job(
    fields: GenerationFields,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    model: ServedModel,
    request_id: str | None,
    *,
    chat: bool,
) -> Job:
    check_token_ids(fields.stop_token_ids, model.tokenizer, "stop_token_ids")
    rules = token_rules(fields, model.tokenizer)
    engine_id = uuid.uuid4().hex  # clients may use an id twice; no engine may see one twice
    requests: list[Request] = []
    for prompt, limit in zip(prompts, limits, strict=True):
        for choice in range(fields.n):
            requests.append(
                Request(
                    request_id=f"{engine_id}-{len(requests)}",
                    prompt_token_ids=tuple(prompt),
                    sampling=_sampling(fields, limit, choice, rules, model.tokenizer.eos_token_ids),
                    priority=_priority(fields),
                    session_key=fields.prompt_cache_key,
                )
            )
    return Job(
        id=("chatcmpl-" if chat else "cmpl-") + (request_id or engine_id),
        created=int(time.time()),
        model=model.id,
        chat=chat,
        requests=tuple(requests),
        text=TextOptions(
            stop=tuple(fields.stop),
            include_stop=fields.include_stop_str_in_output,
            skip_special_tokens=fields.skip_special_tokens,
            min_tokens=fields.min_tokens,
        ),
        stream=fields.stream,
        include_usage=fields.stream_options is not None and fields.stream_options.include_usage,
        num_per_prompt=fields.n,
    )


def _priority(fields: GenerationFields) -> Priority:
    tier = ServiceTier.DEFAULT if fields.service_tier == "auto" else ServiceTier(fields.service_tier)
    return Priority(tier, fields.priority, fields.target_tokens_per_second)


def _sampling(
    fields: GenerationFields,
    max_tokens: int,
    choice: int,
    rules: TokenRules,
    eos_token_ids: tuple[int, ...],
) -> SamplingParams:
    if fields.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens={fields.min_tokens} exceeds the {max_tokens} tokens that may be generated",
            param="min_tokens",
            code="invalid_value",
        )
    # The engine knows the ends that the model's config names; the tokenizer knows its template's too.
    ends = () if fields.ignore_eos else eos_token_ids
    return SamplingParams(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k if fields.top_k > 0 else None,
        min_p=fields.min_p,
        seed=fields.seed,
        choice=choice,
        max_tokens=max_tokens,
        stop_token_ids=tuple(dict.fromkeys((*fields.stop_token_ids, *ends))),
        ignore_eos=fields.ignore_eos,
        min_tokens=fields.min_tokens,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=rules.logit_bias,
        bad_words=rules.bad_words,
        allowed_token_ids=rules.allowed_token_ids,
    )
