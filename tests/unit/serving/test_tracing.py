"""Spans tell what became of a request, in the client's own trace, and carry no text."""

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.middleware import Middleware

from dspark_ray.core.config import parse_app_config
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.serving.traces import Traces
from dspark_ray.serving.tracing import ChoiceSpans, RequestSpans
from tests.fakes import POISON_TOKEN, FakeEngine
from tests.local_app import LocalApp
from tests.tiny import tiny_tokenizer_dir

CONFIG: dict[str, Any] = {
    "model": {"id": "m", "max_model_len": 256},
    "speculation": {"drafter": {"kind": "ngram"}},
}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "watermelon"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))


class Traced(LocalApp):
    """A fake engine's application whose spans are kept."""

    def __init__(self, tokenizer: Tokenizer, **retry: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        tracer = provider.get_tracer("test")
        config = parse_app_config(CONFIG)
        super().__init__(
            tokenizer,
            FakeEngine(config, step_ms=0.0),
            config,
            watch=ChoiceSpans(tracer, "m", steps=True),
            layers=[Middleware(RequestSpans, tracer=tracer)],
            **retry,
        )

    def spans(self) -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found


@pytest.fixture
def app(tokenizer: Tokenizer) -> Traced:
    return Traced(tokenizer)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_requests_phases(app: Traced, stream: bool) -> None:
    body = {"model": "m", "prompt": SECRET, "max_tokens": 12, "n": 2, "stream": stream, "temperature": 0.5}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    response = await app.client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    spans = app.spans()
    [call] = spans["POST /v1/completions"]
    assert call.parent is not None
    assert (call.context.trace_id, call.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert call.attributes is not None
    assert call.attributes["http.response.status_code"] == 200
    assert call.attributes["dspark.request_id"] == "mine"
    assert len(spans["choice"]) == len(spans["prefill"]) == len(spans["decode"]) == 2
    for choice, decode in zip(spans["choice"], spans["decode"], strict=True):
        assert choice.parent is not None
        assert decode.parent is not None
        assert choice.attributes is not None
        assert choice.parent.span_id == call.context.span_id
        assert decode.parent.span_id == choice.context.span_id
        assert choice.attributes["gen_ai.usage.output_tokens"] == 12
        assert choice.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert sum(event.attributes["tokens"] for event in choice.events) == 12  # type: ignore[misc, index]
        assert choice.start_time <= decode.start_time <= decode.end_time <= choice.end_time  # type: ignore[operator]
    assert SECRET not in "".join(span.to_json() for group in spans.values() for span in group)


async def test_refusals_and_pages_for_machines(app: Traced) -> None:
    assert (await app.client.post("/v1/completions", json={"model": "m"})).status_code == 400
    assert (await app.client.get("/ready")).status_code == 200
    assert (await app.client.get("/metrics")).status_code == 200
    spans = app.spans()
    assert set(spans) == {"POST /v1/completions"}
    assert spans["POST /v1/completions"][0].attributes["http.response.status_code"] == 400  # type: ignore[index]


async def test_a_failed_choice_says_so(tokenizer: Tokenizer) -> None:
    app = Traced(tokenizer, max_attempts=1)
    prompt = [POISON_TOKEN, 5]
    response = await app.client.post(
        "/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 4}
    )
    assert response.status_code >= 500
    spans = app.spans()
    assert spans["choice"][0].attributes["gen_ai.response.finish_reasons"] == ("error",)  # type: ignore[index]
    assert not spans["choice"][0].status.is_ok
    assert not spans["POST /v1/completions"][0].status.is_ok


async def test_the_queue_is_a_phase_where_the_engine_tells_it(
    app: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = app.local.engine._usage
    monkeypatch.setattr(app.local.engine, "_usage", lambda running: replace(usage(running), queue_ms=0.0))
    await app.client.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 2})
    [queue], [prefill] = app.spans()["queue"], app.spans()["prefill"]
    assert queue.end_time == prefill.start_time


def test_off_by_default() -> None:
    traces = Traces(parse_app_config(CONFIG))
    assert traces.layers == []
    traces.close()
