"""OpenTelemetry spans of each request: the HTTP call, its choices, and in each queue, prefill and decoding.

Off unless `observability.traces` is configured; nothing here is imported otherwise. Spans carry no text.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_ray.core.config import TracesConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import Request, RequestOutput, RequestUsage

_UNTRACED = ("/health", "/ready", "/metrics")  # asked every second by machines


def otlp_provider(config: TracesConfig) -> TracerProvider:
    """Sends spans over OTLP/HTTP, from a thread of its own; `ConfigError` without the exporter's package."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "observability.traces needs the OTLP exporter: pip install 'dspark-ray[tracing]'"
        ) from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": config.service_name}),
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
    )
    endpoint = config.endpoint.rstrip("/") + "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class RequestSpans:
    """Wraps an application: a span from a request's first byte to its response's last, in the client's trace
    where the client names one (`traceparent`)."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")[len(scope.get("root_path", "")) :]
        if scope["type"] != "http" or path in _UNTRACED:
            await self._app(scope, receive, send)
            return
        context = propagate.extract(dict(Headers(scope=scope)))
        attributes = {"http.request.method": scope["method"], "url.path": path}
        with self._tracer.start_as_current_span(
            f"{scope['method']} {path}", context, SpanKind.SERVER, attributes
        ) as span:

            async def send_noting_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _note_response(span, message)
                await send(message)

            await self._app(scope, receive, send_noting_status)


def _note_response(span: Span, message: Message) -> None:
    status = int(message["status"])
    span.set_attribute("http.response.status_code", status)
    request_id = Headers(raw=message.get("headers", [])).get("x-request-id")
    if request_id is not None:
        span.set_attribute("dspark.request_id", request_id)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


class ChoiceSpans:
    """`dspark_ray.serving.service.WatchOutputs`: what became of each choice, in the current span."""

    def __init__(self, tracer: Tracer, model_id: str, *, steps: bool = False) -> None:
        """steps: an event for every step that emitted tokens."""
        self._tracer = tracer
        self._model_id = model_id
        self._steps = steps

    async def __call__(
        self, request: Request, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        span = self._tracer.start_span("choice", attributes=self._attributes(request))
        started_ns = time.time_ns()
        first_ns: int | None = None
        num_tokens = num_steps = 0
        reason, usage = "left", RequestUsage()  # unless the last output comes
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if output.token_ids:
                        first_ns = first_ns or time.time_ns()
                        num_tokens += len(output.token_ids)
                        num_steps += 1
                        if self._steps:
                            span.add_event("step", {"tokens": len(output.token_ids)})
                    if output.finish_reason is not None:
                        reason, usage = output.finish_reason.value, output.usage or usage
                    yield output
        except Exception as error:
            reason = "error"
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            span.set_attribute("gen_ai.response.finish_reasons", [reason])
            span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
            self._add_phases(span, started_ns, first_ns, num_steps, usage)
            span.end()

    def _attributes(self, request: Request) -> dict[str, str | int | float]:
        sampling = request.sampling
        return {
            "gen_ai.request.model": self._model_id if request.adapter is None else request.adapter.name,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "dspark.request_id": request.request_id,
        }

    def _add_phases(
        self, choice: Span, started_ns: int, first_ns: int | None, num_steps: int, usage: RequestUsage
    ) -> None:
        """Spans inside `choice`: what was waited for before the first token, and the tokens after it."""
        ended_ns = time.time_ns()
        context = trace.set_span_in_context(choice)
        waited_ns = (first_ns or ended_ns) - started_ns
        queue_ns = 0 if usage.queue_ms is None else min(int(usage.queue_ms * 1e6), waited_ns)
        phases: list[tuple[str, int, int, dict[str, int]]] = []
        if usage.queue_ms is not None:
            phases.append(("queue", started_ns, started_ns + queue_ns, {}))
        cached = {"dspark.cached_tokens": usage.cached_tokens}
        phases.append(("prefill", started_ns + queue_ns, started_ns + waited_ns, cached))
        if first_ns is not None:
            counts = {
                "dspark.steps": num_steps,
                "dspark.drafted_tokens": usage.drafted_tokens,
                "dspark.verified_tokens": usage.verified_tokens,
                "dspark.accepted_tokens": usage.accepted_tokens,
            }
            phases.append(("decode", first_ns, ended_ns, counts))
        for name, from_ns, to_ns, attributes in phases:
            self._tracer.start_span(name, context, attributes=attributes, start_time=from_ns).end(to_ns)
