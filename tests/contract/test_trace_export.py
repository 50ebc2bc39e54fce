"""Spans leave over OTLP/HTTP as collectors take them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dspark_ray.core.config import parse_app_config
from dspark_ray.serving.traces import Traces

CONFIG: dict[str, Any] = {
    "model": {"id": "m", "max_model_len": 256},
    "speculation": {"drafter": {"kind": "ngram"}},
}


class Collector:
    """An OTLP/HTTP collector on a free port."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def test_spans_reach_a_collector(collector: Collector) -> None:
    traces = Traces(
        parse_app_config({**CONFIG, "observability": {"traces": {"endpoint": f"{collector.url}/"}}})
    )
    layer = traces.layers[0]
    with layer.kwargs["tracer"].start_as_current_span("hello"):
        pass
    traces.close()
    [resource_spans] = collector.requests[0].resource_spans
    attributes = {pair.key: pair.value.string_value for pair in resource_spans.resource.attributes}
    assert attributes["service.name"] == "dspark-ray"
    assert [span.name for scope in resource_spans.scope_spans for span in scope.spans] == ["hello"]
