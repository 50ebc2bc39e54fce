"""`dspark-ray top`: what a running server does, live in a terminal. Reads /metrics and /health only."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_ray.cli.common import out
from dspark_ray.core.env import client_headers
from dspark_ray.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 60
_WINDOW = 10  # samples that rates of rare things are taken over

Sample = Mapping[tuple[str, str], float]  # (metric, position or "") → value


def top(
    url: Annotated[str, typer.Option(help="A running server.", metavar="URL")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.", metavar="S")] = 1.0,
    once: Annotated[bool, typer.Option(help="Look twice, print, and leave.")] = False,
) -> None:
    """Watch throughput, τ, budget, acceptance by position, load and plans of a running server."""
    import httpx
    from rich.live import Live

    base, view = url.rstrip("/").removesuffix("/v1"), View()
    with httpx.Client(base_url=base, timeout=5.0, headers=client_headers()) as client:

        def look() -> "RenderableType":
            try:
                page, health = client.get("/metrics"), client.get("/health")
                page.raise_for_status()
                view.add(parse(page.text), health.json(), time.monotonic())
            except (httpx.HTTPError, ValueError) as error:
                raise ConfigError(f"{base} does not answer as a server of this program: {error}") from error
            return view.render(base)

        if once:
            look()
            time.sleep(interval)
            out.print(look())
            return
        with Live(look(), console=out, screen=out.is_terminal, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(interval)
                    live.update(look(), refresh=True)
            except KeyboardInterrupt:
                return


def parse(page: str) -> dict[tuple[str, str], float]:
    """The values of a page in Prometheus' text format."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, sample.labels.get("position", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@dataclass(slots=True)
class View:
    """The last samples, and what they say."""

    samples: deque[tuple[float, Sample]] = field(default_factory=lambda: deque(maxlen=_WINDOW + 1))
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    budgets: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    health: dict[str, Any] = field(default_factory=dict)

    def add(self, sample: Sample, health: dict[str, Any], now_s: float) -> None:
        """One look."""
        self.health = health
        if self.samples:
            before_s, before = self.samples[-1]
            tokens = _of(sample, "emitted_tokens_total") - _of(before, "emitted_tokens_total")
            self.speeds.append(max(0.0, tokens) / max(now_s - before_s, 1e-9))
        self.budgets.append(_of(sample, "draft_budget_tokens"))
        self.samples.append((now_s, sample))

    def ratio(self, part: str, whole: str, position: str = "") -> float | None:
        """Growth of one counter over that of another, over the window; None where the other did not grow."""
        first, last = self.samples[0][1], self.samples[-1][1]
        grown = _of(last, whole, position) - _of(first, whole, position)
        return (_of(last, part, position) - _of(first, part, position)) / grown if grown > 0 else None

    def acceptance(self) -> list[float | None]:
        """Accepted of verified, by place in the block."""
        name = "dspark_verified_per_position_total"
        places = sorted({place for metric, place in self.samples[-1][1] if metric == name}, key=int)
        return [self.ratio("accepted_per_position_total", "verified_per_position_total", p) for p in places]

    def figures(self) -> list[tuple[str, str]]:
        """Names and values, as they are shown."""
        now = self.samples[-1][1]
        replicas = self.health.get("replicas", {})
        used, total = _of(now, "kv_used_blocks"), _of(now, "kv_capacity_blocks")
        live = _of(now, "plan_live")
        plan = f"{live:.0f} live, oldest {_of(now, 'plan_age_ms'):.0f} ms" if live else "none: each alone"
        return [
            ("tokens/s", f"{self.speeds[-1] if self.speeds else 0:8.1f}  {spark(self.speeds)}"),
            ("draft budget", f"{self.budgets[-1]:8.1f}  {spark(self.budgets)}"),
            ("τ", _shown(self.ratio("decode_tokens_total", "request_steps_total"))),
            ("accepted of verified", _shown(self.ratio("accepted_tokens_total", "verified_tokens_total"))),
            ("by position", "  ".join(_shown(value) for value in self.acceptance()) or "–"),
            ("trimmed of drafted", _shown(self.ratio("trimmed_tokens_total", "drafted_tokens_total"))),
            (
                "step ms",
                f"{_of(now, 'step_measured_ms'):.1f} (foreseen {_of(now, 'step_predicted_ms'):.1f})",
            ),
            ("running, waiting", f"{_of(now, 'requests_running'):.0f}, {_of(now, 'requests_waiting'):.0f}"),
            ("preempted", f"{_of(now, 'requests_preempted_total'):.0f}"),
            ("KV blocks", f"{used:.0f} of {total:.0f}"),
            ("plans", plan),
            ("replicas", f"{replicas.get('ready', 0)} ready of {replicas.get('expected', 0)}"),
        ]

    def render(self, base: str) -> "RenderableType":
        from rich.table import Table

        mode = self.health.get("speculation", {}).get("mode", "")
        title = f"{self.health.get('model', '')} at {base}: {self.health.get('status', '')}, {mode}"
        table = Table(title=title, show_header=False, title_justify="left")
        for name, value in self.figures():
            table.add_row(name, value)
        return table


def spark(values: "Sequence[float] | deque[float]") -> str:
    """A line of bars, the highest value in full."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return ""
    return "".join(_BARS[min(int(value / highest * len(_BARS)), len(_BARS) - 1)] for value in values)


def _of(sample: Sample, name: str, position: str = "") -> float:
    return sample.get((f"dspark_{name}", position), 0.0)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
