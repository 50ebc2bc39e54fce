"""Drafter checkpoints: round trips, DeepSpec's own layout, aliases, and every way to fail closed."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_ray.core.errors import CheckpointError, ConfigError
from dspark_ray.models.drafters.autoregressive import AutoregressiveConfig, AutoregressiveNetwork
from dspark_ray.models.drafters.checkpoint import load_checkpoint, save_checkpoint
from dspark_ray.models.drafters.config_json import Verifier
from dspark_ray.models.drafters.network import DSparkConfig, DSparkNetwork
from dspark_ray.models.drafters.shape import DrafterShape
from tests.drafter_families import verifier

CONFIG = DSparkConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=60,
    num_target_layers=5,
    target_layer_ids=(0, 2),
    mask_token_id=59,
    draft_vocab_size=20,
    markov_rank=6,
    qk_norm=False,
    rope_theta=1e5,
)
DRAFT_TO_TARGET = torch.arange(0, 60, 3)


def save(path: Path, config: DSparkConfig = CONFIG) -> dict[str, Tensor]:
    torch.manual_seed(0)
    state = DSparkNetwork(config).state_dict()
    save_checkpoint(path, config, state, DRAFT_TO_TARGET if config.draft_vocab_size else None)
    return state


def edit(path: Path, tensors: Callable[[dict[str, Tensor]], Any] | None = None, **keys: Any) -> None:
    """Change the stored tensors in place, and keys of config.json (None removes one)."""
    if tensors is not None:
        stored = load_file(path / "model.safetensors")
        tensors(stored)
        save_file(stored, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    raw = {key: value for key, value in (raw | keys).items() if value is not None}
    (path / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("draft_vocab_size", [20, None])
def test_round_trip(tmp_path: Path, qk_norm: bool, draft_vocab_size: int | None) -> None:
    config = dataclasses.replace(CONFIG, qk_norm=qk_norm, draft_vocab_size=draft_vocab_size)
    state = save(tmp_path, config)
    loaded_config, tensors = load_checkpoint(tmp_path)
    assert loaded_config == config
    d2t = tensors.pop("d2t", None)
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name].bfloat16()) for name in state)
    if draft_vocab_size is not None:
        assert d2t is not None
        assert torch.equal(torch.arange(20) + d2t, DRAFT_TO_TARGET)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3DSparkModel" if qk_norm else "LlamaDSparkModel"]


def test_deepspec_checkpoint_with_stored_copies(tmp_path: Path) -> None:
    """Full vocabulary, no d2t, the target's embedding and LM head beside the drafter's own tensors."""
    config = dataclasses.replace(CONFIG, qk_norm=True, draft_vocab_size=None)
    save(tmp_path, config)
    copies = {"embed_tokens.weight": torch.zeros(60, 32), "lm_head.weight": torch.zeros(60, 32)}
    edit(tmp_path, lambda t: t.update(copies), num_anchors=512, max_window_layers=5)
    loaded, tensors = load_checkpoint(tmp_path)
    assert loaded == config
    assert not tensors.keys() & copies.keys()


@pytest.mark.parametrize(
    "keys",
    [
        {"block_size": None, "dspark_block_size": 7},
        {"mask_token_id": None, "dspark_noise_token_id": 59},
        {"mask_token_id": None, "ptd_token_id": 59},
        {"mask_token_id": None, "dflash_config": {"mask_token_id": 59}},
        {"target_layer_ids": None, "dspark_target_layer_ids": [0, 2]},
        {"target_layer_ids": None, "aux_hidden_state_layer_ids": [1, 3]},
        {"target_layer_ids": None, "dflash_config": {"target_layer_ids": [0, 2]}},
        {"markov_rank": None, "dspark_markov_rank": 6},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e5}},
        {"draft_vocab_size": 20, "sample_from_anchor": True},
        {"dspark_bonus_anchor": False},
        {"dflash_config": {"sample_from_anchor": True}},
        {"sliding_window_non_causal": True},
    ],
    ids=lambda keys: next(reversed(keys)),
)
def test_aliases(tmp_path: Path, keys: dict[str, Any]) -> None:
    save(tmp_path)
    edit(tmp_path, **keys)
    assert load_checkpoint(tmp_path)[0] == CONFIG


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"block_size": "7"}, "block_size must be an integer"),
        ({"mask_token_id": 60}, "mask_token_id 60"),
        ({"target_layer_ids": [2, 0]}, "must increase"),
        ({"target_layer_ids": [0, 4]}, "must lie in"),
        ({"target_layer_ids": [0, 1, 2]}, "fc.weight"),
        ({"markov_head_type": "rnn"}, "markov_head_type is 'rnn', the tensors are those of 'vanilla'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"sample_from_anchor": False, "block_size": 1}, "no token to draft"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"draft_vocab_size": None}, "markov_w2"),
        ({"num_hidden_layers": 3}, r"layers\.2\."),
        ({"num_hidden_layers": 1}, r"no place in the model: layers\.1\."),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"norm_output": True}, "norm_output = True is not supported"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"is_causal": True}, "is_causal"),
        ({"dflash_config": {"causal": True}}, r"dflash_config\.causal"),
        ({"dflash_config": {"use_swa": True}}, r"dflash_config\.use_swa"),
        ({"enable_confidence_head": False}, "confidence_head.proj"),
    ],
)
def test_wrong_config_is_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    save(tmp_path)
    edit(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("confidence_head.proj.weight"), "confidence_head.proj.weight"),
        (lambda t: t.pop("hidden_norm.weight"), "hidden_norm.weight"),
        (lambda t: t.pop("d2t"), "d2t"),
        (lambda t: t.update({"extra.bias": torch.zeros(1)}), "extra.bias"),
        (lambda t: t.update({"norm.weight": torch.zeros(31)}), "norm.weight"),
        (lambda t: t.update({"d2t": torch.full((20,), 50)}), "d2t"),
        (lambda t: t.update({"d2t": -torch.arange(20)}), "d2t"),  # every id the same
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(59, 32)}), "embed_tokens.weight"),
    ],
)
def test_wrong_tensor_is_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    save(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def rewrite(path: Path, raw: dict[str, Any], rename: Callable[[str], str] = lambda name: name) -> None:
    """The checkpoint in `path` under another config.json and other tensor names."""
    stored = {rename(name): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw))


BACKBONE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 60,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}


def test_published_dflash_layout(tmp_path: Path) -> None:
    """DFlashDraftModel: block_size counts the anchor, masks predict themselves, no num_target_layers."""
    plain = dataclasses.replace(
        CONFIG,
        markov_rank=0,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        draft_vocab_size=None,
        sample_from_anchor=False,
    )
    save(tmp_path, plain)
    own = {"mask_token_id": 59, "target_layer_ids": [0, 2]}
    rewrite(
        tmp_path,
        {**BACKBONE, "architectures": ["DFlashDraftModel"], "block_size": 8, "dflash_config": own},
    )
    assert load_checkpoint(tmp_path, num_target_layers=5)[0] == plain
    with pytest.raises(CheckpointError, match="num_target_layers"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("from_anchor", [None, False, True])
def test_published_speculators_layout(tmp_path: Path, from_anchor: bool | None) -> None:
    """The backbone nested, taps from the embedding on; without `sample_from_anchor` the anchor is silent."""
    save(tmp_path)
    raw = {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "transformer_layer_config": BACKBONE,
        "draft_vocab_size": 20,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 59,
        "markov_rank": 6,
        "enable_confidence_head": True,
        "num_target_layers": 5,
    }
    rewrite(tmp_path, raw if from_anchor is None else {**raw, "sample_from_anchor": from_anchor})
    loaded, _ = load_checkpoint(tmp_path)
    assert loaded == dataclasses.replace(
        CONFIG, block_size=8 if from_anchor else 7, sample_from_anchor=bool(from_anchor)
    )


def test_the_anchor_by_other_names(tmp_path: Path) -> None:
    """Keys of other writers say it too; the present one counts before them."""
    save(tmp_path)
    for keys in ({"dspark_bonus_anchor": True}, {"dflash_config": {"sample_from_anchor": False}}):
        edit(tmp_path, **{"dspark_bonus_anchor": None, "dflash_config": None} | keys)
        assert not cast(DSparkConfig, load_checkpoint(tmp_path)[0]).sample_from_anchor
    edit(tmp_path, sample_from_anchor=True)
    assert cast(DSparkConfig, load_checkpoint(tmp_path)[0]).sample_from_anchor


def test_what_speculators_readers_need(tmp_path: Path) -> None:
    """The key by which they know the layout, the LM head's rows of the draft vocabulary, and q/k norms."""
    config = dataclasses.replace(CONFIG, qk_norm=True)
    state = DSparkNetwork(config).state_dict()
    target = Verifier("the-target", torch.arange(60.0)[:, None].expand(60, 32), 512)
    save_checkpoint(tmp_path, config, state, DRAFT_TO_TARGET, target)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "the-target"
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert raw["transformer_layer_config"]["max_position_embeddings"] == 512
    assert (
        load_file(tmp_path / "model.safetensors")["lm_head.weight"][:, 0].tolist() == DRAFT_TO_TARGET.tolist()
    )
    assert load_checkpoint(tmp_path)[0] == config
    with pytest.raises(ConfigError, match="qk_norm"):
        save_checkpoint(tmp_path, CONFIG, DSparkNetwork(CONFIG).state_dict(), DRAFT_TO_TARGET, target)


def test_a_placeholder_is_ignored_and_a_mask_file_is_not(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda t: t.update({"mask_embedding": torch.zeros(32)}))
    assert load_checkpoint(tmp_path)[0] == CONFIG
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt"):
        load_checkpoint(tmp_path)


def test_published_eagle3_layout(tmp_path: Path) -> None:
    """LlamaForCausalLMEagle3: `midlayer`, no tap ids (inputs of layers 2, n/2 and n − 3), t2d beside d2t."""
    fields = {f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(DrafterShape)}
    fields |= {"num_hidden_layers": 1, "num_target_layers": 12, "target_layer_ids": (1, 5, 8)}
    config = AutoregressiveConfig(kind="eagle3", **fields)
    torch.manual_seed(0)
    state = AutoregressiveNetwork(config).state_dict()
    save_checkpoint(tmp_path, config, state, DRAFT_TO_TARGET, verifier(60))
    raw = {
        **BACKBONE,
        "num_hidden_layers": 1,
        "draft_vocab_size": 20,
        "architectures": ["LlamaForCausalLMEagle3"],
    }
    rewrite(tmp_path, raw, lambda name: name.replace("layers.0.", "midlayer."))
    edit(tmp_path, lambda t: t.update({"embed_tokens.weight": torch.zeros(60, 32)}))
    loaded, tensors = load_checkpoint(tmp_path, num_target_layers=12)
    assert loaded == config
    edit(tmp_path, is_causal=True)  # what its rows are anyway
    assert load_checkpoint(tmp_path, num_target_layers=12)[0] == config
    edit(tmp_path, speculators_model_type="eagle3")  # whose readers disagree about what is not written
    with pytest.raises(CheckpointError, match="norm_before_residual"):
        load_checkpoint(tmp_path, num_target_layers=12)
    assert torch.equal(tensors["lm_head.weight"], state["lm_head.weight"].bfloat16())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["mtp.0.main_proj.weight", "mtp.0.attn.wkv"], "'mtp.0.attn.wkv'"),
        (["encoder.weight"], "no tensor tells a drafter.*encoder.weight"),
    ],
)
def test_foreign_tensors_are_named(tmp_path: Path, names: list[str], message: str) -> None:
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(BACKBONE))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_an_implicit_last_tap_is_explained(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda t: t.update({"fc.weight": torch.zeros(32, 96)}))
    with pytest.raises(CheckpointError, match=r"'fc.weight' reads 3 taps, target_layer_ids names 2"):
        load_checkpoint(tmp_path)


def test_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(tmp_path)
