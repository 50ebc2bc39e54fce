"""Every drafter family: the served network is the trained one, blocks see what they may, the law is kept."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark_ray.core.errors import CheckpointError
from dspark_ray.core.types import SamplingParams
from dspark_ray.engine.build import DRAFTERS  # with every drafter registered
from dspark_ray.models.drafters.base import ContextRows, DraftRequest
from dspark_ray.models.drafters.checkpoint import load_checkpoint, save_checkpoint
from dspark_ray.models.drafters.config_json import Verifier
from dspark_ray.models.drafters.families import new_network
from dspark_ray.models.drafters.heads import MARKOV_HEADS
from dspark_ray.training.anchors import pack
from dspark_ray.training.cache import CachedSequence
from dspark_ray.training.forward import run_blocks, share_weights
from tests.contract.test_drafters import context_for
from tests.drafter_families import FAMILIES, family_config, family_dir, family_network, verifier
from tests.tiny_engine import HIDDEN, request, run, tiny_decoder, tiny_engine

VOCAB = 11
DRAFT_VOCAB = (0, 2, 3, 7, 9, 10)
ANCHOR = 25  # far enough for a window of 16 to hide something

families = pytest.mark.parametrize("family", FAMILIES)


def test_every_trained_kind_has_a_family() -> None:
    assert {family.kind for family in FAMILIES.values()} == set(DRAFTERS.names()) - {"ngram"}


def sequence(num_taps: int, length: int = 34, seed: int = 1) -> CachedSequence:
    generator = torch.Generator().manual_seed(seed)
    return CachedSequence(
        tokens=torch.randint(1, VOCAB, (length,), generator=generator),
        prompt_length=3,
        taps=torch.randn(length, num_taps * HIDDEN, generator=generator).bfloat16(),
        top_ids=torch.zeros(length - 3, 1, dtype=torch.int64),
        top_probs=torch.ones(length - 3, 1),
        temperature=0.0,
    )


def trained_logits(path: Path, text: CachedSequence, anchors: list[int]) -> Tensor:
    """Teacher-forced logits [blocks, γ, Vd] of the training network, over the checkpoint's own row order."""
    config, weights = load_checkpoint(path)
    deltas = weights.pop("d2t", torch.zeros(config.output_size, dtype=torch.int64))
    network = new_network(config).requires_grad_(False)
    network.load_state_dict({name: t.float() for name, t in weights.items()})
    target = tiny_decoder(VOCAB)
    draft_to_target = torch.arange(config.output_size) + deltas
    shared = share_weights(target.embedding, target.head_weight, draft_to_target, bf16=False)
    batch = pack([text], [torch.tensor(anchors)], config.block_size)
    return run_blocks(network, batch, shared).logits.view(len(anchors), config.block_size, -1)


@families
@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB])
def test_served_network_is_the_trained_one(
    tmp_path: Path, family: str, draft_vocab: tuple[int, ...] | None
) -> None:
    """The training network, teacher-forced with what was drafted, gives those tokens as its argmax and, at
    temperature 1, the distributions that they were drawn from."""
    path = family_dir(tmp_path, family, VOCAB, draft_vocab)
    gamma = family_config(family, VOCAB).block_size
    drafter = DRAFTERS.get(FAMILIES[family].kind)(context_for(tiny_decoder(VOCAB), path, gamma))
    text = sequence(len(drafter.taps))
    tables = [[5, 2, 0, 9, 12, 1, 8], [7, 10, 11, 3, 4, 6]]
    anchors = [ANCHOR, 22]
    history = text.tokens.tolist()
    requests = []
    with torch.inference_mode():
        for table, anchor, sampling in zip(tables, anchors, (0.0, 1.0), strict=True):
            positions = torch.arange(anchor)
            slots = torch.tensor(table)[positions // 4] * 4 + positions % 4
            taps = text.taps[:anchor].float()
            drafter.commit(ContextRows(taps, positions, slots, text.tokens[1 : anchor + 1]))
            uniforms = np.random.default_rng(anchor).random(gamma)
            params = SamplingParams(temperature=sampling)
            requests.append(DraftRequest(history[: anchor + 1], table, params, uniforms))
        block = drafter.propose(requests)
        shorter = drafter.propose([dataclasses.replace(r, uniforms=r.uniforms[:1]) for r in requests])
    mapping = torch.arange(VOCAB) if drafter.vocab_map is None else drafter.vocab_map
    for row, anchor in enumerate(anchors):
        tokens = text.tokens.clone()
        tokens[anchor + 1 : anchor + 1 + gamma] = torch.tensor(block.token_ids[row])
        logits = trained_logits(path, dataclasses.replace(text, tokens=tokens), [anchor])[0]
        probs = block.draft_probs[row]
        if probs is None:
            assert mapping[logits.argmax(-1)].tolist() == block.token_ids[row]
        else:
            torch.testing.assert_close(probs, logits.softmax(-1), atol=2e-4, rtol=2e-3)
        if FAMILIES[family].kind in ("eagle3", "mtp"):  # in a parallel block, slots see the masks after them
            assert shorter.token_ids[row] == block.token_ids[row][:1]


@families
def test_nothing_at_or_after_the_anchor_leaks(family: str) -> None:
    """Taps from the anchor on move nothing; a later token reaches only the slots after it."""
    config = family_config(family, VOCAB)
    network = family_network(config)
    text = sequence(len(config.target_layer_ids))
    target = tiny_decoder(VOCAB)
    shared = share_weights(target.embedding, target.head_weight, torch.arange(VOCAB), bf16=False)

    def logits(text: CachedSequence) -> Tensor:
        batch = pack([text], [torch.tensor([ANCHOR])], config.block_size)
        return run_blocks(network, batch, shared).logits

    plain = logits(text)
    for position in range(len(text.tokens)):
        taps = text.taps.clone()
        taps[position] += 1.0
        moved = (logits(dataclasses.replace(text, taps=taps)) != plain).any(-1)
        seen = config.context_start(ANCHOR) <= position < ANCHOR
        assert moved.tolist() == [seen] * config.block_size, position
    for offset in range(config.block_size + 1):
        tokens = text.tokens.clone()
        tokens[ANCHOR + offset] = tokens[ANCHOR + offset] % (VOCAB - 1) + 1
        moved = (logits(dataclasses.replace(text, tokens=tokens)) != plain).any(-1)
        assert not moved[:offset].any(), offset
        assert moved.any() == (offset == 0 or reads_drafts(family)) or offset == config.block_size


def reads_drafts(family: str) -> bool:
    """Whether a slot's logits depend on the drafted tokens before it."""
    return FAMILIES[family].kind in ("dspark", "eagle3")


@families
@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_greedy_texts_are_the_targets(tmp_path: Path, family: str, mode: str) -> None:
    vocab_size = 5  # small enough that random drafters are right now and then
    path = family_dir(tmp_path, family, vocab_size, (0, 1, 3, 4))
    gamma = family_config(family, vocab_size).block_size
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(vocab_size, size=length).tolist()) for length in range(1, 33, 2)]
    requests = [request(str(i), p, max_tokens=24, temperature=0.0) for i, p in enumerate(prompts)]
    plain = tiny_engine(None, vocab_size=vocab_size, speculation={"mode": "off"})
    speculation = {"mode": mode, "num_draft_tokens": gamma, "drafter": drafter_section(family, path)}
    engine = tiny_engine(path, vocab_size=vocab_size, speculation=speculation)
    for few in (
        requests[i : i + 4] for i in range(0, len(requests), 4)
    ):  # at 16 at once the steep table leaves no budget
        assert run(engine, few) == run(plain, few)
    counters = engine.counters
    assert counters.drafted_tokens > 0
    assert counters.accepted_tokens > 0
    if mode == "adaptive":
        assert counters.trimmed_tokens > 0 or gamma == 1  # at this load one token is always worth it


@pytest.mark.parametrize("family", ["dspark", "eagle3"])
def test_chances_are_learnt_while_serving(tmp_path: Path, family: str) -> None:
    """Whole drafts are verified until enough is known, then one step in sixteen; fits are of them."""
    path = family_dir(tmp_path, family, 5, (0, 1, 3, 4))
    speculation = {
        "mode": "threshold",
        "threshold": 0.999,  # but for exploration, nothing would ever be verified
        "drafter": drafter_section(family, path),
        "confidence": "online",
    }
    engine = tiny_engine(path, vocab_size=5, speculation=speculation)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(5, size=9).tolist()) for _ in range(12)]
    run(engine, [request(str(i), p, max_tokens=60, temperature=0.0) for i, p in enumerate(prompts)])
    model = engine.drafter._online if family == "dspark" else engine.drafter._confidence
    learnt = model._estimator._models["greedy"].num_drafts
    assert learnt > model._estimator.settings.min_drafts
    assert learnt < engine.counters.drafts / 2
    assert set(model._estimator._models) == {"greedy"}


def drafter_section(family: str, path: Path) -> dict[str, str]:
    return {"kind": FAMILIES[family].kind, "path": str(path)}


def test_a_drafter_of_another_kind_is_named(tmp_path: Path) -> None:
    path = family_dir(tmp_path, "dflash", VOCAB)
    for kind in ("dspark", "eagle3"):
        with pytest.raises(CheckpointError, match="kind 'dflash', not"):
            DRAFTERS.get(kind)(context_for(tiny_decoder(VOCAB), path))


def test_gated_and_recurrent_heads_by_hand() -> None:
    """u_k written out with numpy: σ(W [h; e]) ⊙ e, and the recurrence with its three projections."""

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1.0 / (1.0 + np.exp(-x))

    rng = np.random.default_rng(0)
    hidden, embeddings = rng.normal(size=(3, 6)), rng.normal(size=(3, 4))
    rows = list(zip(hidden, embeddings, strict=True))
    as_tensor = (torch.tensor(embeddings).float(), torch.tensor(hidden).float())
    gated = MARKOV_HEADS.get("gated")(9, 5, 4, 6)
    weight, bias = (p.detach().numpy().astype(np.float64) for p in gated.gate_proj.parameters())
    expected = [sigmoid(weight @ np.concatenate([h, e]) + bias) * e for h, e in rows]
    np.testing.assert_allclose(gated.unroll(*as_tensor).detach(), expected, atol=1e-5)

    recurrent = MARKOV_HEADS.get("rnn")(9, 5, 4, 6)
    weight, bias = (p.detach().numpy().astype(np.float64) for p in recurrent.joint_proj.parameters())
    state, expected = np.zeros(4), []
    for h, e in rows:
        gate, candidate, output = np.split(weight @ np.concatenate([state, e, h]) + bias, 3)
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        expected.append(np.tanh(output))
    np.testing.assert_allclose(recurrent.unroll(*as_tensor).detach(), expected, atol=1e-5)


@families
@pytest.mark.parametrize("named", [None, verifier(VOCAB)], ids=["native", "speculators"])
@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB])
def test_checkpoints_come_back_as_they_were(
    tmp_path: Path, family: str, named: Verifier | None, draft_vocab: tuple[int, ...] | None
) -> None:
    config = family_config(family, VOCAB, draft_vocab and len(draft_vocab))
    state = family_network(config).state_dict()
    mapping = None if draft_vocab is None else torch.tensor(draft_vocab)
    save_checkpoint(tmp_path, config, state, mapping, named)
    loaded, tensors = load_checkpoint(tmp_path)
    assert loaded == config
    assert tensors.keys() - {"d2t"} == state.keys()
    assert all(torch.equal(tensors[name], state[name].bfloat16()) for name in state)
    if draft_vocab is not None:
        assert (tensors["d2t"] + torch.arange(len(draft_vocab))).tolist() == list(draft_vocab)
