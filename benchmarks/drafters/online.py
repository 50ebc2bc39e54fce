"""Confidences learnt while serving against the head alone and the margin alone, on real drafts.

    python benchmarks/drafters/online.py configs/smollm2-135m-cpu.yaml --learn self-written.jsonl
        --judge mt-bench.jsonl [--limit 200] [--max-tokens 96] [--rules greedy rejection shared_noise]

Answers the first prompts with every draft verified, and the estimator of `speculation.confidence: online`
learns from what becomes of the drafts. Then it answers the others, learning nothing, and compares scores by
AUROC at each position (drafts whose earlier tokens stood; the chance that a token that stands is scored above
one that falls) and of survival, and their ECE. Writes benchmarks/results/NAME.json.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dspark_ray.calibration.online import LearnedDraft, OnlineEstimator
from dspark_ray.calibration.reliability import auroc, ece
from dspark_ray.calibration.sts import survival_outcomes
from dspark_ray.cli.common import LocalEngine, load_config, load_engine, verifying_everything
from dspark_ray.core.types import AcceptanceRule, SamplingParams
from dspark_ray.models.drafters.base import Outcome
from dspark_ray.models.drafters.confidence import DraftNote
from dspark_ray.models.prompts import read_prompts
from dspark_ray.profiling.machine import machine_facts, portable_config
from dspark_ray.training.evaluate import evaluate

RESULTS_DIR = Path(__file__).resolve().parents[1] / "results"
MIN_EACH = 30  # outcomes of either kind: fewer tell nothing of a position's AUROC
Float64Array = NDArray[np.float64]


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="with a DSpark drafter that has a confidence head")
    parser.add_argument("--learn", type=Path, required=True, help="prompts whose drafts are learnt from")
    parser.add_argument("--judge", type=Path, required=True, help="prompts whose drafts are judged")
    parser.add_argument("--limit", type=int, default=200, help="prompts of a file")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rules", nargs="+", default=[rule.value for rule in AcceptanceRule])
    parser.add_argument("--name", default="online-confidence", help="of the result file")
    options = parser.parse_args()
    config = verifying_everything(load_config(options.config, confidence="online"))
    local = load_engine(config, profiled=False)
    rules = {}
    for rule in options.rules:
        sampling = SamplingParams(
            temperature=0.0 if rule == AcceptanceRule.GREEDY else 1.0,
            max_tokens=options.max_tokens,
            seed=0,
            shared_noise=rule == AcceptanceRule.SHARED_NOISE,
        )
        learnt, judged = (
            _drafts(local, path, sampling, options.limit, options.concurrency)
            for path in (options.learn, options.judge)
        )
        rules[rule] = _compare(rule, learnt, judged)
        _print(rule, rules[rule])
    result = {
        "machine": machine_facts(),
        "config": portable_config(config),
        "learn": options.learn.name,
        "judge": options.judge.name,
        "limit": options.limit,
        "max_tokens": options.max_tokens,
        "rules": rules,
    }
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    path = RESULTS_DIR / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _drafts(
    local: LocalEngine, path: Path, sampling: SamplingParams, limit: int, concurrency: int
) -> list[LearnedDraft]:
    """What became of the drafts of a file's prompts, as the estimator learns it."""
    found: list[LearnedDraft] = []
    drafter = local.engine.drafter
    assert drafter is not None

    def note(outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome.note, DraftNote) and outcome.num_known:
                features, baseline = (
                    np.asarray(v, np.float64) for v in (outcome.note.features, outcome.note.baseline)
                )
                found.append(
                    LearnedDraft(sampling.rule, features, baseline, outcome.num_known, outcome.num_accepted)
                )

    observe, drafter.observe = drafter.observe, note  # type: ignore[method-assign]
    try:
        prompts = [prompt.token_ids for prompt in read_prompts(path, local.tokenizer, limit)]
        evaluate(local.engine, prompts, sampling, concurrency=concurrency)
    finally:
        drafter.observe = observe  # type: ignore[method-assign]
    return found


def _compare(rule: str, learnt: list[LearnedDraft], judged: list[LearnedDraft]) -> dict[str, Any]:
    block_size, num_features = learnt[0].features.shape
    estimator = OnlineEstimator(block_size, num_features)
    for draft in learnt:
        estimator.learn(draft)
    features, baseline = (
        np.stack([getattr(draft, name) for draft in judged]) for name in ("features", "baseline")
    )
    chances = estimator.predict(features, baseline, [rule] * len(judged))
    accepted = np.array([draft.num_accepted for draft in judged])
    verified = np.array([draft.num_verified for draft in judged])
    scores = {"online": chances, "head": baseline, "margin": _to_unit(features[..., 0])}
    positions: list[dict[str, Any]] = []
    for k in range(block_size):
        reached = (accepted >= k) & (verified > k)
        outcomes = (accepted[reached] > k).astype(np.float64)
        row: dict[str, Any] = {"position": k + 1, "drafts": int(reached.sum()), "stood": int(outcomes.sum())}
        if min(outcomes.sum(), (1.0 - outcomes).sum()) >= MIN_EACH:
            row |= {name: round(auroc(score[reached, k], outcomes), 4) for name, score in scores.items()}
        positions.append(row)
    told = [row for row in positions if "online" in row]
    return {
        "drafts_learnt": len(learnt),
        "drafts_judged": len(judged),
        "in_use": estimator.describe(),
        "auroc_by_position": positions,
        "mean_auroc": {name: round(float(np.mean([row[name] for row in told])), 4) for name in scores},
        "survival": {
            name: _survival(score, accepted, verified) for name, score in scores.items() if name != "margin"
        },
    }


def _survival(chances: Float64Array, accepted: Any, verified: Any) -> dict[str, list[float]]:
    """AUROC and ECE of Π c_i by position."""
    block_size = chances.shape[1]
    survival = np.cumprod(chances, axis=1)
    survived, known = survival_outcomes(accepted, verified, block_size)
    pairs = [
        (survival[known[:, k], k], survived[known[:, k], k].astype(np.float64)) for k in range(block_size)
    ]
    return {
        "auroc": [round(auroc(*pair), 4) for pair in pairs],
        "ece": [round(ece(*pair), 4) for pair in pairs],
    }


def _to_unit(margin: Float64Array) -> Float64Array:
    """Any increasing map into [0, 1] does for an AUROC."""
    return margin / (1.0 + margin)


def _print(rule: str, result: dict[str, Any]) -> None:
    title = f"{rule}: {result['drafts_learnt']} drafts learnt, {result['drafts_judged']} judged"
    names = ("online", "head", "margin")
    table = Table("position", "drafts", *names, title=title)
    for row in result["auroc_by_position"]:
        figures = (f"{row[name]:.3f}" if name in row else "–" for name in names)
        table.add_row(str(row["position"]), str(row["drafts"]), *figures)
    table.add_row("mean", "", *(f"{result['mean_auroc'][name]:.3f}" for name in names))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
