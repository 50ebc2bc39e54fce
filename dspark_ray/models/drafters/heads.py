"""The heads over a block's hidden states: a sequential bias on the logits, and the confidence.

Every sequential head adds B_k = W2 u_k, left to right; they differ in u_k. With e_k = W1[x_{k−1}]
(DSpark paper, section 3.2; `z` and the order of the projections as in DeepSpec's checkpoints):

    vanilla  u_k = e_k
    gated    u_k = σ(W_gate [h_k; e_k]) ⊙ e_k
    rnn      z_k = [s_{k−1}; e_k; h_k],  s_k = σ(W_g z_k) ⊙ s_{k−1} + (1 − σ(W_g z_k)) ⊙ tanh(W_c z_k),
             u_k = tanh(W_o z_k),  s_0 = 0

The modules serve training (`unroll` over teacher-forced tokens) and inference (`step` after each choice).
"""

import torch
from torch import Tensor, nn

from dspark_ray.core.registry import Registry


class MarkovHead(nn.Module):
    """A low-rank bigram bias. W1 is over target ids, W2 over draft ids."""

    def __init__(self, vocab_size: int, output_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, output_size, bias=False)

    def start(self, num_blocks: int) -> Tensor:
        """The state before a block's first slot [num_blocks, r]; only the recurrent head reads it."""
        weight = self.markov_w1.weight
        return weight.new_zeros(num_blocks, weight.shape[1])

    def step(self, state: Tensor, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One slot of each block: (next state, u_k [N, r]). embedding = W1[previous] [N, r], hidden [N, H]"""
        return state, embedding

    def unroll(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """u of all slots. embeddings [..., γ, r] and hidden [..., γ, H] of the same blocks → [..., γ, r]"""
        return self.step(embeddings, embeddings, hidden)[1]  # no state: any tensor stands for it


class GatedMarkovHead(MarkovHead):
    """The hidden state decides how much of each bigram feature counts."""

    def __init__(self, vocab_size: int, output_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, output_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, state: Tensor, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat((hidden, embedding.to(hidden.dtype)), dim=-1)
        return state, self.gate_proj(joined).sigmoid() * embedding


class RNNHead(MarkovHead):
    """A gated recurrence over the block's tokens: the bias knows all of them, not only the last."""

    def __init__(self, vocab_size: int, output_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, output_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)  # rows: gate, candidate, output

    def step(self, state: Tensor, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat((state.to(hidden.dtype), embedding.to(hidden.dtype), hidden), dim=-1)
        gate, candidate, output = self.joint_proj(joined).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return gate * state + (1.0 - gate) * candidate.tanh(), output.tanh()

    def unroll(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        state = torch.zeros_like(embeddings[..., 0, :])
        outputs = []
        for slot in range(embeddings.shape[-2]):
            state, output = self.step(state, embeddings[..., slot, :], hidden[..., slot, :])
            outputs.append(output)
        return torch.stack(outputs, dim=-2)


MARKOV_HEADS: Registry[type[MarkovHead]] = Registry("markov_head_type")
MARKOV_HEADS.register("vanilla")(MarkovHead)
MARKOV_HEADS.register("gated")(GatedMarkovHead)
MARKOV_HEADS.register("rnn")(RNNHead)


class ConfidenceHead(nn.Module):
    """w·[h_k; W1[prev_k]] + b: the logit of surviving position k, given that all before it survived."""

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        """`markov_rank` 0: the hidden state alone."""
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        """hidden [..., H], embedding [..., r] → [...]"""
        if self.proj.in_features > hidden.shape[-1]:
            assert embedding is not None, "this confidence head reads the Markov embedding"
            hidden = torch.cat((hidden, embedding.to(hidden.dtype)), dim=-1)
        return self.proj(hidden).squeeze(-1)
