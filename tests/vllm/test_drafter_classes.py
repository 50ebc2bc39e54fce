"""Our drafters against vLLM's own classes: the same random checkpoint, the same context, the same logits.

Both read the checkpoint that we saved, in fp32; so a tap, a norm, a residual or a rotation that we read
differently from the field shows here, and not only in acceptance.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark_ray.core.types import SamplingParams
from dspark_ray.engine.build import DRAFTERS  # with every drafter registered
from dspark_ray.models.drafters.autoregressive import AutoregressiveConfig
from dspark_ray.models.drafters.base import ContextRows, DraftBlock, DrafterContext, DraftRequest
from dspark_ray.models.drafters.checkpoint import save_checkpoint
from dspark_ray.models.drafters.config_json import Verifier
from dspark_ray.models.drafters.families import DrafterConfig
from dspark_ray.models.drafters.network import DSparkConfig
from dspark_ray.models.targets.decoder import Decoder, load_target
from tests.drafter_families import family_network
from tests.tiny import tiny_model_dir
from tests.vllm.draft_models import DraftModel, one_rank, vllm_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GAMMA, LENGTH, MASK = 4, 21, 127
DRAFT_TO_TARGET = torch.arange(0, 128, 4) + 1
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention knows no smaller heads
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_target_layers": 5,
    "target_layer_ids": (0, 1, 3),
    "block_size": GAMMA,
    "rope_theta": 50_000.0,
    "rms_norm_eps": 1e-5,
}
DSPARK = DSparkConfig(**SHAPE, num_hidden_layers=2, mask_token_id=MASK, markov_rank=8)
DFLASH = dataclasses.replace(
    DSPARK,
    markov_rank=0,
    enable_confidence_head=False,
    confidence_head_with_markov=False,
    sample_from_anchor=False,
)
EAGLE3 = AutoregressiveConfig(**SHAPE, kind="eagle3", num_hidden_layers=1, qk_norm=False)

layouts = pytest.mark.parametrize("speculators", [False, True], ids=["native", "speculators"])


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(
        tmp_path_factory.mktemp("target"), "qwen3", num_hidden_layers=5, head_dim=32, dtype=torch.bfloat16
    )


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_target(target_dir, torch.float32, 512)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def save(path: Path, config: DrafterConfig, target: Decoder, *, speculators: bool) -> None:
    mapping = DRAFT_TO_TARGET if config.draft_vocab_size else None
    verifier = Verifier("the-target", target.head_weight, 512) if speculators else None
    save_checkpoint(path, config, family_network(config).state_dict(), mapping, verifier)


def texts() -> tuple[list[int], Tensor]:
    """A text that ends with the anchor, and the taps of all before it."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, MASK, (LENGTH + 1,), generator=generator).tolist()
    return tokens, torch.randn(LENGTH, 3 * SHAPE["hidden_size"], generator=generator)


def drafted(path: Path, config: DrafterConfig, target: Decoder) -> tuple[DraftBlock, Tensor]:
    """Our served drafter's block at temperature 1, and log q over its draft vocabulary [γ, Vd]."""
    context = DrafterContext(
        target=target,
        num_draft_tokens=GAMMA,
        num_slots=64,
        kv_block_size=4,
        max_positions=64,
        path=str(path),
        temperatures=None,
        ngram_min=1,
        ngram_max=3,
    )
    drafter = DRAFTERS.get(config.kind)(context)
    tokens, taps = texts()
    rows = torch.arange(LENGTH)
    drafter.commit(ContextRows(taps, rows, rows, torch.tensor(tokens[1:])))
    uniforms = np.random.default_rng(0).random(GAMMA)
    request = DraftRequest(tokens, list(range(16)), SamplingParams(temperature=1.0), uniforms)
    block = drafter.propose([request])
    probs = block.draft_probs[0]
    assert probs is not None
    return block, probs.log()


def vllm_model(tmp_path: Path, target_dir: Path, method: str) -> Iterator[DraftModel]:
    config = vllm_config(target_dir, tmp_path / "drafter", method, GAMMA)
    with one_rank(config, tmp_path):
        yield DraftModel(config, load_file(target_dir / "model.safetensors"))


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Log-probabilities [γ, Vd]; a random drafter's differ by several nats between tokens."""
    assert ours.std() > 0.5
    torch.testing.assert_close(ours, theirs.log_softmax(-1), atol=2e-4, rtol=1e-4)


@layouts
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("draft_vocab_size", [None, len(DRAFT_TO_TARGET)])
def test_dspark(
    tmp_path: Path,
    target_dir: Path,
    target: Decoder,
    speculators: bool,
    from_anchor: bool,
    draft_vocab_size: int | None,
) -> None:
    if not speculators and draft_vocab_size:
        pytest.skip("vLLM wants the LM head's rows, which our own layout leaves to the target")
    config = dataclasses.replace(DSPARK, sample_from_anchor=from_anchor, draft_vocab_size=draft_vocab_size)
    save(tmp_path / "drafter", config, target, speculators=speculators)
    block, ours = drafted(tmp_path / "drafter", config, target)
    tokens, taps = texts()
    slots = [tokens[-1]] + [MASK] * (config.num_slots(GAMMA) - 1)
    for theirs in vllm_model(tmp_path, target_dir, "dspark"):
        assert theirs.taps == config.target_layer_ids
        assert theirs.samples_from_anchor is from_anchor
        hidden = theirs.block_hidden(taps, slots)[-GAMMA:]
        previous = torch.tensor([tokens[-1], *block.token_ids[0][:-1]])
        embedded = theirs.model.markov_embed(previous)
        logits = theirs.model.compute_draft_logits(hidden) + theirs.model.markov_bias(embedded)
        assert_same(ours, logits)
        mapped = theirs.model.map_draft_to_target(torch.arange(logits.shape[-1]))
        assert mapped.tolist() == (DRAFT_TO_TARGET if draft_vocab_size else torch.arange(128)).tolist()
        confidences = theirs.model.compute_confidence(hidden, embedded)
        assert block.confidence_logits is not None
        own = torch.from_numpy(block.confidence_logits[0]).sigmoid()
        torch.testing.assert_close(own, confidences, atol=1e-4, rtol=1e-4)


@layouts
def test_dflash(tmp_path: Path, target_dir: Path, target: Decoder, speculators: bool) -> None:
    save(tmp_path / "drafter", DFLASH, target, speculators=speculators)
    _, ours = drafted(tmp_path / "drafter", DFLASH, target)
    tokens, taps = texts()
    for theirs in vllm_model(tmp_path, target_dir, "dflash"):
        assert theirs.taps == DFLASH.target_layer_ids
        hidden = theirs.block_hidden(taps, [tokens[-1]] + [MASK] * GAMMA)
        assert_same(ours, theirs.model.compute_logits(hidden[1:]))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_eagle3(tmp_path: Path, target_dir: Path, target: Decoder, normed: bool, qk_norm: bool) -> None:
    changes = {"norm_before_residual": normed, "qk_norm": qk_norm}
    config = dataclasses.replace(EAGLE3, **changes, draft_vocab_size=len(DRAFT_TO_TARGET))
    save(tmp_path / "drafter", config, target, speculators=True)
    block, ours = drafted(tmp_path / "drafter", config, target)
    tokens, taps = texts()
    for theirs in vllm_model(tmp_path, target_dir, "eagle3"):
        assert theirs.taps == config.target_layer_ids
        logits = theirs.feedback_logits(taps, tokens + block.token_ids[0][:-1], LENGTH)
        assert torch.isinf(logits).sum(-1).tolist() == [128 - len(DRAFT_TO_TARGET)] * GAMMA
        assert_same(ours, logits[:, DRAFT_TO_TARGET])
