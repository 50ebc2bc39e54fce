"""Engine drafters: the served DSpark network against the trained one; look-up; vocabulary mapping."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_ray.core.errors import CheckpointError, ConfigError
from dspark_ray.core.types import SamplingParams
from dspark_ray.models.drafters.base import ContextRows, DrafterContext, DraftRequest
from dspark_ray.models.drafters.checkpoint import load_checkpoint
from dspark_ray.models.drafters.dspark import DSparkDrafter
from dspark_ray.models.drafters.network import DSparkNetwork
from dspark_ray.models.drafters.ngram import NgramDrafter
from dspark_ray.models.targets.decoder import Decoder
from tests.tiny_engine import HIDDEN, tiny_decoder, tiny_drafter_dir

VOCAB = 11
GREEDY = SamplingParams(temperature=0.0)


def context_for(target: Decoder, path: Path | None, gamma: int = 4) -> DrafterContext:
    return DrafterContext(
        target=target,
        num_draft_tokens=gamma,
        num_slots=64,
        kv_block_size=4,
        max_positions=64,
        path=str(path),
        temperatures=None,
        ngram_min=1,
        ngram_max=3,
    )


def reference_block(
    path: Path, target: Decoder, taps: torch.Tensor, anchor: int
) -> tuple[list[int], np.ndarray]:
    """Greedy block and confidence logits of one request by the training network, dense."""
    config, weights = load_checkpoint(path)
    d2t = weights.pop("d2t", None)
    network = DSparkNetwork(config).eval()
    network.load_state_dict({name: t.float() for name, t in weights.items()})
    size, length = config.block_size, len(taps)
    with torch.inference_mode():
        context = network.context_kv(network.context(taps.unsqueeze(0)), torch.arange(length).unsqueeze(0))
        ids = torch.tensor([anchor] + [config.mask_token_id] * (size - 1))
        positions = torch.arange(length, length + size).unsqueeze(0)
        visible = torch.ones((1, size, length + size), dtype=torch.bool)
        hidden = network(target.embedding[ids].unsqueeze(0), positions, context, visible)[0]
        head = target.head_weight
        mapping = torch.arange(len(head)) if d2t is None else torch.arange(len(d2t)) + d2t
        previous, tokens, logits = torch.tensor([anchor]), [], []
        for slot in range(size):
            markov = network.markov_embedding(previous)  # the vanilla head's features are its embeddings
            chosen = network.logits(hidden[slot : slot + 1], head[mapping], markov).argmax(-1)
            logits.append(float(network.confidence_logit(hidden[slot : slot + 1], markov)))
            previous = mapping[chosen]
            tokens.append(int(previous))
    return tokens, np.array(logits, dtype=np.float32)


@pytest.mark.parametrize("draft_vocab", [None, (0, 2, 3, 7, 9, 10)])
def test_served_network_is_the_trained_one(tmp_path: Path, draft_vocab: tuple[int, ...] | None) -> None:
    path = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=draft_vocab)
    target = tiny_decoder(VOCAB)
    drafter = DSparkDrafter(context_for(target, path))
    generator = torch.Generator().manual_seed(3)
    histories = [[1, 4, 2, 8, 5, 7], [3, 3], [9, 1, 2, 3, 4, 5, 6, 7, 8]]
    blocks = [[5, 2], [0], [7, 1, 11]]
    requests, expected = [], []
    for history, table in zip(histories, blocks, strict=True):
        length = len(history) - 1
        taps = torch.randn(length, 2 * HIDDEN, generator=generator)
        positions = torch.arange(length)
        slots = torch.tensor(table)[positions // 4] * 4 + positions % 4
        with torch.inference_mode():
            drafter.commit(ContextRows(taps, positions, slots, torch.tensor(history[1:])))
        requests.append(DraftRequest(history, table, GREEDY, np.zeros(4)))
        expected.append(reference_block(path, target, taps, history[-1]))
    with torch.inference_mode():
        block = drafter.propose(requests)
    assert block.token_ids == [tokens for tokens, _ in expected]
    assert block.confidence_logits is not None
    np.testing.assert_allclose(block.confidence_logits, np.stack([c for _, c in expected]), atol=2e-3)


def test_sampled_tokens_come_from_the_distributions_handed_on(tmp_path: Path) -> None:
    """q is what was sampled: at temperature 1 the reported rows give the drawn tokens their uniforms."""
    path = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=(0, 2, 3, 7, 9, 10))
    drafter = DSparkDrafter(context_for(tiny_decoder(VOCAB), path))
    uniforms = np.array([0.05, 0.35, 0.65, 0.95])
    with torch.inference_mode():
        block = drafter.propose([DraftRequest([4], [0], SamplingParams(temperature=1.0), uniforms)])
    probs = block.draft_probs[0]
    assert probs is not None
    assert probs.shape == (4, 6)
    assert drafter.vocab_map is not None
    drawn = [
        int(drafter.vocab_map[int((row.cumsum(0) > u).nonzero()[0])])
        for row, u in zip(probs, uniforms, strict=True)
    ]
    assert block.token_ids[0] == drawn


def test_gamma_below_the_block_size_is_a_prefix(tmp_path: Path) -> None:
    path = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=None)
    target = tiny_decoder(VOCAB)
    blocks = []
    for gamma in (2, 4):
        drafter = DSparkDrafter(context_for(target, path, gamma))
        with torch.inference_mode():
            blocks.append(drafter.propose([DraftRequest([4], [0], GREEDY, np.zeros(gamma))]).token_ids[0])
    assert len(blocks[0]) == 2
    assert blocks[0] == blocks[1][:2]


def test_a_drafter_for_another_target_is_refused(tmp_path: Path) -> None:
    path = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=None)
    with pytest.raises(CheckpointError, match="vocab_size"):
        DSparkDrafter(context_for(tiny_decoder(VOCAB + 1), path))
    with pytest.raises(ConfigError, match="block size"):
        DSparkDrafter(context_for(tiny_decoder(VOCAB), path, gamma=5))


def test_ngram_continues_the_latest_occurrence() -> None:
    drafter = NgramDrafter(context_for(tiny_decoder(VOCAB), None))
    repeated = DraftRequest([1, 2, 3, 9, 1, 2, 3, 4, 5, 1, 2, 3], [0], GREEDY, np.zeros(4))
    unseen = DraftRequest([1, 2, 3, 4, 5, 6], [0], GREEDY, np.zeros(4))
    block = drafter.propose([repeated, unseen])
    assert block.token_ids == [[4, 5, 1, 2], []]
    assert (block.confidences[1] == 0).all()
