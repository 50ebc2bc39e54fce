"""An hour of mixed requests, many of them broken off, while memory and file descriptors are watched.

    python benchmarks/fleet/soak.py [--minutes 60] [--rate 0.25] [--config configs/smollm2-135m-cpu.yaml]

Sampling of every kind, grammars, log-probabilities, several choices, stop strings, requests that are refused,
and clients that leave before, in and after the first token, at a low rate. Every ten seconds the resident
memory and the descriptors of every process are noted. It fails

- if a process of ours grows after the first sixth of the time: by the median of the slopes between all pairs
  of notes (Theil and Sen), more than --max-mib-per-hour or --max-fds-per-hour;
- if at the end drafted ≠ verified + trimmed, verified ≠ accepted + rejected, a request is left, or KV blocks
  that were free at the beginning are not free again;
- if a client got an answer that it should not have got.

Ours are the replicas, engines, the ingress, the scheduler, and Serve's proxy and controller, which hold what
we give them; Ray's own daemons are noted beside. Writes benchmarks/results/NAME.json and NAME.png.
"""

import argparse
import asyncio
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from local_fleet import (
    PROJECT_DIR,
    Application,
    header,
    local_cluster,
    processes,
    running,
    wait_until,
    write_result,
)

from dspark_ray.cli.common import load_config
from dspark_ray.core.config import AppConfig

PERIOD_S = 10.0
WARM_UP = 1 / 6  # of the time
DRAIN_S = 120.0
OURS = {
    "EngineActor": "engine",
    "LLMServer": "server",
    "Ingress": "ingress",
    "SchedulerActor": "scheduler",
    "ProxyActor": "proxy",
    "ServeController": "controller",
}
RAYS = {"gcs_server": "gcs", "raylet/raylet": "raylet"}
WORDS = [
    "river",
    "stone",
    "lamp",
    "cloud",
    "market",
    "letter",
    "winter",
    "garden",
    "music",
    "window",
    "bread",
    "engine",
    "story",
    "light",
]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and what its client does with the answer."""

    route: str
    body: Row
    leave_after: float | None  # seconds after the request was sent; None: it stays
    is_wrong: bool = False  # it must be refused with a 400


def draw(rng: np.random.Generator, model: str) -> Asked:
    """A request of some kind."""
    words = " ".join(rng.choice(WORDS, size=int(rng.choice([5, 40, 200]))))
    body: Row = {"model": model, "max_tokens": int(rng.integers(1, 49)), "stream": bool(rng.random() < 0.7)}
    kinds: list[Row] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": int(rng.integers(1000))},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 1.2, "stop": [" the", "\n\n"]},
        {"temperature": 1.0, "n": 2},
    ]
    body |= kinds[int(rng.integers(len(kinds)))]
    is_wrong = bool(rng.random() < 0.05)
    if is_wrong:
        body |= [{"temperature": -1}, {"max_tokens": "many"}, {"no_such_parameter": 1}][int(rng.integers(3))]
    leave_after = float(rng.choice([0.0, 0.02, 0.1, 0.3, 1.0])) if rng.random() < 0.35 else None
    if rng.random() < 0.5:
        return Asked("/v1/completions", {**body, "prompt": words, "logprobs": 2}, leave_after, is_wrong)
    body["messages"] = [{"role": "user", "content": f"Write a line about {words}"}]
    if rng.random() < 0.25 and not is_wrong:
        schema = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 12}}}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "word", "schema": schema}}
    return Asked("/v1/chat/completions", body, leave_after, is_wrong)


class Crowd(threading.Thread):
    """Clients at a rate, until `stop`; what became of their requests."""

    def __init__(self, application: Application, model: str, rate: float, seed: int) -> None:
        super().__init__(daemon=True)
        self._application = application
        self._model = model
        self._rate = rate
        self._rng = np.random.default_rng(seed)
        self._stopped = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.unexpected: list[str] = []

    def stop(self) -> None:
        """No new requests; returns when those under way have ended."""
        self._stopped.set()
        self.join(DRAIN_S)

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        async with httpx.AsyncClient(base_url=self._application.url, timeout=120.0) as client:
            while not self._stopped.is_set():
                task = asyncio.create_task(self._one(client, draw(self._rng, self._model)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                await asyncio.sleep(float(self._rng.exponential(1.0 / self._rate)))
            await asyncio.gather(*tasks)

    async def _one(self, client: httpx.AsyncClient, asked: Asked) -> None:
        try:
            async with asyncio.timeout(asked.leave_after):
                outcome = await self._ask(client, asked)
        except TimeoutError:
            outcome = "left"
        except httpx.HTTPError as error:
            outcome = f"{type(error).__name__}: {error}"
        self.outcomes[outcome if outcome in ("answered", "refused", "left") else "unexpected"] += 1
        if outcome not in ("answered", "refused", "left"):
            self.unexpected.append(f"{outcome} to {asked.body}"[:500])

    async def _ask(self, client: httpx.AsyncClient, asked: Asked) -> str:
        async with client.stream("POST", asked.route, json=asked.body) as response:
            text = (await response.aread()).decode()
        if asked.is_wrong:
            return "refused" if response.status_code == 400 else f"{response.status_code} {text[:200]}"
        if response.status_code != 200 or '"error"' in text:
            return f"{response.status_code} {text[-200:]}"
        whole = text.rstrip().endswith("data: [DONE]") if asked.body["stream"] else '"usage"' in text
        return "answered" if whole else f"the answer ended early: {text[-200:]}"


@dataclass
class Watch:
    """Memory and descriptors by process, over time."""

    at_min: list[float] = field(default_factory=list)
    notes: dict[str, list[tuple[float, float, int]]] = field(default_factory=lambda: defaultdict(list))

    def note(self, minutes: float) -> None:
        """(minutes, MiB, descriptors) of each process that is there."""
        for process in processes():
            try:
                title = " ".join(process.cmdline())
                name = next((name for key, name in {**OURS, **RAYS}.items() if key in title), None)
                if name is not None:
                    mib = process.memory_info().rss / 2**20
                    self.notes[f"{name} {process.pid}"].append((minutes, mib, process.num_fds()))
            except psutil.Error:
                continue

    def judged(self, minutes: float, max_mib: float, max_fds: float) -> list[Row]:
        """A row a process; a process that came or went in the time is one too many."""
        rows = []
        for name, notes in self.notes.items():
            late = np.array([one for one in notes if one[0] >= WARM_UP * minutes])
            row: Row = {"process": name, "is_ours": name.split()[0] in OURS.values(), "notes": len(notes)}
            if len(late) >= 3:
                row |= {
                    "mib_first": round(float(late[0, 1]), 1),
                    "mib_last": round(float(late[-1, 1]), 1),
                    "mib_per_hour": round(slope(60 * late[:, 1], late[:, 0]), 2),
                    "fds_last": int(late[-1, 2]),
                    "fds_per_hour": round(slope(60 * late[:, 2], late[:, 0]), 2),
                }
                row["grows"] = row["mib_per_hour"] > max_mib or row["fds_per_hour"] > max_fds
            rows.append(row)
        return rows


def slope(values: np.ndarray, times: np.ndarray) -> float:
    """The median of the slopes between all pairs: a few odd notes do not count."""
    first, second = np.triu_indices(len(values), 1)
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def broken_identities(application: Application, free_before: dict[str, int]) -> list[str]:
    """What does not add up once nothing runs."""
    found = []
    for name, stats in application.stats().items():
        counters = stats.counters
        checks: list[tuple[str, int, int]] = [
            (
                "drafted = verified + trimmed",
                counters.drafted_tokens,
                counters.verified_tokens + counters.trimmed_tokens,
            ),
            (
                "verified = accepted + rejected",
                counters.verified_tokens,
                counters.accepted_tokens + counters.rejected_tokens,
            ),
            ("requests left = 0", stats.num_running + stats.num_waiting, 0),
            ("KV blocks in use, as before", stats.kv_used_blocks, free_before.get(name, -1)),
        ]
        found += [f"{name}: {what}: {left} and {right}" for what, left, right in checks if left != right]
    return found


def plot(watch: Watch, path: Path) -> None:
    """Memory against its value after the warm-up, and descriptors."""
    from matplotlib import pyplot

    figure, (memory, descriptors) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for name, notes in watch.notes.items():
        at = np.array(notes)
        memory.plot(at[:, 0], at[:, 1], label=name.split()[0])
        descriptors.plot(at[:, 0], at[:, 2], label=name.split()[0])
    for axis, label in ((memory, "resident memory, MiB"), (descriptors, "open descriptors")):
        axis.set_xlabel("minutes")
        axis.set_ylabel(label)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    memory.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)


def soak(application: Application, config: AppConfig, options: argparse.Namespace) -> tuple[Row, Watch]:
    """All of it on a running application."""
    before = {name: stats.kv_used_blocks for name, stats in application.stats().items()}
    watch, crowd = Watch(), Crowd(application, config.model.id, options.rate, options.seed)
    cpu: Callable[[], float] = lambda: sum(_cpu_s(one) for one in processes())  # noqa: E731
    started, cpu_before = time.monotonic(), cpu()
    crowd.start()
    while (minutes := (time.monotonic() - started) / 60) < options.minutes:
        watch.note(minutes)
        if len(watch.notes) and int(minutes * 6) % 30 == 0:
            print(f"{minutes:.1f} min: {dict(crowd.outcomes)}", flush=True)
        time.sleep(PERIOD_S)
    elapsed_s, used_s = time.monotonic() - started, cpu() - cpu_before
    crowd.stop()
    wait_until(lambda: not any(s.num_running + s.num_waiting for s in application.stats().values()), DRAIN_S)
    broken = broken_identities(application, before)
    counters = [stats.counters for stats in application.stats().values()]
    row = {
        "minutes": round(elapsed_s / 60, 1),
        "cores_used": round(used_s / elapsed_s, 3),
        "requests": dict(crowd.outcomes),
        "unexpected": crowd.unexpected[:20],
        "emitted_tokens": sum(one.emitted_tokens for one in counters),
        "drafted_tokens": sum(one.drafted_tokens for one in counters),
        "broken_identities": broken,
        "processes": watch.judged(options.minutes, options.max_mib_per_hour, options.max_fds_per_hour),
    }
    grown = [one["process"] for one in row["processes"] if one["is_ours"] and one.get("grows", False)]
    row["passed"] = not (grown or broken or crowd.unexpected)
    return row, watch


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring. The exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=0.25, help="requests/s")
    parser.add_argument("--config", type=Path, default=PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml")
    parser.add_argument("--kv-blocks", type=int, default=256, help="few, so that caches fill and evict")
    parser.add_argument("--max-mib-per-hour", type=float, default=16.0)
    parser.add_argument("--max-fds-per-hour", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="fleet-soak", help="of the result files")
    options = parser.parse_args(arguments)

    config = load_config(options.config)
    engine = config.engine.model_copy(update={"kv_num_blocks": options.kv_blocks, "num_threads": 1})
    config = config.model_copy(update={"engine": engine})
    with local_cluster() as base_url, running(base_url, config, "soak") as application:
        row, watch = soak(application, config, options)
    notes = {name: [[round(v, 2) for v in one] for one in taken] for name, taken in watch.notes.items()}
    label = f"{config.engine.kind} engine"
    path = write_result(options.name, {**header(label), **row, "minutes_mib_fds": notes})
    plot(watch, path.with_suffix(".png"))
    print({key: row[key] for key in ("passed", "cores_used", "requests", "broken_identities")})
    for one in row["processes"]:
        print(one)
    return 0 if row["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
