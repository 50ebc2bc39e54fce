"""A thread that watches one engine: metrics about once a second, a log line every few."""

import logging
import threading
from collections.abc import Callable

from dspark_ray.core.clock import Clock
from dspark_ray.core.types import EngineStats
from dspark_ray.observability.log_line import log_line
from dspark_ray.observability.metrics import MetricSink, publish

logger = logging.getLogger(__name__)

PUBLISH_PERIOD_S = 1.0


class Monitor:
    """Reads snapshots, so that nothing in a step touches a metric."""

    def __init__(
        self, read: Callable[[], EngineStats], sink: MetricSink, log_interval_s: float, clock: Clock
    ) -> None:
        self._read = read
        self._sink = sink
        self._log_interval_ms = log_interval_s * 1e3
        self._clock = clock
        self._published: EngineStats | None = None
        self._logged = read()
        self._logged_ms = clock.now_ms()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dspark-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def tick(self) -> None:
        """Publishes, and logs if it is time and a step was run since the last line."""
        stats, now_ms = self._read(), self._clock.now_ms()
        publish(stats, self._published, self._sink)
        self._published = stats
        elapsed_ms = now_ms - self._logged_ms
        if elapsed_ms >= self._log_interval_ms:
            if stats.counters.target_steps > self._logged.counters.target_steps:
                logger.info(log_line(stats, self._logged, elapsed_ms / 1e3))
            self._logged, self._logged_ms = stats, now_ms

    def _run(self) -> None:
        while not self._closed.wait(PUBLISH_PERIOD_S):
            try:
                self.tick()
            except Exception:  # a metric that fails must not end the ones that work
                logger.exception("cannot publish metrics")
