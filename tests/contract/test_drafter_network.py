"""The DSpark network: what a block may depend on, packing, heads; with and without q/k norms."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.drafters.network import DSparkConfig, DSparkNetwork
from dspark_ray.training.anchors import pack
from dspark_ray.training.cache import CachedSequence
from dspark_ray.training.forward import BlockOutputs, run_blocks, share_weights

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
    block_size=4,
    draft_vocab_size=20,
    markov_rank=6,
    qk_norm=False,
)
ANCHOR = 9


@pytest.fixture(params=[False, True], ids=["llama", "qwen3"])
def network(request: pytest.FixtureRequest) -> DSparkNetwork:
    torch.manual_seed(0)
    network = DSparkNetwork(dataclasses.replace(CONFIG, qk_norm=request.param)).requires_grad_(False)
    for parameter in network.parameters():
        parameter.copy_((1.0 if parameter.ndim == 1 else 0.0) + 0.2 * torch.randn(parameter.shape))
    return network


@pytest.fixture
def sequence() -> CachedSequence:
    torch.manual_seed(1)
    return CachedSequence(
        tokens=torch.randint(0, 59, (20,)),
        prompt_length=6,
        taps=torch.randn(20, 64).bfloat16(),
        top_ids=torch.randint(0, 60, (14, 3)),
        top_probs=torch.full((14, 3), 0.3),
        temperature=0.0,
    )


def draft(network: DSparkNetwork, sequence: CachedSequence, anchors: list[int]) -> BlockOutputs:
    torch.manual_seed(2)
    shared = share_weights(torch.randn(60, 32), torch.randn(60, 32), torch.arange(0, 60, 3), bf16=False)
    return run_blocks(network, pack([sequence], [torch.tensor(anchors)], network.config.block_size), shared)


def perturbed(
    sequence: CachedSequence, *, taps_at: int | None = None, token_at: int | None = None
) -> CachedSequence:
    taps, tokens = sequence.taps.clone(), sequence.tokens.clone()
    if taps_at is not None:
        taps[taps_at] += 1.0
    if token_at is not None:
        tokens[token_at] = (tokens[token_at] + 1) % 59
    return dataclasses.replace(sequence, taps=taps, tokens=tokens)


@pytest.mark.parametrize("position", [ANCHOR, ANCHOR + 1, ANCHOR + 3, 19])
def test_taps_at_and_after_the_anchor_do_not_leak(
    network: DSparkNetwork, sequence: CachedSequence, position: int
) -> None:
    logits = draft(network, sequence, [ANCHOR]).logits
    assert torch.equal(draft(network, perturbed(sequence, taps_at=position), [ANCHOR]).logits, logits)


@pytest.mark.parametrize("position", [0, 5, ANCHOR - 1])
def test_taps_before_the_anchor_matter(
    network: DSparkNetwork, sequence: CachedSequence, position: int
) -> None:
    logits = draft(network, sequence, [ANCHOR]).logits
    changed = draft(network, perturbed(sequence, taps_at=position), [ANCHOR]).logits
    assert (changed - logits).abs().amin(-1).max() > 0
    assert (changed != logits).any(-1).all()  # every slot sees the whole context


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4])
def test_a_token_reaches_only_the_slots_after_it(
    network: DSparkNetwork, sequence: CachedSequence, offset: int
) -> None:
    """The anchor feeds every slot. A later token feeds one slot, through the Markov head: the next one."""
    logits = draft(network, sequence, [ANCHOR]).logits
    changed = draft(network, perturbed(sequence, token_at=ANCHOR + offset), [ANCHOR]).logits
    moved = (changed != logits).any(-1).tolist()
    assert moved == ([True] * 4 if offset == 0 else [slot == offset for slot in range(4)])


def test_packed_blocks_equal_single_blocks(network: DSparkNetwork, sequence: CachedSequence) -> None:
    anchors = [6, 7, 8, 9, 10, 11, 12, 13, 14, 15]  # two groups
    packed = draft(network, sequence, anchors)
    single = [draft(network, sequence, [anchor]) for anchor in anchors]
    torch.testing.assert_close(packed.logits, torch.cat([out.logits for out in single]))
    assert packed.confidence_logit is not None
    confidences = [out.confidence_logit for out in single if out.confidence_logit is not None]
    torch.testing.assert_close(packed.confidence_logit, torch.cat(confidences))


def test_context_after_the_anchor_may_be_absent(network: DSparkNetwork, sequence: CachedSequence) -> None:
    """Training sees the whole sequence's context, masked; inference only what exists: the same logits."""
    taps = sequence.taps[:ANCHOR].float()[None]
    context = network.context_kv(network.context(taps), torch.arange(ANCHOR)[None])
    torch.manual_seed(2)
    embedding = torch.randn(60, 32)
    ids = torch.tensor([[int(sequence.tokens[ANCHOR]), 59, 59, 59]])
    positions = torch.arange(ANCHOR, ANCHOR + 4)[None]
    hidden = network(embedding[ids], positions, context, torch.ones(1, 4, ANCHOR + 4, dtype=torch.bool))
    head = torch.randn(60, 32)[::3]
    markov = network.markov_embedding(sequence.tokens[None, ANCHOR : ANCHOR + 4])
    torch.testing.assert_close(
        network.logits(hidden, head, markov)[0], draft(network, sequence, [ANCHOR]).logits
    )


def test_heads_by_hand(network: DSparkNetwork) -> None:
    hidden, previous, head = torch.randn(3, 32), torch.tensor([4, 5, 6]), torch.randn(20, 32)
    markov = network.markov_embedding(previous)
    assert markov is not None
    assert network.markov_head is not None
    assert network.confidence_head is not None
    w1, w2 = network.markov_head.markov_w1.weight, network.markov_head.markov_w2.weight
    for row in range(3):
        bias = w2 @ w1[previous[row]]
        torch.testing.assert_close(network.logits(hidden, head, markov)[row], head @ hidden[row] + bias)
        joined = torch.cat((hidden[row], w1[previous[row]]))
        weight, offset = network.confidence_head.proj.weight[0], network.confidence_head.proj.bias[0]
        expected = (weight * joined).sum() + offset
        torch.testing.assert_close(network.confidence_logit(hidden, markov)[row], expected)


def test_gradients_reach_every_parameter(network: DSparkNetwork, sequence: CachedSequence) -> None:
    network.requires_grad_(True)
    out = draft(network, sequence, [6, 9, 12])
    assert out.confidence_logit is not None
    (out.logits.square().sum() + out.confidence_logit.sum()).backward()
    silent = [name for name, p in network.named_parameters() if p.grad is None or not _any(p.grad)]
    assert not silent


def _any(gradient: Tensor) -> bool:
    return bool((gradient != 0).any())


def test_without_heads() -> None:
    config = dataclasses.replace(
        CONFIG,
        markov_rank=0,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        draft_vocab_size=None,
    )
    names = DSparkNetwork(config).state_dict().keys()
    assert not [name for name in names if "markov" in name or "confidence" in name]
    assert config.output_size == 60


def test_unknown_rope_scaling_is_refused() -> None:
    config = dataclasses.replace(CONFIG, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ConfigError, match="yarn"):
        DSparkNetwork(config)
