"""What the sections of the GPU check share: times on a device, and results that are on disk at once."""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def arguments() -> argparse.Namespace:
    """--device, --tiny and --json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def median_ms(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Of calls one after the other, each waited for, after two that do not count."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        synchronise(device)
        started = time.perf_counter()
        run()
        synchronise(device)
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)[len(times) // 2]


def stream_ms(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """A call's share of the device's time when calls are issued together: what a captured step pays."""
    if device.type != "cuda":
        return median_ms(run, device, repeats)
    for _ in range(3):
        run()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / repeats


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Results:
    """Figures by name; each is on disk as soon as it is known, and a failure is a result too."""

    def __init__(self, path: Path) -> None:
        self._path, self._found, self.failures = path, dict[str, Any](), 0

    def put(self, name: str, value: object) -> None:
        self._found[name] = value
        self._path.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(value)[:300], flush=True)

    def measure(self, name: str, run: Callable[[], object]) -> Any:
        """What `run` returns, noted under `name`; None where it fails."""
        try:
            value = run()
        except Exception as error:  # one figure lost must not be all of them
            self.failures += 1
            traceback.print_exc()
            self.put(name, {"error": f"{type(error).__name__}: {error}"})
            return None
        self.put(name, value)
        return value
