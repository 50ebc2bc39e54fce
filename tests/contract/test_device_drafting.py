"""Tokens of a block chosen as on a GPU against the host's: the same but for dice, and these have one law."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.models.drafters.base import DraftRequest
from dspark_ray.models.drafters.chain import DeviceChooser, HostChooser
from dspark_ray.models.noise import shared_noise
from tests.drafter_families import FAMILIES, family_config, family_dir
from tests.tiny_engine import on_path, tiny_decoder, tiny_engine

VOCAB = 11
DRAFT_VOCAB = (0, 2, 3, 7, 9, 10)
GREEDY = SamplingParams(temperature=0.0)
NOISY = SamplingParams(temperature=0.9, seed=3, top_k=5, top_p=0.95)
DRAWN = SamplingParams(temperature=1.0, top_k=4, min_p=0.02)
MIXTURES = {
    "greedy": [GREEDY] * 3,
    "noisy": [NOISY] * 3,
    "drawn": [DRAWN],
    "all": [GREEDY, NOISY, DRAWN, NOISY, GREEDY, DRAWN],
}


def draft_requests(params: list[SamplingParams], slots: int) -> list[DraftRequest]:
    rng, requests = np.random.default_rng(0), []
    for index, sampling in enumerate(params):
        noise = shared_noise(Request(f"r{index}", (1, index), sampling))
        keys = None if noise is None else noise.keys(4, slots)
        tokens = [1, index, 2, 3 + index % 2]
        requests.append(DraftRequest(tokens, [index], sampling, rng.random(slots), noise_keys=keys))
    return requests


@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_those_of_the_host(
    tmp_path: Path, family: str, mixture: str, draft_vocab: tuple[int, ...] | None
) -> None:
    """What dice decided aside: there the first slot's distribution is the same."""
    path, slots = family_dir(tmp_path, family, VOCAB, draft_vocab), family_config(family, VOCAB).block_size
    blocks = []
    for where in ("host", "device"):
        engine = tiny_engine(
            path,
            vocab_size=VOCAB,
            target=tiny_decoder(VOCAB),
            speculation={
                "num_draft_tokens": slots,
                "drafter": {"kind": FAMILIES[family].kind, "path": str(path)},
            },
        )
        assert on_path(where, engine).drafter is not None
        with torch.inference_mode():
            blocks.append(engine.drafter.propose(draft_requests(MIXTURES[mixture], slots)))
    host, device = blocks
    for row, sampling in enumerate(MIXTURES[mixture]):
        if sampling is DRAWN:
            assert host.draft_probs[row].shape == device.draft_probs[row].shape
            torch.testing.assert_close(host.draft_probs[row][0], device.draft_probs[row][0])
            allowed = device.draft_probs[row] > 0
            columns = device.token_ids[row]
            if draft_vocab is not None:
                columns = [draft_vocab.index(token) for token in columns]
            assert allowed.gather(1, torch.tensor(columns).unsqueeze(1)).all()
        else:
            assert host.token_ids[row] == device.token_ids[row]
            assert host.draft_probs[row] is device.draft_probs[row] is None
            np.testing.assert_allclose(host.confidences[row], device.confidences[row], rtol=1e-4)


@pytest.mark.parametrize("vocab_map", [None, torch.tensor([3, 4, 9, 11])])
def test_the_law_of_the_draws(vocab_map: torch.Tensor | None) -> None:
    """Two slots of many requests with the same logits: what is drawn is distributed as q says, and the second
    slot's draw knows nothing of the first's."""
    count, logits = 20_000, torch.tensor([1.0, 0.2, -0.5, 1.5])
    rng = np.random.default_rng(1)
    requests = [DraftRequest([1], [0], SamplingParams(top_k=3), rng.random(2)) for _ in range(count)]
    chooser = DeviceChooser(requests, vocab_map, 4, torch.device("cpu"))
    for _ in range(2):
        chooser.choose(logits.repeat(count, 1))
    q = chooser.draft_probs()[0]
    assert q is not None
    kept_of_four = logits.masked_fill(logits == -0.5, float("-inf"))
    torch.testing.assert_close(q[0], kept_of_four.softmax(0))
    tokens = chooser.token_ids()
    columns = tokens if vocab_map is None else torch.searchsorted(vocab_map, tokens)
    joint = torch.bincount(columns[:, 0] * 4 + columns[:, 1], minlength=16).double()
    expected = torch.outer(q[0], q[1]).reshape(-1).double() * count
    assert joint[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((joint - expected)[kept].square() / expected[kept]).sum()
    assert float(statistic) < 26.1  # χ² of 8 degrees, p = .001


def test_both_choosers_keep_the_same_books() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    requests = draft_requests([GREEDY, NOISY, NOISY], 2)
    found = []
    for kind in (HostChooser, DeviceChooser):
        chooser = kind(requests, None, VOCAB, torch.device("cpu"), wants_features=True)
        for _ in range(2):
            chooser.choose(logits.clone())
        features = chooser.features()
        assert features is not None
        found.append((chooser.token_ids().tolist(), features.tolist(), chooser.open_slots().tolist()))
    assert found[0] == found[1]
