"""What a simulation is judged by, counted as it goes: nothing is kept for each request."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import IntArray

Floats = NDArray[np.float64]

_TIMELINE_POINTS = 120


class LogHistogram:
    """Times in classes 1% wide, from 0.1 ms to a day."""

    _FIRST, _RATIO, _CLASSES = 0.1, 1.01, 2100

    def __init__(self) -> None:
        self._counts = np.zeros(self._CLASSES, dtype=np.int64)
        self._sum = 0.0

    def add(self, values: Floats) -> None:
        place = np.log(np.maximum(values, self._FIRST) / self._FIRST) / np.log(self._RATIO)
        self._counts += np.bincount(
            np.minimum(place.astype(np.int64), self._CLASSES - 1), minlength=self._CLASSES
        )
        self._sum += float(values.sum())

    def quantile(self, share: float) -> float:
        """NaN without values."""
        total = self._counts.sum()
        if not total:
            return float("nan")
        index = int(np.searchsorted(np.cumsum(self._counts), share * total))
        return float(self._FIRST * self._RATIO ** (index + 0.5))

    def summary(self) -> dict[str, float | None]:
        total = int(self._counts.sum())
        if not total:
            return {"mean": None, "p50": None, "p90": None, "p99": None}
        quantiles = {f"p{round(100 * q)}": self.quantile(q) for q in (0.5, 0.9, 0.99)}
        return {"mean": self._sum / total, **quantiles}


class _TaskTally:
    """One task's requests that ended."""

    def __init__(self, target_tokens_per_s: float | None) -> None:
        self._target = target_tokens_per_s
        self._tpot = LogHistogram()
        self._answers = self._good = self._judged = self._fast = 0

    def answers(self, tpot_ms: Floats, count: int, good: int) -> None:
        """tpot_ms [≤ count] of those with several tokens."""
        self._tpot.add(tpot_ms)
        self._answers += count
        self._good += good
        self._judged += len(tpot_ms)
        if self._target is not None:
            self._fast += int((tpot_ms * self._target <= 1e3).sum())

    def figures(self) -> dict[str, Any]:
        tpot = self._tpot.summary()
        mean = tpot["mean"]
        return {
            "answers": self._answers,
            "tpot_ms": tpot,
            "tokens_per_s_of_a_user": 1e3 / mean if mean else None,
            "slo_attainment": self._good / max(self._answers, 1),
            "reached_target": None if self._target is None else self._fast / max(self._judged, 1),
        }


class Tally:
    """Owned by the run; the fleet tells it. Nothing before `from_ms` counts."""

    def __init__(
        self,
        num_replicas: int,
        *,
        duration_ms: float,
        from_ms: float,
        ttft_ms: float,
        tpot_ms: float,
        targets_per_s: Sequence[float | None] = (None,),
    ) -> None:
        """targets_per_s: the speed that each task's requests are owed."""
        self.recent_step_ms = np.full(num_replicas, 10.0)  # [N] of each replica's last step
        self.refused = self.preemptions = self.resumed = 0
        self._from_ms, self._ttft_slo, self._tpot_slo = from_ms, ttft_ms, tpot_ms
        self._ttft, self._tpot, self._latency = LogHistogram(), LogHistogram(), LogHistogram()
        self._tasks = [_TaskTally(target) for target in targets_per_s]
        self._answers = self._good = self._good_tokens = 0
        self._answer_tokens = 0
        self._steps = self._request_steps = self._verified = self._busy_ms = 0.0
        self._decode_steps = self._decode_tokens = 0.0
        self._tokens = 0
        self._last_ms = from_ms
        self._width_ms = max(duration_ms / _TIMELINE_POINTS, 1.0)
        self._timeline = {
            name: np.zeros(_TIMELINE_POINTS)
            for name in ("tokens", "steps", "verified", "busy_ms", "requests")
        }

    def steps(
        self,
        *,
        replicas: IntArray,
        ended_ms: Floats,
        num_steps: IntArray,
        step_ms: Floats,
        verified: Floats,
        decoding: Floats,
        tokens: IntArray,
        first_tokens: IntArray,
    ) -> None:
        """A sweep's steps; all [n]. step_ms, verified, decoding: of one step; tokens: of all of them."""
        self.recent_step_ms[replicas] = step_ms
        counts = ended_ms >= self._from_ms
        if not counts.all():
            num_steps, tokens = num_steps * counts, tokens * counts
            first_tokens = first_tokens * counts
        busy_ms, drafts = num_steps * step_ms, num_steps * verified
        self._steps += float(num_steps.sum())
        self._decode_steps += float((num_steps * (decoding > 0)).sum())
        self._request_steps += float((num_steps * decoding).sum())
        self._decode_tokens += float(tokens.sum() - first_tokens.sum())
        self._tokens += int(tokens.sum())
        self._verified += float(drafts.sum())
        self._busy_ms += float(busy_ms.sum())
        self._last_ms = max(self._last_ms, float(ended_ms.max()))
        point = np.minimum((ended_ms / self._width_ms).astype(np.int64), _TIMELINE_POINTS - 1)
        for name, values in (
            ("tokens", tokens), ("steps", num_steps), ("verified", drafts), ("busy_ms", busy_ms),
            ("requests", busy_ms * decoding),
        ):  # fmt: skip
            self._timeline[name] += np.bincount(point, weights=values, minlength=_TIMELINE_POINTS)

    def first_tokens(self, arrival_ms: Floats, first_ms: Floats) -> None:
        """Requests that got their first token. [n]"""
        self._ttft.add((first_ms - arrival_ms)[first_ms >= self._from_ms])

    def answers(
        self, *, arrival_ms: Floats, first_ms: Floats, ended_ms: Floats, tokens: IntArray, task: IntArray
    ) -> None:
        """Requests that ended. All [n]."""
        counts = ended_ms >= self._from_ms
        arrival_ms, first_ms, ended_ms = (v[counts] for v in (arrival_ms, first_ms, ended_ms))
        tokens, task = tokens[counts], task[counts]
        several = tokens > 1
        tpot = np.where(several, (ended_ms - first_ms) / np.maximum(tokens - 1, 1), 0.0)
        good = (first_ms - arrival_ms <= self._ttft_slo) & (tpot <= self._tpot_slo)
        for index, one in enumerate(self._tasks):
            mine = task == index
            one.answers(tpot[mine & several], int(mine.sum()), int(good[mine].sum()))
        self._tpot.add(tpot[several])
        self._latency.add(ended_ms - arrival_ms)
        self._answers += len(tokens)
        self._answer_tokens += int(tokens.sum())
        self._good += int(good.sum())
        self._good_tokens += int(tokens[good].sum())

    def figures(self, drafted_tokens: float) -> dict[str, Any]:
        """Everything, as plain values."""
        seconds = max((self._last_ms - self._from_ms) / 1e3, 1e-9)
        return {
            "measured_s": seconds,
            "answers": self._answers,
            "refused": self.refused,
            "preemptions": self.preemptions,
            "resumed": self.resumed,
            "requests_per_s": self._answers / seconds,
            "tokens_per_s": self._tokens / seconds,
            "goodput_requests_per_s": self._good / seconds,
            "goodput_tokens_per_s": self._good_tokens / seconds,
            "slo_attainment": self._good / max(self._answers + self.refused, 1),
            "ttft_ms": self._ttft.summary(),
            "tpot_ms": self._tpot.summary(),
            "latency_ms": self._latency.summary(),
            "tau": self._decode_tokens / max(self._request_steps, 1e-9),
            "budget_tokens": self._verified / max(self._decode_steps, 1e-9),
            "requests_decoding": self._request_steps / max(self._decode_steps, 1e-9),
            "step_ms": self._busy_ms / max(self._steps, 1e-9),
            "steps": int(self._steps),
            "verified_tokens": self._verified,
            "drafted_tokens": drafted_tokens,
        }

    def by_task(self) -> list[dict[str, Any]]:
        """What each task's requests got, as plain values."""
        return [one.figures() for one in self._tasks]

    def timeline(self, replicas_at: Callable[[Floats], IntArray]) -> list[dict[str, float]]:
        """By time: tokens per second, budget and decoding requests a step, replicas and how busy they are.

        replicas_at: how many were ready. ms [n] → [n]
        """
        t = self._timeline
        replicas = replicas_at(np.asarray((np.arange(_TIMELINE_POINTS) + 0.5) * self._width_ms))
        return [
            {
                "from_s": index * self._width_ms / 1e3,
                "tokens_per_s": float(t["tokens"][index] / self._width_ms * 1e3),
                "budget_tokens": float(t["verified"][index] / max(t["steps"][index], 1.0)),
                "requests_decoding": float(t["requests"][index] / max(t["busy_ms"][index], 1e-9)),
                "replicas": int(replicas[index]),
                "busy_share": float(t["busy_ms"][index] / self._width_ms / max(replicas[index], 1)),
            }
            for index in range(_TIMELINE_POINTS)
            if t["steps"][index]
        ]
