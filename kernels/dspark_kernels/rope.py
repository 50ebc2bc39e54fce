"""From a fused QKV projection to rotated queries, with keys and values in the paged cache.

RoPE is the half-split form of Hugging Face's Llama: with x = [a, b] halves, (a·cos - b·sin, b·cos + a·sin).
Per-head RMSNorm of queries and keys, where a model has it (Qwen3), comes before the rotation. `eps` is that
norm's.
"""

from torch import Tensor

from dspark_kernels.dispatch import ops_for


def qkv_rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Split, normalise, rotate; keys and values go to the cache, queries come back.

    qkv [N, (H + 2·KV)·D], cos and sin [N, D/2] fp32, q_norm and k_norm [D] or None, k_cache and v_cache [S,
    KV, D] (written in place), slots [N] int64 cache rows, negative: do not store → q [N, H, D].

    A cache in float8 (e4m3) holds keys / k_scale and values / v_scale, to the nearest and up to its largest
    number.
    """
    return ops_for(qkv, q_norm).qkv_rope_store(
        qkv,
        cos,
        sin,
        num_heads,
        num_kv_heads,
        q_norm,
        k_norm,
        eps,
        k_cache,
        v_cache,
        slots,
        k_scale,
        v_scale,
    )


def qkv_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `qkv_rope_store`, without a cache → q [N, H, D], k [N, KV, D], v [N, KV, D]."""
    return ops_for(qkv, q_norm).qkv_rope(qkv, cos, sin, num_heads, num_kv_heads, q_norm, k_norm, eps)


def k_rope_store(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_kv_heads: int,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> None:
    """Keys (rotated) and values without queries, into the cache: a drafter's context.

    kv [N, 2·KV·D], keys in the first KV·D columns; the rest as in `qkv_rope_store`.
    """
    ops_for(kv, k_norm).k_rope_store(kv, cos, sin, num_kv_heads, k_norm, eps, k_cache, v_cache, slots)
