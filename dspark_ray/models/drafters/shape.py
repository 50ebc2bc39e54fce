"""What every drafter network's configuration says: its sizes, and which target it belongs to."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

AnyInt = TypeVar("AnyInt", int, Tensor)

WINDOW_STEP = 16
"""A windowed context begins at a multiple of this, so that whole KV blocks are skipped."""


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Sizes of a draft layer and of the vocabularies, under Hugging Face's names."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # 0-based; the layer's OUTPUT is the tap, −1 the embedding
    block_size: int = 7  # γ: tokens drafted a block
    draft_vocab_size: int | None = None  # None: the drafter speaks the whole vocabulary
    context_window: int | None = None  # context positions that a block sees; None: all (see `context_start`)
    qk_norm: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    # Kept as read; only "default" is computed by the training networks.
    rope_scaling: dict[str, Any] = field(default_factory=dict)

    @property
    def output_size(self) -> int:
        """Rows of the drafter's logits: the draft vocabulary, or the target's when there is none."""
        return self.draft_vocab_size or self.vocab_size

    def context_start(self, anchor: AnyInt) -> AnyInt:
        """The first context position that a block at `anchor` sees: at least `context_window` before it, and
        up to `WINDOW_STEP` − 1 more. An int, or a tensor of them."""
        if self.context_window is None:
            return anchor * 0
        start = anchor - self.context_window
        return start * (start > 0) // WINDOW_STEP * WINDOW_STEP

    @property
    def rope_type(self) -> str:
        """`default` unless the checkpoint scales its rotary angles."""
        return str(self.rope_scaling.get("rope_type", self.rope_scaling.get("type", "default")))
