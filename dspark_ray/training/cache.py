"""The target's hidden states and probabilities on disk, so that the target runs once per sample.

A cache is a folder of shards (plain .npy files, memory-mapped) and a manifest with the digest of what it was
made from. It grows in place as data files grow, up to a size limit; a shard counts once the manifest
names it.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark_ray.core.digest import digest_json, sha256_file
from dspark_ray.core.errors import ArtefactError, DataError
from dspark_ray.training.data import Sample, line_number, read_samples
from dspark_ray.training.target import FrozenTarget

logger = logging.getLogger(__name__)

SHARD_SAMPLES = 32  # also how much work a request to stop may wait for
OnProgress = Callable[[float], None]  # the finished share in [0, 1]
_ARRAYS = ("tokens", "taps", "top_ids", "top_probs", "index", "temperature")


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """One sample as training sees it; S = prompt + response tokens, R = response tokens."""

    tokens: Tensor  # [S] int64
    prompt_length: int
    taps: Tensor  # [S, n_taps · H] bf16
    top_ids: Tensor  # [R, K] int64; row j: the target's most probable tokens for response position j
    top_probs: Tensor  # [R, K] fp32, probabilities at temperature 1
    temperature: float  # the response was sampled at


def top_probabilities(logits: Tensor, k: int, chunk: int = 128) -> tuple[Tensor, Tensor]:
    """The k largest probabilities of each row and their ids. logits [R, V] → probs, ids [R, k].

    The k largest values lie in the k chunks with the largest maxima, so only those are sorted: exact, and
    several times faster than a top-k over the vocabulary.
    """
    rows, vocab = logits.shape
    log_z = logits.float().logsumexp(-1, keepdim=True)
    if vocab % chunk or vocab // chunk <= k:
        values, ids = logits.topk(k, dim=-1)
        return (values.float() - log_z).exp(), ids
    chunked = logits.view(rows, vocab // chunk, chunk)
    best = chunked.amax(-1).topk(k, dim=-1).indices  # [R, k]
    candidates = chunked.gather(1, best[..., None].expand(-1, -1, chunk)).view(rows, -1)
    values, at = candidates.topk(k, dim=-1)
    ids = best.gather(1, at // chunk) * chunk + at % chunk
    return (values.float() - log_z).exp(), ids


class TargetCache:
    """An append-only set of cached sequences. `spec` says what they were made from; a mismatch fails."""

    def __init__(self, folder: Path, spec: dict[str, object]) -> None:
        self.folder = folder
        self._digest = digest_json(spec)
        self._shards: list[dict[str, NDArray[np.generic]]] = []
        self._where: list[tuple[int, int]] = []  # sequence → (shard, row)
        folder.mkdir(parents=True, exist_ok=True)
        self._manifest_path = folder / "manifest.json"
        self._manifest: dict = {"digest": self._digest, "spec": spec, "shards": [], "sources": {}, "bytes": 0}
        if self._manifest_path.exists():
            self._manifest = json.loads(self._manifest_path.read_text(encoding="utf-8"))
            if self._manifest["digest"] != self._digest:
                raise ArtefactError(
                    f"the cache {folder} was made for another target, taps or top-k: remove it"
                )
        for number in range(len(self._manifest["shards"])):
            self._open_shard(number)

    def reload(self) -> None:
        """Opens the shards that another process has added."""
        self._manifest = json.loads(self._manifest_path.read_text(encoding="utf-8"))
        for number in range(len(self._shards), len(self._manifest["shards"])):
            self._open_shard(number)

    def __len__(self) -> int:
        return len(self._where)

    @property
    def num_bytes(self) -> int:
        return self._manifest["bytes"]

    @property
    def num_response_tokens(self) -> int:
        return sum(int(shard["top_ids"].shape[0]) for shard in self._shards)

    def length(self, number: int) -> int:
        """Tokens of sequence `number`."""
        shard_number, row = self._where[number]
        return int(self._shards[shard_number]["index"][row][2])

    def sequence(self, number: int) -> CachedSequence:
        """Sequence `number` in the order of arrival; its arrays are read from disk now."""
        shard_number, row = self._where[number]
        shard = self._shards[shard_number]
        start, prompt_length, length, response_start = (int(value) for value in shard["index"][row])
        rows = slice(response_start, response_start + length - prompt_length)
        return CachedSequence(
            torch.from_numpy(shard["tokens"][start : start + length].astype(np.int64)),
            prompt_length,
            torch.from_numpy(np.array(shard["taps"][start : start + length])).view(torch.bfloat16),
            torch.from_numpy(shard["top_ids"][rows].astype(np.int64)),
            torch.from_numpy(shard["top_probs"][rows].astype(np.float32)),
            float(shard["temperature"][row]),
        )

    def origin(self, number: int) -> str:
        """`file:line` of the data that sequence `number` was made from, as the file is now."""
        shard_number, row = self._where[number]
        entry = self._manifest["shards"][shard_number]
        if "source" not in entry:  # an older cache
            return f"sequence {number} of {self.folder}"
        path = Path(entry["source"])
        return f"{path}:{line_number(path, entry['offsets'][row])}" if path.exists() else str(path)

    def expected_counts(self, vocab_size: int) -> NDArray[np.float64]:
        """How often the target would say each token at the cached positions, from its top probabilities. [V]

        Smoother than counting what it said: a few thousand answers already rank rare tokens.
        """
        counts = np.zeros(vocab_size)
        for shard in self._shards:
            probs = shard["top_probs"].astype(np.float64).ravel()
            counts += np.bincount(shard["top_ids"].ravel(), probs, minlength=vocab_size)
        return counts

    def verify(self) -> None:
        """Recompute every shard's digests; raises `ArtefactError` naming the damaged file."""
        for number, entry in enumerate(self._manifest["shards"]):
            for name, expected in entry["sha256"].items():
                path = self._path(number, name)
                if sha256_file(path) != expected:
                    raise ArtefactError(f"{path} is damaged: its digest differs from the manifest")

    def extend(
        self,
        sources: list[Path],
        target: FrozenTarget,
        *,
        layer_ids: tuple[int, ...],
        top_k: int,
        max_length: int,
        max_bytes: int,
        skip_bad_lines: bool = True,
        stop: Callable[[], bool] = lambda: False,
        on_progress: OnProgress = lambda share: None,
    ) -> int:
        """Run the target over new lines of `sources` and append them; returns how many sequences came.

        Ends early, between shards, when `stop()` turns true or `max_bytes` is reached. Bad lines are logged
        and skipped, or raise `DataError`. `on_progress` is told the finished share of the new bytes, line by
        line.
        """
        before = len(self)
        known: dict[str, int] = self._manifest["sources"]
        new = {path: max(0, path.stat().st_size - known.get(str(path), 0)) for path in sources}
        total, earlier = max(1, sum(new.values())), 0
        vocab_size = target.head_weight.shape[0]
        for path in sources:
            while not stop() and self.num_bytes < max_bytes:
                start = self._manifest["sources"].get(str(path), 0)
                result = read_samples(
                    path,
                    vocab_size=vocab_size,
                    max_length=max_length,
                    start_byte=start,
                    max_samples=SHARD_SAMPLES,
                )
                if result.errors:
                    _report(result.errors, skip_bad_lines)
                if result.next_byte == start:
                    break
                samples = list(zip(result.offsets, result.samples, strict=True))

                def tell(byte: int, done: int = earlier - start) -> None:
                    on_progress(min(1.0, (done + byte) / total))

                self._append(path, samples, target, layer_ids, top_k, skip_bad_lines, tell)
                earlier += result.next_byte - start
                self._manifest["sources"][str(path)] = result.next_byte
                self._write_manifest()
                on_progress(min(1.0, earlier / total))
        return len(self) - before

    def _append(
        self,
        path: Path,
        samples: list[tuple[int, Sample]],
        target: FrozenTarget,
        layer_ids: tuple[int, ...],
        top_k: int,
        skip_bad_lines: bool,
        tell: Callable[[int], None],
    ) -> None:
        """One shard of a file's samples, each with its line's first byte, which `tell` is told."""
        offsets, rows = [], []
        for offset, sample in samples:
            tell(offset)
            try:
                rows.append((sample, _run_target(sample, target, layer_ids, top_k)))
            except ValueError as error:
                _report([f"{path}:{line_number(path, offset)}: {error}"], skip_bad_lines)
                continue
            offsets.append(offset)
        if not rows:
            return
        arrays = _stack(rows)
        number = len(self._manifest["shards"])
        for name, array in arrays.items():
            np.save(self._path(number, name), array)
        self._manifest["shards"].append(
            {
                "sha256": {name: sha256_file(self._path(number, name)) for name in _ARRAYS},
                "source": str(path),
                "offsets": offsets,
            }
        )
        self._manifest["bytes"] += sum(array.nbytes for array in arrays.values())
        self._open_shard(number)

    def _open_shard(self, number: int) -> None:
        shard = {name: np.load(self._path(number, name), mmap_mode="r") for name in _ARRAYS}
        self._shards.append(shard)
        self._where.extend((number, row) for row in range(len(shard["index"])))

    def _path(self, number: int, name: str) -> Path:
        return self.folder / f"{number:05d}.{name}.npy"

    def _write_manifest(self) -> None:
        temporary = self._manifest_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._manifest), encoding="utf-8")
        temporary.replace(self._manifest_path)


def _report(errors: list[str], skip: bool) -> None:
    if not skip:
        raise DataError(f"bad training data (bad_data: stop): {errors[0]}")
    for error in errors:
        logger.warning("skipped %s", error)


def _run_target(
    sample: Sample, target: FrozenTarget, layer_ids: tuple[int, ...], top_k: int
) -> dict[str, NDArray[np.generic]]:
    """One sequence at a time: no padding, and a few hundred rows already fill the matrix units.

    Raises ValueError where the target overflows."""
    tokens = torch.tensor(sample.prompt_ids + sample.response_ids)
    taps, hidden = target.hidden_states(tokens, layer_ids)
    logits = torch.nn.functional.linear(hidden[len(sample.prompt_ids) - 1 : -1], target.head_weight)
    probs, ids = top_probabilities(logits, top_k)
    if not (taps.isfinite().all() and probs.isfinite().all()):
        raise ValueError("the target's hidden states or probabilities are not finite")
    return {
        "tokens": tokens.numpy().astype(np.int32),
        "taps": taps.to(torch.bfloat16).view(torch.int16).numpy(),
        "top_ids": ids.numpy().astype(np.int32),
        "top_probs": probs.numpy().astype(np.float16),
    }


def _stack(
    rows: list[tuple[Sample, dict[str, NDArray[np.generic]]]],
) -> dict[str, NDArray[np.generic]]:
    """Sequences joined end to end, with an index row (token start, prompt length, length, response start)."""
    index, temperature, parts = [], [], []
    start = response_start = 0
    for sample, arrays in rows:
        length = len(arrays["tokens"])
        index.append((start, len(sample.prompt_ids), length, response_start))
        temperature.append(sample.temperature)
        parts.append(arrays)
        start += length
        response_start += len(sample.response_ids)
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return joined | {
        "index": np.array(index, dtype=np.int64),
        "temperature": np.array(temperature, dtype=np.float32),
    }
