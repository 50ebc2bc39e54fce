"""What every fault costs: processes killed alone and in pairs, a node lost, a freeze, a flood, bad clients.

    python benchmarks/fleet/faults.py [--only NAME ...] [--engine native] [--name fleet-faults]
    python benchmarks/fleet/faults.py --list

Streaming clients load three replicas of the timed engine behind the whole application, or with --engine
native two of the default model, and check every token (streams.py). A row has requests whole, failed or
hung, answers with tokens lost or sent twice (`wrong`), connections that broke with the process that held
them (`lost`), throughput in the seconds after the fault against those before (`rate`), the seconds until it
is at 95% again (`back_s`) and until all processes and replicas are there again (`ready_s`), and what is
left over. Times and rates of the timed engine are simulated, on a machine that also runs the clients; the
native engine's do not decide.
Writes benchmarks/results/NAME.json and NAME.md. The exit status is 1 if a row fails.

A killed ingress or proxy breaks its clients' connections. Such a request counts as `lost`, not as failed, if
its client was told by a broken connection or the proxy's own 5xx; it must never look whole.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
from local_fleet import (
    PROJECT_DIR,
    TIMED_LABEL,
    Application,
    header,
    local_cluster,
    processes,
    running,
    save_tables,
    wait_until,
    write_result,
)
from streams import Crowd, KnownTexts, Reader, Tally, TimedTexts, merged

from dspark_ray.cli.common import load_config
from dspark_ray.core.config import AppConfig, parse_app_config

Row = dict[str, Any]

NUM_REPLICAS, NUM_CLIENTS, MAX_TOKENS = 3, 12, 90
ROWS, VERIFY_MS = (1, 16, 64, 512), (80.0, 90.0, 110.0, 400.0)
NATIVE_REPLICAS, NATIVE_CLIENTS = 2, 4
HALF_SPEED, NODE_LOSS = "a replica at half speed", "node loss"
NATIVE_CASES = ("scheduler", "engine", "server", "engine + server")
BEFORE_S, AFTER_S, LONG_S = 4.0, 4.0, 15.0
RECOVERY_S = 90.0
TITLES = {
    "scheduler": "SchedulerActor",
    "engine": "EngineActor",
    "server": ":LLMServer",
    "ingress": ":Ingress",
    "proxy": "ProxyActor",
    "controller": "ServeController",
}
HOLD_CONNECTIONS = {"ingress", "proxy"}
NOT_RUN = {
    "the machine's clock is set": "it cannot be here; no decision reads it (tests/unit/test_clock.py)",
}
COLUMNS = (
    "fault",
    "whole",
    "failed",
    "wrong",
    "hung",
    "lost",
    "refused",
    "rate",
    "back_s",
    "ready_s",
    "left",
)


def timed_config(folder: Path, factors: Sequence[float] = (1.0,) * NUM_REPLICAS) -> AppConfig:
    """Every third draft token is wrong and all others right: throughput knows no chance."""
    tables = save_tables(folder, factors, ROWS, VERIFY_MS)
    timed = {"step_tables": tables, "acceptance": [[1.0, 1.0, 0.0]], "concentration": None}
    return parse_app_config(
        {
            "model": {"id": "timed"},
            "engine": {"kind": "timed", "timed": timed, "max_running": 16, "max_waiting": 16},
            "speculation": {"num_draft_tokens": 3},
            "serving": {
                "num_replicas": len(factors),
                "replica_cpus": 0.1,
                "router": "goodput",
                "max_ongoing_requests": 32,
            },
        }
    )


def native_config() -> AppConfig:
    """The default model on two replicas with a thread each."""
    config = load_config(PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml")
    engine = config.engine.model_copy(update={"kv_num_blocks": 512, "num_threads": 1})
    serving = config.serving.model_copy(
        update={"num_replicas": NATIVE_REPLICAS, "replica_cpus": 0.1, "router": "goodput"}
    )
    return config.model_copy(update={"engine": engine, "serving": serving})


@dataclass(frozen=True)
class Bench:
    """The running application and what its cases share."""

    application: Application
    num_replicas: int = NUM_REPLICAS
    num_clients: int = NUM_CLIENTS
    model: str = "timed"
    texts: KnownTexts | None = None  # None: the timed engine's

    def crowd(self, num_clients: int, max_tokens: int = MAX_TOKENS, **options: Any) -> Crowd:
        """Clients that have begun."""
        checker = self.texts or TimedTexts.load(max_tokens)
        crowd = Crowd(
            self.application.url, checker, prompts(num_clients), max_tokens, model=self.model, **options
        )
        crowd.start()
        return crowd

    def with_known_texts(self) -> "Bench":
        """What the model answers now is what it must answer later."""
        texts = {}
        for prompt in prompts(self.num_clients):
            body = {"model": self.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            answer = httpx.post(
                f"{self.application.url}/v1/completions", json={**body, "temperature": 0.0}, timeout=120.0
            )
            texts[prompt] = answer.raise_for_status().json()["choices"][0]["text"]
        return replace(self, texts=KnownTexts(texts))

    def counts(self) -> dict[str, int]:
        """Processes by what they are."""
        return {name: len(processes(title)) for name, title in TITLES.items()}

    def is_whole(self) -> bool:
        """All replicas ready, and all processes there."""
        stats = self.application.stats()
        expected = {"engine": self.num_replicas, "server": self.num_replicas}
        counts = self.counts()
        return (
            sum(one.ready for one in stats.values()) == self.num_replicas == len(stats)
            and all(counts[name] == expected.get(name, 1) for name in TITLES)
            and self.application.answers()
        )

    def left_over(self) -> dict[str, int]:
        """Requests, KV blocks and processes that should be gone; empty: nothing."""
        stats = self.application.stats().values()
        found = {
            "running": sum(one.num_running + one.num_waiting for one in stats),
            "blocks": sum(one.kv_used_blocks for one in stats),
            **{
                f"{name} processes": count - (self.num_replicas if name in ("engine", "server") else 1)
                for name, count in self.counts().items()
            },
        }
        return {name: count for name, count in found.items() if count}


@dataclass
class Case:
    """One fault under load."""

    name: str
    inject: Callable[[Bench], Tally | None]  # returns when done; the tally of crowds of its own
    may_lose: bool = False  # connections
    window_s: float = BEFORE_S
    least_rate: float = 0.0  # after the fault, against before
    notes: list[str] = field(default_factory=list)

    def run(self, bench: Bench) -> Row:
        """The row."""
        crowd = bench.crowd(bench.num_clients)
        time.sleep(3.0)  # all streams are under way
        begun_s = time.monotonic()
        time.sleep(self.window_s)
        fault_s = time.monotonic()
        normal = crowd.tally.tokens_per_s(begun_s, fault_s)
        others = self.inject(bench)
        try:
            ready_s: float | None = round(wait_until(bench.is_whole, RECOVERY_S), 1)
        except TimeoutError:
            ready_s = None
        time.sleep(max(AFTER_S, self.window_s - (time.monotonic() - fault_s)))
        ended_s = time.monotonic()
        tally = merged([crowd.stop(), *([others] if others else [])])
        left = self._left(bench)
        after = crowd.tally.tokens_per_s(fault_s, fault_s + self.window_s)
        row: Row = {
            "fault": self.name,
            "whole": tally.whole,
            "failed": len(tally.failed),
            "wrong": len(tally.wrong),
            "hung": tally.hung,
            "lost": dict(tally.lost),
            "refused": tally.refused,
            "normal_tokens_per_s": round(normal, 1),
            "rate": round(after / normal, 3) if normal else None,  # in as long a time after the fault
            "final_rate": round(crowd.tally.tokens_per_s(ended_s - AFTER_S, ended_s) / normal, 3),
            "back_s": crowd.tally.back_after_s(fault_s, ended_s, normal),
            "ready_s": ready_s,
            "left": left,
            "details": [*tally.failed[:5], *tally.wrong[:5]],
        }
        row["passed"] = not (
            tally.failed
            or tally.wrong
            or tally.hung
            or left
            or ready_s is None
            or (tally.lost and not self.may_lose)
        )
        is_back = row["back_s"] is not None or row["final_rate"] >= 0.95
        if bench.texts is None and not (is_back and row["rate"] >= self.least_rate):
            row["passed"] = False
        return row

    @staticmethod
    def _left(bench: Bench) -> dict[str, int]:
        try:
            wait_until(lambda: not bench.left_over(), 15.0)
        except TimeoutError:
            return bench.left_over()
        return {}


def prompts(number: int) -> list[str]:
    """Of so many clients, of several lengths."""
    return [f"Client {client} asks again" + " and again" * (client % 7) for client in range(number)]


def kill(*victims: str) -> Callable[[Bench], None]:
    """SIGKILL at once: of several replicas an engine's process is the first, a server's the last."""

    def inject(bench: Bench) -> None:
        chosen = [processes(TITLES[victim])[-1 if victim == "server" else 0].pid for victim in victims]
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)

    return inject


def freeze(victim: str, seconds: float) -> Callable[[Bench], None]:
    """SIGSTOP, and SIGCONT later."""

    def inject(bench: Bench) -> None:
        pid = processes(TITLES[victim])[0].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return inject


def flood(bench: Bench) -> Tally:
    """Ten times as many requests at once as the replicas hold, running and queued."""
    return bench.crowd(10 * NUM_REPLICAS * 32, 30, once=True).stop(120.0)


def slow_readers(bench: Bench) -> Tally:
    """Clients that read nothing for a while in the middle of a stream."""
    return bench.crowd(8, 300, reader=Reader(pause_s=8.0), once=True).stop()


def leavers(bench: Bench) -> Tally:
    """Clients that leave after the first text, again and again."""
    crowd = bench.crowd(8, 600, reader=Reader(leaves=True))
    time.sleep(6.0)
    return crowd.stop()


def cases() -> list[Case]:
    """All that run on one application of equal replicas."""
    found = [
        Case("nothing", lambda bench: None, window_s=LONG_S, least_rate=0.95),
        Case("scheduler", kill("scheduler"), window_s=LONG_S, least_rate=0.98),
        Case("frozen scheduler", freeze("scheduler", 8.0), window_s=LONG_S, least_rate=0.98),
    ]
    found += [
        Case(victim, kill(victim), may_lose=victim in HOLD_CONNECTIONS)
        for victim in TITLES
        if victim != "scheduler"
    ]
    found += [
        Case(f"{one} + {other}", kill(one, other), may_lose=bool({one, other} & HOLD_CONNECTIONS))
        for one, other in combinations(TITLES, 2)
    ]
    found += [
        Case("flood of 10 times the capacity", flood),
        Case("slow readers", slow_readers),
        Case("clients that leave", leavers),
    ]
    return found


def half_speed(base_url: str, folder: Path) -> Row:
    """One replica at half the speed of the others, against none: what the fleet still gives."""
    rates, tallies, shares = [], [], []
    for number, factors in enumerate(((1.0,) * NUM_REPLICAS, (1.0, 1.0, 2.0))):
        with running(base_url, timed_config(folder, factors), f"half-{number}") as application:
            crowd = Bench(application).crowd(NUM_CLIENTS)
            time.sleep(3.0)
            before, begun_s = application.stats(), time.monotonic()
            time.sleep(LONG_S)
            rates.append(crowd.tally.tokens_per_s(begun_s, time.monotonic()))
            after = application.stats()
            tallies.append(crowd.stop())
            emitted = [
                after[name].counters.emitted_tokens - before[name].counters.emitted_tokens for name in after
            ]
            shares.append(round(min(emitted) / sum(emitted), 3))
    tally, rate = merged(tallies), rates[1] / rates[0]
    clean = not (tally.failed or tally.wrong or tally.hung or tally.lost)
    return {
        "fault": HALF_SPEED,
        "whole": tally.whole,
        "failed": len(tally.failed),
        "wrong": len(tally.wrong),
        "hung": tally.hung,
        "lost": dict(tally.lost),
        "refused": tally.refused,
        "normal_tokens_per_s": round(rates[0], 1),
        "rate": round(rate, 3),
        "least_share_of_tokens": shares,
        "left": {},
        # A third of the fleet at half speed leaves 5/6 of its capacity.
        "passed": clean and rate >= 0.95 * 5 / 6,
    }


def node_loss(folder: Path) -> Row:
    """Two nodes with a replica each; one is killed, another comes."""
    import ray
    from local_fleet import free_port, prepare_environment
    from ray import serve
    from ray.cluster_utils import Cluster

    prepare_environment()
    changed = timed_config(folder, (1.0, 1.0))
    changed = changed.model_copy(
        update={"serving": changed.serving.model_copy(update={"replica_cpus": 1.0, "num_replicas": 2})}
    )
    port = free_port()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20},
    )
    try:
        lost = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")

        def inject(bench: Bench) -> None:
            cluster.remove_node(lost, allow_graceful=False)
            cluster.add_node(num_cpus=1, object_store_memory=100 << 20)

        with running(f"http://127.0.0.1:{port}", changed, "nodes") as application:
            # The ingress takes no CPU: it may have been on either node.
            return Case(NODE_LOSS, inject, may_lose=True).run(Bench(application, 2))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""

    def cell(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{count} {name}" for name, count in value.items()) or "0"
        return "–" if value is None else str(value)

    lines = [" | ".join(("", *COLUMNS, "passed", "")).strip(), "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = [cell(row.get(name)) for name in COLUMNS] + ["yes" if row["passed"] else "**no**"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; see the module's docstring. The exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*(case.name for case in cases()), HALF_SPEED, NODE_LOSS]
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help="default: all")
    parser.add_argument("--engine", choices=("timed", "native"), default="timed")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--name", help="of the result files; default: fleet-faults[-native]")
    options = parser.parse_args()
    if options.list:
        print("\n".join(known))
        return 0
    is_native = options.engine == "native"
    only = options.only or (NATIVE_CASES if is_native else known)

    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local_cluster() as base_url:
            chosen = [case for case in cases() if case.name in only]
            if chosen:
                config = native_config() if is_native else timed_config(folder)
                with running(base_url, config, "faults") as application:
                    bench = Bench(application)
                    if is_native:
                        bench = Bench(application, NATIVE_REPLICAS, NATIVE_CLIENTS, config.model.id)
                        bench = bench.with_known_texts()
                    for case in chosen:
                        note(case.run(bench))
            if HALF_SPEED in only and not is_native:
                note(half_speed(base_url, folder))
        if NODE_LOSS in only and not is_native:
            note(node_loss(folder))
    label = "native engine; rates are of characters" if is_native else TIMED_LABEL
    file_name = options.name or ("fleet-faults-native" if is_native else "fleet-faults")
    path = write_result(file_name, {**header(label), "not_run": NOT_RUN, "rows": rows})
    path.with_suffix(".md").write_text(table(rows), encoding="utf-8")
    print(table(rows))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
