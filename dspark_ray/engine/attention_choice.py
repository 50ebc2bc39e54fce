"""Which attention a target on a GPU runs: this project's kernel or an installed library's, by the clock.

A library is tried before anything is served, on the model's heads and windows and on the engine's own KV
cache, at a few sizes: it must give what the own kernel gives, and is timed beside it. Captured passes and the
others choose apart, since in a captured one lengths are read from the device, which not every library can.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from dspark_kernels.attention import PagedBatch, paged_attention
from dspark_kernels.attention_libraries import (
    LIBRARIES,
    AttentionLibrary,
    AttentionShape,
    LibraryError,
    LibraryMissingError,
    PagedAttention,
    load_library,
)
from torch import Tensor

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import VerificationMode
from dspark_ray.models.kv import FLOAT8, KVStorage
from dspark_ray.models.targets.decoder import Decoder

logger = logging.getLogger(__name__)

OWN = "own"
GAIN = 0.97  # a library's share of the own kernel's time, at most: less is within what two starts differ by
TOLERANCE = 0.03  # of the largest output: bf16 rounds at 1/256, and sums run in another order

Timer = Callable[[Callable[[], object]], float]
"""A call → its time on the device in ms."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A batch that attention is tried on."""

    requests: int
    rows: int  # of each request
    keys: int  # of each request, its rows included
    captured: bool  # belongs to a captured pass
    most_keys: int  # what kernels are told of: in a captured pass, all that a request may have

    def __str__(self) -> str:
        return f"{self.requests}×{self.rows} rows over {self.keys} keys"


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """The attention of a target: one for captured passes, whose lengths only the device knows, and one for
    the others."""

    captured: PagedAttention
    eager: PagedAttention
    captured_name: str = OWN
    eager_name: str = OWN

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        attend = self.captured if batch.on_host is None else self.eager
        return attend(q, k_cache, v_cache, batch, scale, window, soft_cap)


@torch.inference_mode()
def choose_attention(
    config: AppConfig,
    target: Decoder,
    kv: KVStorage,
    *,
    captures: bool,
    time_ms: Timer | None = None,
    load: Callable[[str], AttentionLibrary] = load_library,
    capability: tuple[int, int] | None = None,
) -> PagedAttention:
    """For `target` over an idle `kv`, some of which is written and zeroed again. `captures`: whether decoding
    runs in captured passes. `ConfigError` where the library that `engine.attention` names cannot be used."""
    wanted = config.engine.attention
    if wanted == OWN:
        return paged_attention
    if target.device.type == "cpu" and time_ms is None:
        if wanted != "auto":
            raise ConfigError(f"engine.attention is {wanted}, which needs a GPU: set it to auto")
        return paged_attention
    shape = AttentionShape(
        num_heads=target.config.num_heads,
        num_kv_heads=target.config.num_kv_heads,
        head_dim=target.config.head_dim,
        dtype=target.dtype,
        kv_dtype=target.kv_dtype,
        block_size=config.engine.kv_block_size,
        windows=target.config.windows,
        capability=capability or torch.cuda.get_device_capability(target.device),
    )
    usable = _usable(tuple(LIBRARIES) if wanted == "auto" else (wanted,), shape, load, wanted)
    if not usable:
        return paged_attention
    bench = _Bench(shape, kv, target.device, time_ms or _device_ms)
    trials = trials_of(config, captures)
    try:
        bench.write_noise()
        own = [bench.time(paged_attention, trial) for trial in trials]
        times = {OWN: own}
        for library in usable:
            try:
                times[library.name] = [
                    bench.compare(library, trial) if library.capturable or not trial.captured else math.inf
                    for trial in trials
                ]
            except Exception as error:  # whatever a library raises: it must not end a start
                _leave_out(library.name, f"{type(error).__name__}: {error}", wanted)
    finally:
        bench.clear()
    by_name = {library.name: library for library in usable if library.name in times}
    captured, eager = _fastest(times, trials) if wanted == "auto" else _named(by_name[wanted], trials)
    chosen = ChosenAttention(
        captured=by_name.get(captured, paged_attention),
        eager=by_name.get(eager, paged_attention),
        captured_name=captured,
        eager_name=eager,
    )
    _log(chosen, times, trials, captures)
    return chosen


def trials_of(config: AppConfig, captures: bool) -> list[Trial]:
    """Few and many requests that verify, with short and long contexts; one prompt."""
    engine, longest = config.engine, config.model.max_model_len
    speculates = config.speculation.mode is not VerificationMode.OFF
    rows = 1 + (config.speculation.num_draft_tokens if speculates else 0)
    place = engine.kv_num_blocks * engine.kv_block_size

    def decoding(requests: int, keys: int) -> Trial:
        keys = max(rows, min(keys, longest, place // requests))
        return Trial(requests, rows, keys, captures, longest if captures else keys)

    most = max(1, min(engine.max_running, engine.max_step_rows // rows, place // rows))
    few = min(most, 8)
    prompt = min(engine.max_step_rows, longest)
    prompt_keys = min(2 * prompt, longest)
    found = [
        decoding(1, longest),
        decoding(few, longest // 4),
        decoding(most, longest // 8),
        Trial(1, prompt, prompt_keys, False, prompt_keys),
    ]
    return list(dict.fromkeys(found))


def _usable(
    names: Sequence[str], shape: AttentionShape, load: Callable[[str], AttentionLibrary], wanted: str
) -> list[AttentionLibrary]:
    found = []
    for name in names:
        try:
            library = load(name)
        except LibraryMissingError as error:
            if wanted != "auto":
                raise ConfigError(f"engine.attention is {wanted}: {error}; install it or set auto") from error
            continue
        except LibraryError as error:
            _leave_out(name, str(error), wanted)
            continue
        if (reason := library.refusal(shape)) is not None:
            _leave_out(name, reason, wanted)
            continue
        found.append(library)
    return found


def _leave_out(name: str, reason: str, wanted: str) -> None:
    if name == wanted:
        raise ConfigError(
            f"engine.attention is {wanted}, which cannot be used here: {reason}; set it to auto"
        )
    logger.warning("attention: %s is left out: %s", name, reason)


def _fastest(times: dict[str, list[float]], trials: Sequence[Trial]) -> tuple[str, str]:
    """Names for captured passes and for the others: the smallest geometric mean over its trials, of the times
    against the own kernel's."""

    def best(captured: bool) -> str:
        places = [i for i, trial in enumerate(trials) if trial.captured is captured]
        if not places:
            return OWN
        shares = {
            name: math.exp(sum(math.log(found[i] / times[OWN][i]) for i in places) / len(places))
            for name, found in times.items()
            if all(math.isfinite(found[i]) for i in places)
        }
        name = min(shares, key=lambda one: shares[one])
        return name if shares[name] <= GAIN else OWN

    return best(True), best(False)


def _named(library: AttentionLibrary, trials: Sequence[Trial]) -> tuple[str, str]:
    """The library that was asked for, wherever it can run."""
    is_captured = library.capturable and any(trial.captured for trial in trials)
    return library.name if is_captured else OWN, library.name


def _log(
    chosen: ChosenAttention, times: dict[str, list[float]], trials: Sequence[Trial], captures: bool
) -> None:
    for i, trial in enumerate(trials):
        shown = ", ".join(
            f"{name} {found[i]:.3f}" if math.isfinite(found[i]) else f"{name} not captured"
            for name, found in times.items()
        )
        logger.info("attention: ms of all layers, %s: %s", trial, shown)
    logger.info(
        "attention: %s%s",
        f"{chosen.captured_name} in captured passes, " if captures else "",
        chosen.eager_name,
    )


class _Bench:
    """Batches of noise over the engine's own cache."""

    def __init__(self, shape: AttentionShape, kv: KVStorage, device: torch.device, time_ms: Timer) -> None:
        self._shape, self._device, self._time_ms = shape, device, time_ms
        self._keys, self._values = kv.layer(0)
        self._generator = torch.Generator().manual_seed(0)
        self._layers = Counter(shape.windows)

    def write_noise(self) -> None:
        """Else everything attends to zeros, and any two kernels agree."""
        for cache in (self._keys, self._values):
            if cache.dtype == FLOAT8:
                cache.view(torch.uint8).random_(0, 64)  # up to 1.875
            else:
                cache.normal_()

    def clear(self) -> None:
        for cache in (self._keys, self._values):
            (cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache).zero_()

    def time(self, attend: PagedAttention, trial: Trial) -> float:
        """Of all layers."""
        calls = {window: self._call(attend, trial, window) for window in self._layers}
        return sum(self._layers[window] * self._time_ms(call) for window, call in calls.items())

    def compare(self, library: AttentionLibrary, trial: Trial) -> float:
        """Its time; `LibraryError` where it does not give what the own kernel gives."""
        for window in self._layers:
            expected = self._call(paged_attention, trial, window)().float()
            found = self._call(library, trial, window)()
            if found.shape != expected.shape:
                raise LibraryError(f"its output is {tuple(found.shape)}, not {tuple(expected.shape)}")
            difference = float((found.float() - expected).abs().max())
            if not difference <= TOLERANCE * float(expected.abs().max()):  # NaN, too
                raise LibraryError(f"it differs by {difference:.3g} on {trial}, window {window}")
        return self.time(library, trial)

    def _call(self, attend: PagedAttention, trial: Trial, window: int | None) -> Callable[[], Tensor]:
        shape, batch = self._shape, self._batch(trial)
        generator = self._generator.manual_seed(1)
        size = (trial.requests * trial.rows, shape.num_heads, shape.head_dim)
        q = torch.randn(size, generator=generator).to(shape.dtype).to(self._device)
        scale = shape.head_dim**-0.5
        return lambda: attend(q, self._keys, self._values, batch, scale, window)

    def _batch(self, trial: Trial) -> PagedBatch:
        """Blocks of the cache in random order, the same for every kernel."""
        size = self._shape.block_size
        num_blocks, width = len(self._keys) // size, -(-trial.keys // size)
        wide = -(-trial.most_keys // size)
        generator = self._generator.manual_seed(0)
        order = torch.randperm(num_blocks, generator=generator).int()
        repeats = -(-trial.requests * width // num_blocks)
        tables = order.repeat(repeats)[: trial.requests * width].view(trial.requests, width)
        host = PagedBatch(
            query_start=torch.arange(trial.requests + 1, dtype=torch.int32) * trial.rows,
            kv_len=torch.full((trial.requests,), trial.keys, dtype=torch.int32),
            block_tables=torch.nn.functional.pad(tables, (0, wide - width)),
            block_size=size,
            max_query=trial.rows,
            max_kv=trial.most_keys,
            row_request=torch.arange(trial.requests, dtype=torch.int32).repeat_interleave(trial.rows),
        )
        placed = host.to(self._device)
        return replace(placed, on_host=None) if trial.captured else placed


def _device_ms(run: Callable[[], object]) -> float:
    """The smallest of three means over calls that are issued together, after two that do not count."""
    for _ in range(2):
        run()
    means = []
    for _ in range(3):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(10):
            run()
        last.record()
        last.synchronize()
        means.append(float(first.elapsed_time(last)) / 10)
    return min(means)
