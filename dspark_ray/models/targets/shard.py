"""Which part of a decoder a tensor-parallel rank holds.

Columns of QKV and gate-up by heads and by inner width, rows of o and down by the same, and a range of the
vocabulary. A KV head that several ranks' query heads read lies on each of them.
"""

from dataclasses import dataclass, replace

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.targets.config import DecoderConfig
from dspark_ray.models.weights import Part


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one dimension of a matrix."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def along(self, dim: int) -> Part:
        return Part(dim, self.start, self.stop)


@dataclass(frozen=True, slots=True)
class ShardSpans:
    """A rank's part of each dimension along which matrices are divided."""

    q: Span  # columns of Q, and rows of o
    kv: Span  # columns of K, and of V
    inner: Span  # columns of gate, and of up; rows of down


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `count`; the only one of 1 holds everything."""

    rank: int = 0
    count: int = 1

    def split(self, size: int) -> Span:
        """Its even part of a dimension."""
        assert size % self.count == 0, f"{size} over {self.count} ranks"
        part = size // self.count
        return Span(self.rank * part, (self.rank + 1) * part)

    def kv_heads(self, config: DecoderConfig) -> Span:
        """Its KV heads: an even part of them, or the one that its query heads read."""
        if config.num_kv_heads % self.count == 0:
            return self.split(config.num_kv_heads)
        head = self.rank * config.num_kv_heads // self.count
        return Span(head, head + 1)

    def spans(self, config: DecoderConfig) -> ShardSpans:
        """Of the decoder of `config`."""
        size, heads, kv_heads = config.head_dim, self.split(config.num_heads), self.kv_heads(config)
        return ShardSpans(
            q=Span(heads.start * size, heads.stop * size),
            kv=Span(kv_heads.start * size, kv_heads.stop * size),
            inner=self.split(config.intermediate_size),
        )

    def vocabulary(self, size: int) -> Span:
        """Its tokens. The last ranks have fewer where the vocabulary does not divide, down to none."""
        rows = self.vocabulary_rows(size)
        start = min(self.rank * rows, size)
        return Span(start, min(start + rows, size))

    def vocabulary_rows(self, size: int) -> int:
        """Rows of every rank's part, padding included."""
        return -(-size // self.count)

    def local(self, config: DecoderConfig) -> DecoderConfig:
        """The shapes of this rank's layers. Raises `ConfigError` for a number of ranks that does not fit."""
        check_ranks(self.count, config)
        return replace(
            config,
            num_heads=config.num_heads // self.count,
            num_kv_heads=self.kv_heads(config).size,
            intermediate_size=config.intermediate_size // self.count,
        )


WHOLE = Shard()
"""A decoder that nobody shares."""


def check_ranks(count: int, config: DecoderConfig) -> None:
    """`ConfigError` where a decoder cannot be divided into so many parts."""
    sizes = fitting_sizes(config.num_heads, config.num_kv_heads, config.intermediate_size)
    if count not in sizes:
        raise ConfigError(
            f"engine.tensor_parallel_size {count} does not fit {config.num_heads} attention heads, "
            f"{config.num_kv_heads} KV heads and an inner width of {config.intermediate_size}: set it to one "
            f"of {', '.join(map(str, sizes))}"
        )


def fitting_sizes(num_heads: int, num_kv_heads: int, intermediate_size: int) -> list[int]:
    """Numbers of ranks that heads and inner width can be divided over."""
    return [
        count
        for count in range(1, num_heads + 1)
        if num_heads % count == 0
        and intermediate_size % count == 0
        and (num_kv_heads % count == 0 or count % num_kv_heads == 0)
    ]
