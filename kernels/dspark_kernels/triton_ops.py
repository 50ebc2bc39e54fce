"""The Triton version of every op (triton_*.py), as `torch_ops` collects the reference's.

Runs on CUDA tensors, and on CPU tensors through Triton's interpreter, which is for tests: TRITON_INTERPRET=1
must be set before this module is imported.
"""

from dspark_kernels.torch_sampling import inverse_cdf
from dspark_kernels.triton_acceptance import accept, leading_matches
from dspark_kernels.triton_attention import block_attention, paged_attention
from dspark_kernels.triton_budget import survival_lengths
from dspark_kernels.triton_choose import argmax, markov_chain, markov_logits, noisy_argmax
from dspark_kernels.triton_interpreter import repair
from dspark_kernels.triton_linear import scaled_linear
from dspark_kernels.triton_rope import k_rope_store, qkv_rope, qkv_rope_store
from dspark_kernels.triton_rows import add_rms_norm, rms_norm, silu_mul
from dspark_kernels.triton_sampling import filtered_probs

__all__ = [
    "accept",
    "add_rms_norm",
    "argmax",
    "block_attention",
    "filtered_probs",
    "inverse_cdf",
    "k_rope_store",
    "leading_matches",
    "markov_chain",
    "markov_logits",
    "noisy_argmax",
    "paged_attention",
    "qkv_rope",
    "qkv_rope_store",
    "rms_norm",
    "scaled_linear",
    "silu_mul",
    "survival_lengths",
]

repair()
