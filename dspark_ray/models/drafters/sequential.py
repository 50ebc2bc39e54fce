"""The heads over a block's hidden states at inference: LM head rows, sequential head, confidence head.

What they are is in `heads.py`. Who chooses a slot's tokens (`chain.py`) depends on the request: one op for
all slots of plain greedy ones; the host, slot by slot, for those with an adjuster; and for the others the
device they are on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from dspark_kernels.choose import argmax, markov_chain, markov_logits
from dspark_kernels.linear import PackedLinear
from torch import Tensor

from dspark_ray.models.drafters.base import DeviceRequests, DraftRequest
from dspark_ray.models.drafters.chain import Chooser, DeviceChooser, HostChooser, SlotChooser
from dspark_ray.models.drafters.fused import Weights, draft_vocabulary
from dspark_ray.models.drafters.heads import MARKOV_HEADS, MarkovHead
from dspark_ray.models.drafters.network import DSparkConfig
from dspark_ray.models.targets.decoder import Decoder
from dspark_ray.models.transfer import to_device

ChooserType = type[HostChooser] | type[DeviceChooser]


@dataclass(frozen=True, slots=True)
class Chain:
    """What the sequential head chose."""

    token_ids: Tensor  # [R, n] target ids
    previous: Tensor  # [R, n] the token before each
    open_slots: (
        Tensor  # [R, n] whether any token that can be drafted is allowed there, on the host (chain.py)
    )
    draft_probs: Sequence[Tensor | None]  # R × [n, Vd]; None: one-hot
    features: Tensor | None = None  # [R, n, 2] of the draft distributions, where they are learnt from


def one_hot(token_ids: Tensor, previous: Tensor) -> Chain:
    """Of likeliest tokens."""
    return Chain(token_ids, previous, torch.ones(token_ids.shape, dtype=torch.bool), [None] * len(token_ids))


@dataclass(frozen=True, slots=True)
class ConfidenceVector:
    """The confidence head as a dot product, in fp32."""

    hidden: Tensor  # [H]
    markov: Tensor | None  # [r]
    bias: Tensor  # []


class SequentialHeads:
    """LM head rows, sequential head and confidence head, in the target's dtype."""

    def __init__(self, config: DSparkConfig, weights: Weights, target: Decoder) -> None:
        self.vocab_map, order = draft_vocabulary(config, weights)
        rows = target.head_weight if self.vocab_map is None else target.head_weight[self.vocab_map]
        self.head = PackedLinear(rows, None)  # [Vd, H] rows of the target's LM head
        self.markov: MarkovHead | None = None
        self.w1 = self.w2 = None  # [V, r], [r, Vd]
        if config.markov_rank:
            self.markov = _markov_head(config, weights, order)
            self.w1 = self.markov.markov_w1.weight.data
            # One copy of W2, in the layout of the compiled chain; the module looks at it transposed.
            self.w2 = self.markov.markov_w2.weight.data.t().contiguous()
            self.markov.markov_w2.weight.data = self.w2.t()
        self.confidence = _confidence_vector(config, weights) if config.enable_confidence_head else None
        self.has_compiled_chain = config.markov_head_type == "vanilla"
        self.chooses_on_device = True  # False: slot by slot on the host, as with rules; tests compare

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """w·[h_k; W1[x_{k−1}]] + b. hidden [R, n, H], previous [R, n] → fp32 [R, n]; None without it."""
        head = self.confidence
        if head is None:
            return None
        logits = hidden.float() @ head.hidden
        if head.markov is not None and self.w1 is not None:
            logits = logits + self.w1[previous].float() @ head.markov
        return logits + head.bias

    def draft(
        self, base: Tensor, hidden: Tensor, requests: Sequence[DraftRequest], *, wants_features: bool
    ) -> Chain:
        """Every slot's tokens, left to right. base [R, n, Vd] logits of the LM head; hidden [R, n, H]"""
        anchors = to_device(torch.tensor([r.token_ids[-1] for r in requests]), base.device)
        groups: dict[ChooserType | None, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self.chooser_of(request, wants_features), []).append(index)
        if len(groups) == 1:
            (chooser,) = groups
            return self._chain(base, hidden, anchors, requests, chooser, wants_features)
        shape, device = base.shape[:2], base.device
        tokens, previous = torch.empty((2, *shape), dtype=torch.int64, device=device).unbind(0)
        features = torch.empty((*shape, 2), device=device) if wants_features else None
        open_slots = torch.ones(shape, dtype=torch.bool)
        draft_probs: list[Tensor | None] = [None] * len(requests)
        for chooser, members in groups.items():
            rows, own = to_device(torch.tensor(members), device), [requests[i] for i in members]
            chain = self._chain(base[rows], hidden[rows], anchors[rows], own, chooser, wants_features)
            tokens[rows], previous[rows] = to_device(chain.token_ids, device), chain.previous
            open_slots[members] = chain.open_slots
            if features is not None and chain.features is not None:
                features[rows] = chain.features
            for row, probs in zip(members, chain.draft_probs, strict=True):
                draft_probs[row] = probs
        return Chain(tokens, previous, open_slots, draft_probs, features)

    def draft_on_device(
        self, base: Tensor, hidden: Tensor, requests: DeviceRequests
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `draft` without adjusters → tokens and what preceded each, [R, n]; q of the sampled requests
        [S, n, Vd] where it is wanted."""
        if requests.draws is None and self.has_compiled_chain:
            chain = self._greedy_chain(base, requests.anchors)
            return chain.token_ids, chain.previous, None
        chooser = SlotChooser(requests.draws, self.vocab_map, keeps_probs=requests.keeps_probs)
        previous = self._choose_slots(base, hidden, requests.anchors, chooser.choose)
        return chooser.token_ids(), previous, chooser.probs()

    def chooser_of(self, request: DraftRequest, wants_features: bool) -> ChooserType | None:
        """Who chooses its tokens; None: one op for all slots."""
        if request.adjuster is not None:
            return HostChooser
        if request.sampling.greedy and self.has_compiled_chain and not wants_features:
            return None
        return DeviceChooser if self.chooses_on_device else HostChooser

    def _chain(
        self,
        base: Tensor,
        hidden: Tensor,
        anchors: Tensor,
        requests: Sequence[DraftRequest],
        chooser: ChooserType | None,
        wants_features: bool,
    ) -> Chain:
        if chooser is None:
            return self._greedy_chain(base, anchors)
        return self._stepwise_chain(
            base,
            hidden,
            anchors,
            chooser(requests, self.vocab_map, base.shape[-1], base.device, wants_features=wants_features),
        )

    def _greedy_chain(self, base: Tensor, anchors: Tensor) -> Chain:
        if self.w1 is not None and self.w2 is not None:
            return one_hot(*markov_chain(base, self.w1, self.w2, anchors, self.vocab_map))
        chosen = argmax(base.reshape(-1, base.shape[-1])).view(base.shape[:2])
        tokens = chosen if self.vocab_map is None else self.vocab_map[chosen]
        return one_hot(tokens, torch.cat([anchors[:, None], tokens[:, :-1]], dim=1))

    def _stepwise_chain(self, base: Tensor, hidden: Tensor, anchors: Tensor, chooser: Chooser) -> Chain:
        """Slot by slot, the bias of each from the tokens chosen before it."""
        previous = self._choose_slots(base, hidden, anchors, chooser.choose)
        return Chain(
            chooser.token_ids(), previous, chooser.open_slots(), chooser.draft_probs(), chooser.features()
        )

    def _choose_slots(
        self, base: Tensor, hidden: Tensor, anchors: Tensor, choose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Left to right → what preceded each token [R, n]."""
        biased = self._biased_slots(base, hidden)
        token, previous = anchors, []
        for slot in range(base.shape[1]):
            previous.append(token)
            token = choose(biased(slot, token))
        return torch.stack(previous, dim=1)

    def _biased_slots(self, base: Tensor, hidden: Tensor) -> Callable[[int, Tensor], Tensor]:
        """(slot, tokens before it [R]) → its logits [R, Vd] fp32, a tensor of their own. Left to right."""
        head, w1, w2 = self.markov, self.w1, self.w2
        if head is None or w1 is None or w2 is None:
            return lambda slot, _: base[:, slot].to(torch.float32, copy=True)
        if self.has_compiled_chain:
            return lambda slot, token: markov_logits(base[:, slot], w1, w2, token)
        wide, state = w2.float(), head.start(len(base))

        def biased(slot: int, token: Tensor) -> Tensor:
            nonlocal state
            state, features = head.step(state, head.markov_w1(token), hidden[:, slot])
            return base[:, slot].to(torch.float32, copy=True).add_(features.float() @ wide)

        return biased


def _markov_head(config: DSparkConfig, weights: Weights, order: Tensor | None) -> MarkovHead:
    """The head with W2's rows in the order of the draft vocabulary's target ids."""
    prefix = "markov_head."
    state = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    if order is not None:
        state["markov_w2.weight"] = state["markov_w2.weight"][order]
    with torch.device("meta"):
        head = MARKOV_HEADS.get(config.markov_head_type)(
            config.vocab_size, config.output_size, config.markov_rank, config.hidden_size
        )
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False)


def _confidence_vector(config: DSparkConfig, weights: Weights) -> ConfidenceVector:
    projection = weights["confidence_head.proj.weight"][0].float()
    h = config.hidden_size
    markov = projection[h:] if config.confidence_head_with_markov else None
    return ConfidenceVector(projection[:h], markov, weights["confidence_head.proj.bias"][0].float())
