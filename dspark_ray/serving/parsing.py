"""From a request body to the engine's requests: one `Request` per choice, checked against the model."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import (
    AdapterRef,
    CompiledGrammar,
    Priority,
    Request,
    SamplingParams,
    ServiceTier,
    TextOptions,
)
from dspark_ray.serving.adapters import AdapterBook
from dspark_ray.serving.answer import PLAIN_TEXT, AnswerShape
from dspark_ray.serving.constraints import Format, structural_tag
from dspark_ray.serving.messages import for_template
from dspark_ray.serving.reasoning import THINK, Reasoning, reasoning_at
from dspark_ray.serving.response_events import ResponseHead
from dspark_ray.serving.response_request import as_chat
from dspark_ray.serving.schemas import (
    ChatCompletionRequest,
    ChatPromptFields,
    CompletionRequest,
    GenerationFields,
    SpeculationFields,
    parse_body,
)
from dspark_ray.serving.text import ChatPrompt, Tokenizer
from dspark_ray.serving.token_rules import TokenRules, check_token_ids, token_rules
from dspark_ray.serving.tools import (
    HERMES,
    TOOL_FORMATS,
    NamedTool,
    ToolFormat,
    format_of_template,
    with_tool_prompt,
)

# Longer texts are refused before they are tokenised: no tokenizer makes so few tokens of so many characters.
MAX_CHARS_PER_TOKEN = 256


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    id: str
    max_model_len: int
    tokenizer: Tokenizer
    tool_format: ToolFormat = HERMES
    thinks: bool = False  # it may write its thoughts before its answer
    speculation_control: bool = True  # requests may say how much of them is drafted
    control_tokens: bool = False  # those that messages write are the model's, not text
    adapters: Callable[[], Mapping[str, AdapterRef]] = dict  # other names for it, and what each adds


def served_model(config: AppConfig, tokenizer: Tokenizer, adapters: AdapterBook | None = None) -> ServedModel:
    """What `config` serves; `auto` keys are decided by the chat template."""
    serving, template = config.serving, tokenizer.chat_template
    tool_format = TOOL_FORMATS.get(serving.tool_format) or format_of_template(template)
    thinks = THINK in template if serving.reasoning == "auto" else serving.reasoning == "think"
    return ServedModel(
        config.model.id,
        config.model.max_model_len,
        tokenizer,
        tool_format,
        thinks,
        serving.speculation_control,
        serving.control_tokens_in_messages,
        dict if adapters is None else lambda: adapters.known,
    )


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
    echo: tuple[str, ...] = ()  # the text of each prompt, if the answers begin with it
    echo_only: bool = False  # nothing follows it
    shape: AnswerShape = PLAIN_TEXT
    constraint: str | None = None  # structural tag that the text must follow, not compiled yet
    response: ResponseHead | None = None  # how `/v1/responses` wants it answered

    def with_grammar(self, grammar: CompiledGrammar) -> "Job":
        """The same, its constraint compiled."""
        requests = tuple(replace(request, grammar=grammar) for request in self.requests)
        return replace(self, requests=requests, constraint=None)

    def with_start_limits(self, limits_s: Mapping[ServiceTier, float]) -> "Job":
        """The same, started within the time of its tier where it names none itself."""
        limit_s = limits_s.get(self.requests[0].priority.tier)
        if limit_s is None or self.requests[0].start_within_ms is not None:
            return self
        return replace(self, requests=tuple(replace(r, start_within_ms=1e3 * limit_s) for r in self.requests))

    @property
    def logprobs(self) -> bool:
        """Whether the answers tell log-probabilities."""
        return self.requests[0].sampling.logprobs is not None

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many choices it has."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.num_per_prompt])


def parse_chat(body: dict[str, Any], model: ServedModel, request_id: str | None = None) -> Job:
    """`POST /v1/chat/completions`. Raises `RequestError`; may take long for long texts."""
    adapter = check_model(body, model)
    fields = parse_body(ChatCompletionRequest, body)
    constraint = _chat_constraint(fields, model.tool_format)
    prompt = chat_prompt(fields, model)
    reasoning = reasoning_at(prompt.text, thinks=model.thinks)
    limit = _token_limit(prompt.token_ids, fields.token_limit, model, "messages")
    job = _job(fields, [prompt.token_ids], [limit], model, adapter, request_id, chat=True)
    shape = AnswerShape(
        reasoning=reasoning,
        tool_format=model.tool_format if fields.tools_offered else None,
        named_tool=isinstance(fields.tool_choice, NamedTool),
    )
    return replace(job, shape=shape, constraint=_tag(fields, constraint, reasoning))


def parse_response(body: dict[str, Any], model: ServedModel, request_id: str | None = None) -> Job:
    """`POST /v1/responses`. Raises `RequestError`; may take long for long texts."""
    fields, chat = as_chat(body)
    job = parse_chat(chat, model, request_id)
    sampling = job.requests[0].sampling
    head = ResponseHead(
        id=job.id.removeprefix("chatcmpl-"),
        created=job.created,
        model=job.model,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        parallel_tool_calls=bool(chat.get("parallel_tool_calls", True)),
        fields=fields,
    )
    return replace(job, response=head)


def chat_prompt(fields: ChatPromptFields, model: ServedModel, *, open_turn: bool = True) -> ChatPrompt:
    """The conversation in the model's template; `open_turn`: up to the assistant's answer."""
    check_chars(sum(message.num_chars for message in fields.messages), model, "messages")
    messages = for_template(fields.messages)
    tools = [tool.for_template() for tool in fields.tools_offered]
    if "tools" not in model.tokenizer.chat_template:
        messages, tools = with_tool_prompt(messages, tools), []
    return model.tokenizer.chat_prompt(
        messages,
        add_generation_prompt=open_turn,
        tools=tools or None,
        template_kwargs=fields.chat_template_kwargs,
        control_tokens=model.control_tokens,
    )


def _chat_constraint(fields: ChatCompletionRequest, tool_format: ToolFormat) -> Format | None:
    """Of the text, or of the calls that may or must stand in its place."""
    constraint, demanded = fields.constraint(), fields.tools_demanded
    if demanded:
        if constraint is not None:
            raise RequestError(
                "a tool that must be called leaves no text to constrain; leave out the constraint or set "
                "tool_choice to 'auto'",
                param="tool_choice",
                code="invalid_value",
            )
        parallel = fields.parallel_tool_calls and fields.tool_choice == "required"
        return tool_format.demanded(demanded, parallel=parallel)
    if not fields.tools_offered:
        return constraint
    if constraint is None:
        return tool_format.checked(fields.tools_offered, parallel=fields.parallel_tool_calls)
    calls = tool_format.demanded(fields.tools_offered, parallel=fields.parallel_tool_calls)
    return {"type": "or", "elements": [constraint, calls]}


def _tag(fields: GenerationFields, constraint: Format | None, reasoning: Reasoning) -> str | None:
    if constraint is None:
        return None
    if fields.ignore_eos:
        raise RequestError(
            "a constrained text ends where its constraint does; leave out ignore_eos",
            param="ignore_eos",
            code="invalid_value",
        )
    return structural_tag(constraint, reasoning)


def parse_completion(body: dict[str, Any], model: ServedModel, request_id: str | None = None) -> Job:
    """`POST /v1/completions`. Raises `RequestError`; may take long for long texts."""
    adapter = check_model(body, model)
    fields = parse_body(CompletionRequest, body)
    texts = fields.prompts()
    prompts = [_prompt_token_ids(prompt, model) for prompt in texts]
    limits = [_token_limit(prompt, fields.token_limit, model, "prompt") for prompt in prompts]
    job = _job(fields, prompts, limits, model, adapter, request_id, chat=False)
    constraint = _tag(fields, fields.constraint(), Reasoning.NONE)
    if not fields.echo:
        return replace(job, constraint=constraint)
    echo = (
        text if isinstance(text, str) else model.tokenizer.decode(text, skip_special_tokens=False)
        for text in texts
    )
    return replace(job, constraint=constraint, echo=tuple(echo), echo_only=fields.max_tokens == 0)


def check_model(body: dict[str, Any], model: ServedModel) -> AdapterRef | None:
    """The adapter that a request names. Before anything else, so that a wrong model is not reported as a
    wrong parameter."""
    name = body.get("model")
    return find_adapter(name, model) if isinstance(name, str) and name != model.id else None


def find_adapter(name: str, model: ServedModel) -> AdapterRef:
    """Raises `RequestError` (404) if there is none."""
    adapters = model.adapters()
    if name not in adapters:
        served = ", ".join(repr(one) for one in (model.id, *adapters))
        raise RequestError(
            f"the model {name[:128]!r} does not exist; this server has {served[:512]}",
            param="model",
            status=404,
            code="model_not_found",
        )
    return adapters[name]


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
    adapter: AdapterRef | None,
    request_id: str | None,
    *,
    chat: bool,
) -> Job:
    check_token_ids(fields.stop_token_ids, model.tokenizer, "stop_token_ids")
    if fields.speculation is not None and not model.speculation_control:
        raise RequestError(
            "this server does not let requests control speculation; leave 'speculation' out",
            param="speculation",
            code="unsupported_parameter",
        )
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
                    speculation_details=fields.speculation_details,
                    adapter=adapter,
                    start_within_ms=None if fields.start_within_s is None else 1e3 * fields.start_within_s,
                )
            )
    return Job(
        id=("chatcmpl-" if chat else "cmpl-") + (request_id or engine_id),
        created=int(time.time()),
        model=model.id if adapter is None else adapter.name,
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
        max_draft_tokens=_max_draft_tokens(fields.speculation),
        logprobs=fields.num_logprobs,
        prompt_logprobs=fields.num_logprobs if fields.echoes else None,
        deterministic=fields.deterministic,
    )


def _max_draft_tokens(speculation: SpeculationFields | None) -> int | None:
    if speculation is None:
        return None
    return speculation.max_tokens if speculation.enabled else 0
