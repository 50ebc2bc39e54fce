"""A decoder over several ranks against the same decoder whole: logits, taps, weights, and what it reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_kernels.attention import PagedBatch
from safetensors.torch import load_file

from dspark_ray.core.errors import CheckpointError, ConfigError, RankError
from dspark_ray.models.collective import Group
from dspark_ray.models.targets.decoder import Decoder, load_target
from dspark_ray.models.targets.shard import fitting_sizes
from dspark_ray.models.weights import Part, StoredTensor
from tests.contract.test_targets import edit_weights
from tests.tiny import tiny_model_dir
from tests.tiny_engine import skip_without_invariant_kernels
from tests.tiny_ranks import on_every_rank, ranks

TOKENS = torch.randint(0, 128, (29,), generator=torch.Generator().manual_seed(4))
LOGIT_ROWS = torch.tensor([0, 3, 28])
TAPS = (-1, 0, 2)
NINE_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}  # as SmolLM2-135M has


def forward(target: Decoder, tokens: torch.Tensor = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits of some rows, taps of all) of one prompt in blocks of 4."""
    count = len(tokens)
    positions = torch.arange(count)
    batch = PagedBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        kv_len=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(8, dtype=torch.int32).flip(0).unsqueeze(0),
        block_size=4,
        max_query=count,
        max_kv=count,
    )
    slots = (7 - positions // 4) * 4 + positions % 4
    with torch.inference_mode():
        rows = LOGIT_ROWS.clamp(max=count - 1)
        out = target.forward(tokens, positions, target.new_kv(32), slots, batch, TAPS, logit_rows=rows)
    assert out.logits is not None
    return out.logits, out.taps


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the order of additions; in bf16 that rounds each rank's part."""
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert (found - expected).abs().mean() < 0.02 * expected.abs().mean()


def check_shards(
    model_dir: Path, count: int, dtype: torch.dtype = torch.float32, quantization: str = "none"
) -> None:
    """The same logits on rank 0, and the same taps on every rank, as of the whole model."""
    logits, taps = forward(load_target(model_dir, dtype, 64, quantization))
    with ranks(count) as groups:
        found = on_every_rank(groups, lambda g: forward(load_target(model_dir, dtype, 64, quantization, g)))
    check_close(found[0][0], logits)
    for _, kept in found:
        check_close(kept, taps)
        assert torch.equal(kept, found[0][1])  # ranks go on from the same bits


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2, a vocabulary that does not divide": ("qwen2", {"vocab_size": 129}),
    "sliding window": ("mistral", {"sliding_window": 9}),
}


@pytest.mark.parametrize("count", [2, 4])  # 4: each of the two KV heads lies on two ranks
@pytest.mark.parametrize("name", MODELS)
def test_ranks_say_what_the_whole_model_says(tmp_path: Path, name: str, count: int) -> None:
    architecture, fields = MODELS[name]
    check_shards(tiny_model_dir(tmp_path, architecture, **fields), count)


def test_three_ranks_with_three_kv_heads(tmp_path: Path) -> None:
    check_shards(tiny_model_dir(tmp_path, "llama", vocab_size=128, **NINE_HEADS), 3)


@pytest.mark.parametrize("bias", [False, True])
def test_int8_has_the_scales_of_the_whole_rows(tmp_path: Path, bias: bool) -> None:
    check_shards(tiny_model_dir(tmp_path, attention_bias=bias, mlp_bias=bias), 2, quantization="int8")


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bf16(tmp_path: Path, quantization: str) -> None:
    check_shards(tiny_model_dir(tmp_path), 2, torch.bfloat16, quantization)


def test_more_ranks_than_tokens_of_a_vocabulary(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, vocab_size=5)
    tokens = torch.tensor([3, 4, 0, 1, 2])
    logits, _ = forward(load_target(model_dir, torch.float32, 64), tokens)
    with ranks(4) as groups:  # two tokens each, and the last rank none
        found = on_every_rank(
            groups, lambda g: forward(load_target(model_dir, torch.float32, 64, "none", g), tokens)
        )
    torch.testing.assert_close(found[0][0], logits, atol=2e-4, rtol=1e-4)


def test_two_ranks_are_as_batch_invariant_as_one_and_three_are_not(tmp_path: Path) -> None:
    skip_without_invariant_kernels()
    fields = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32}
    model_dir = tiny_model_dir(tmp_path, "llama", **fields)

    def rows(group: Group) -> tuple[bool, torch.Tensor, torch.Tensor]:
        target = load_target(model_dir, torch.bfloat16, 64, "none", group)
        alone, _ = forward(target, TOKENS[:3])
        among, _ = forward(target)
        return target.is_batch_invariant, alone[0], among[0]

    with ranks(2) as groups:
        invariant, alone, among = on_every_rank(groups, rows)[0]
    assert invariant
    assert torch.equal(alone, among)
    with ranks(3) as groups:
        assert not any(invariant for invariant, _, _ in on_every_rank(groups, rows))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Part | None, int]]:
    """(tensor, part, bytes) of everything that is read from safetensors files."""
    seen: list[tuple[str, Part | None, int]] = []
    read: Callable[..., torch.Tensor] = StoredTensor.read

    def noted(self: StoredTensor, part: Part | None = None) -> torch.Tensor:
        tensor = read(self, part)
        seen.append((self._name, part, tensor.numel() * tensor.element_size()))
        return tensor

    monkeypatch.setattr(StoredTensor, "read", noted)
    return seen


def test_a_rank_reads_its_own_part_of_each_matrix(
    tmp_path: Path, reads: list[tuple[str, Part | None, int]]
) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama", num_key_value_heads=4)
    stored = load_file(model_dir / "model.safetensors")
    with ranks(4) as groups:
        on_every_rank(groups[:1], lambda g: load_target(model_dir, torch.float32, 64, "none", g))
    matrices = {name: tensor for name, tensor in stored.items() if tensor.dim() == 2}
    assert {name for name, part, _ in reads if part is not None} == matrices.keys()
    for name, part, num_bytes in reads:
        share = 4 if name in matrices else 1  # norms are whole on every rank
        assert num_bytes * share == stored[name].numel() * 4, (name, part)


def test_parts_add_up_to_the_whole(tmp_path: Path, reads: list[tuple[str, Part | None, int]]) -> None:
    model_dir = tiny_model_dir(tmp_path, "qwen2", vocab_size=130)
    stored = load_file(model_dir / "model.safetensors")
    with ranks(2) as groups:
        on_every_rank(groups, lambda g: load_target(model_dir, torch.float32, 64, "none", g))
    covered: dict[str, torch.Tensor] = {name: torch.zeros_like(t) for name, t in stored.items()}
    for name, part, _ in reads:
        if part is not None:
            covered[name].narrow(part.dim, part.start, part.stop - part.start).add_(1)
    for name, counts in covered.items():
        if stored[name].dim() == 2 or "bias" in name:
            assert torch.equal(counts, torch.ones_like(counts)), name


def test_a_drafters_rank_reads_whole_matrices_when_asked(
    tmp_path: Path, reads: list[tuple[str, Part | None, int]]
) -> None:
    model_dir = tiny_model_dir(tmp_path)
    stored = load_file(model_dir / "model.safetensors")
    with ranks(2) as groups:
        target = on_every_rank(groups, lambda g: load_target(model_dir, torch.float32, 64, "none", g))[0]
    assert not [name for name, part, _ in reads if part is None and stored[name].dim() == 2]
    assert torch.equal(target.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(target.head_weight, stored["lm_head.weight"])


def test_numbers_of_ranks_that_fit_are_named(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama", **NINE_HEADS)
    with ranks(2) as groups, pytest.raises(ConfigError, match=r"size 2 does not fit 9 .* one of 1, 3"):
        load_target(model_dir, torch.float32, 64, "none", groups[0])


def test_fitting_sizes() -> None:
    assert fitting_sizes(9, 3, 1536) == [1, 3]  # SmolLM2-135M: 9 ranks do not divide 1536
    assert fitting_sizes(4, 2, 96) == [1, 2, 4]
    assert fitting_sizes(32, 8, 12288) == [1, 2, 4, 8, 16, 32]
    assert fitting_sizes(6, 4, 96) == [1, 2]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path)
    edit_weights(model_dir, **{"model.layers.1.mlp.down_proj.weight": torch.zeros(64, 95)})
    with ranks(2) as groups, pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.*\[64, 95\]"):
        load_target(model_dir, torch.float32, 64, "none", groups[0])


def test_a_rank_that_leaves_ends_the_others_operations() -> None:
    """At once: long before the time-out, whose message is another."""
    with ranks(3) as groups:
        groups[2].close()
        for group in groups[:2]:
            with pytest.raises(RankError, match="cannot reach") as raised:
                group.sum(torch.ones(4))
            assert "Timed out" not in str(raised.value)
        with pytest.raises(RankError, match="has left"):
            groups[2].sum(torch.ones(4))


def test_a_rank_that_is_late_is_not_waited_for() -> None:
    with ranks(2, timeout_s=0.2) as groups, pytest.raises(RankError, match="cannot reach"):
        groups[0].sum(torch.ones(4))
