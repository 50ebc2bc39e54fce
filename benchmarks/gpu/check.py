"""Everything that can only be known on a GPU, in one run of at most 8 minutes: `make gpu-check`.

    python benchmarks/gpu/check.py                       on a GPU
    python benchmarks/gpu/check.py --device cpu --tiny   the same code on any machine, with tiny shapes

No network and no Ray. First what is missing; then each section in a process of its own with a time limit, so
that a crash or a hang of one leaves the others' results. What a section has measured is on disk at once:
OUT/SECTION.json, and all of them in OUT/check.json.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NEEDED = ("torch", "triton", "numpy", "transformers", "safetensors", "pydantic", "yaml", "pytest")
OPTIONAL = ("matplotlib", "flash_attn", "flash_attn_interface", "flashinfer")


@dataclass(frozen=True, slots=True)
class Section:
    """One process."""

    name: str
    limit_s: float
    command: tuple[str, ...]


def main() -> int:
    args = _arguments()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    absent = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    print(f"missing: {', '.join(missing) or 'none'}; optional and not here: {', '.join(absent) or 'none'}")
    if missing:
        print(
            "install them from wheels that you bring along: pip install --no-index --find-links DIR NAME ..."
        )
        return 2
    results: dict[str, Any] = {
        "device": args.device,
        "tiny": args.tiny,
        "optional_missing": absent,
        "sections": {},
    }
    for section in _sections(args, out):
        results["sections"][section.name] = _run(section, out)
        (out / "check.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, result in results["sections"].items() if result["status"] != "ok"]
    print(f"results in {out}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: whether it runs, not how fast")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu")
    parser.add_argument("--only", nargs="+", metavar="SECTION", default=())
    return parser.parse_args()


def _sections(args: argparse.Namespace, out: Path) -> list[Section]:
    here, shape = Path(__file__).parent, ("--tiny",) if args.tiny else ()

    def script(name: str, limit_s: float) -> Section:
        target = ("--device", args.device, *shape, "--json", str(out / f"{name}.json"))
        return Section(name, limit_s, (str(here / f"{name}.py"), *target))

    tests = ("-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider")
    if args.device == "cuda":
        kernels = (*tests, "tests/gpu/test_triton_kernels.py")
        engine = (*tests, "tests/gpu/test_engine.py", "-k", "not waits")
        waits = (*tests, "tests/gpu/test_engine.py", "-k", "waits")
    else:  # a few cases through the interpreter, and the engine's captured passes without a GPU
        kernels = (*tests, "tests/contract/test_triton_kernels.py", "-k", "silu_mul or leading_matches")
        engine = (*tests, "tests/contract/test_graphs.py", "-k", "sizes or pad_rows")
        waits = (*tests, "tests/contract/test_device.py", "-k", "what_counts_as_a_wait")
    sections = [
        script("attention", 60),
        script("model", 190),
        Section("engine", 50, engine),
        Section("waits", 35, waits),  # of the host for the device, in a step
        Section("kernels", 120, kernels),
        Section("plots", 25, (str(here / "plots.py"), str(out))),
    ]
    return [section for section in sections if not args.only or section.name in args.only]


def _run(section: Section, out: Path) -> dict[str, Any]:
    """Its status, its time, and what it wrote to OUT/NAME.json."""
    print(f"{section.name} (at most {section.limit_s:.0f} s) ...", flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    written = out / f"{section.name}.json"
    written.unlink(missing_ok=True)
    started = time.monotonic()
    with (out / f"{section.name}.log").open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                [sys.executable, *section.command],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=section.limit_s,
                check=False,
            )
            status = "ok" if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {section.limit_s:.0f} s"
    seconds = round(time.monotonic() - started, 1)
    print(f"{section.name}: {status}, {seconds} s", flush=True)
    if status != "ok":
        tail = (out / f"{section.name}.log").read_text(encoding="utf-8", errors="replace")[-1500:]
        print("    " + "\n    ".join(tail.splitlines()), flush=True)
    result: dict[str, Any] = {"status": status, "seconds": seconds}
    if written.is_file():
        result["results"] = json.loads(written.read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    sys.exit(main())
