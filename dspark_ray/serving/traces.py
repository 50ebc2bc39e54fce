"""What an ingress process hangs its spans on. Where none are wanted, OpenTelemetry is not even imported."""

from collections.abc import Callable

from starlette.middleware import Middleware

from dspark_ray.core.config import AppConfig
from dspark_ray.serving.service import WatchOutputs, unwatched


class Traces:
    """Of one configuration. `close` sends what is left, and may block."""

    def __init__(self, config: AppConfig) -> None:
        """`ConfigError` where a package is missing."""
        self.watch: WatchOutputs = unwatched
        self.layers: list[Middleware] = []
        self.close: Callable[[], None] = lambda: None
        traces = config.observability.traces
        if traces is None:
            return
        from dspark_ray.serving.tracing import ChoiceSpans, RequestSpans, otlp_provider

        provider = otlp_provider(traces)
        tracer = provider.get_tracer("dspark_ray")
        self.watch = ChoiceSpans(tracer, config.model.id, steps=traces.steps)
        self.layers = [Middleware(RequestSpans, tracer=tracer)]
        self.close = provider.shutdown
