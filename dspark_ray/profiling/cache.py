"""Step tables in the cache folder, each measured once; and the engine that comes with one.

engine = build_profiled_engine(config, model_dir=resolve_model(config.model.source))

A lock is held from before the engine is loaded until its table is saved: replicas that start together on one
machine would measure each other. The others wait, and read what the first one found.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from dspark_ray.core.clock import SystemClock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.digest import digest_json
from dspark_ray.core.env import cache_dir
from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.types import VerificationMode
from dspark_ray.engine.build import TargetLoader, build_engine
from dspark_ray.engine.canary import warn_if_drafter_is_dead
from dspark_ray.engine.engine import Engine
from dspark_ray.observability.progress import progress as shown
from dspark_ray.profiling.identity import table_identity
from dspark_ray.profiling.profile import OnProgress, ProfileSettings, profile_engine
from dspark_ray.scheduling.step_table import StepTable

log = logging.getLogger(__name__)

UNDISTURBED = 0.5
"""A measurement counts if its thread ran for this share of its time; alone on a machine it is nearly all."""


def build_profiled_engine(
    config: AppConfig,
    *,
    model_dir: Path,
    engine_id: str = "engine",
    progress: bool = True,
    load: TargetLoader | None = None,
) -> Engine:
    """An engine with its step table: the configured file, else the cached one, else measured now.

    May take some seconds more than loading (`progress`: shown on stderr; `load`: as in `build_engine`). Mode
    `off` needs no table. Raises what `build_engine` raises, and `ArtefactError` for a configured table that
    was made for something else.
    """
    if config.speculation.mode is VerificationMode.OFF:
        return build_engine(config, model_dir=model_dir, engine_id=engine_id, load=load)
    identity = table_identity(config, model_dir)
    if config.speculation.step_table is not None:
        table = _configured_table(Path(config.speculation.step_table), identity)
        engine = build_engine(config, model_dir=model_dir, engine_id=engine_id, table=table, load=load)
    else:
        engine = _with_cached_table(config, model_dir, engine_id, identity, progress, load)
    assert engine.budget.table is not None
    if engine.budget.table.is_flat():
        log.warning(
            "%s: no size of step costs more than another here, so %s verifies every draft token",
            engine.budget.table.summary(),
            config.speculation.mode.value,
        )
    if config.speculation.canary:
        warn_if_drafter_is_dead(engine, model_dir)
    return engine


def ensure_table(engine: Engine, model_dir: Path, *, progress: bool = True) -> StepTable:
    """Gives an idle engine the cached table of its configuration, measured now if there is none."""
    identity = table_identity(engine.config, model_dir)
    with _locked(table_path(identity).with_suffix(".lock")):
        table = cached_table(identity)
        if table is None:
            return _profile_into_cache(engine, identity, progress)
    engine.budget.table = table
    return table


def cached_table(identity: dict[str, Any]) -> StepTable | None:
    """The table that was measured for exactly this; None without one. A damaged file is as good as none."""
    path = table_path(identity)
    if not path.is_file():
        return None
    try:
        return StepTable.load(path, expect=identity)
    except ArtefactError as error:
        log.warning("%s; it is measured again", error)
        return None


def table_path(identity: dict[str, Any]) -> Path:
    """Where the table of this identity is cached."""
    return cache_dir() / "step_tables" / f"{digest_json(identity)}.json"


def _with_cached_table(
    config: AppConfig,
    model_dir: Path,
    engine_id: str,
    identity: dict[str, Any],
    progress: bool,
    load: TargetLoader | None,
) -> Engine:
    table = cached_table(identity)
    with nullcontext() if table is not None else _locked(table_path(identity).with_suffix(".lock")):
        table = table or cached_table(identity)  # another process may have measured it while we waited
        engine = build_engine(config, model_dir=model_dir, engine_id=engine_id, table=table, load=load)
        if table is None:
            _profile_into_cache(engine, identity, progress)
    return engine


def _profile_into_cache(engine: Engine, identity: dict[str, Any], progress: bool) -> StepTable:
    """Measures an engine, saves the table where the next start finds it, and gives it to the engine.

    One that was measured beside other work is used, since live corrections mend it, and not kept.
    """
    began, worked = time.monotonic(), time.thread_time()
    with _shown(progress) as on_progress:
        table = profile_engine(engine, made_from=identity, on_progress=on_progress)
    share = (time.thread_time() - worked) / max(1e-9, time.monotonic() - began)
    engine.budget.table = table
    log.info("this thread had a CPU for %.0f%% of the measurement", 100 * share)
    if engine.target.device.type == "cpu" and share < UNDISTURBED:
        log.warning(
            "other work had the CPUs for much of the time in which step times were measured (this thread "
            "ran for %.0f%% of it): they are not kept, and the next start measures again",
            100 * share,
        )
        return table
    try:
        table.save(table_path(identity))
    except OSError as error:
        log.warning("the step table cannot be kept (%s): every start measures again", error)
    return table


def _configured_table(path: Path, identity: dict[str, Any]) -> StepTable:
    """A table with a `made_from` must fit; one without (written by hand) is taken as it is."""
    table = StepTable.load(path)
    if not table.made_from:
        log.warning("the step table %s does not say what it was measured on; it is used as it is", path)
        return table
    return StepTable.load(path, expect=identity)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("waiting for another process that measures the same step table")
        lock.acquire()
    except OSError as error:
        log.warning(
            "no lock in the cache folder (%s): processes that start together disturb each other", error
        )
    try:
        yield
    finally:
        lock.release()  # nothing, where it was not acquired


@contextmanager
def _shown(progress: bool) -> Iterator[OnProgress]:
    """A bar on a terminal, lines elsewhere, nothing if not wanted."""
    console, clock = Console(stderr=True, quiet=not progress, highlight=False), SystemClock()
    title = f"Measuring step times for the step table (once, about {ProfileSettings().max_s:.0f} s)"
    started_ms = clock.now_ms()
    if not (console.is_terminal and progress):
        console.print(f"{title} ...")
    with shown(title, console) as tell:
        yield lambda share: tell(share, "")
    console.print(f"Measured step times in {(clock.now_ms() - started_ms) / 1e3:.0f} s")
