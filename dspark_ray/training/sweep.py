"""Depths and block lengths of drafters, trained on the same texts: figures 3 and 4 of the paper.

Every depth at the base's block length, and every block length at the base's depth, for DSpark and for DFlash,
which differs in its heads alone. All take the same optimizer steps over the same sequences and anchors.
"""

from collections.abc import Sequence

from dspark_ray.core.errors import ConfigError
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.contest import contest_config

KINDS = ("dspark", "dflash")


def sweep_configs(
    base: TrainingConfig, depths: Sequence[int], lengths: Sequence[int], kinds: Sequence[str] = KINDS
) -> dict[str, TrainingConfig]:
    """name → configuration. `base` is a DSpark configuration; what the target's layers start is its last
    ones, as many as there are draft layers."""
    shapes = [(depth, base.architecture.block_size) for depth in depths]
    shapes += [(base.architecture.num_layers, length) for length in lengths]
    configs = {}
    for depth, length in dict.fromkeys(shapes):
        shaped = _with_shape(base, depth, length)
        for kind in kinds:
            name = f"{kind}-{depth}-layers-block-{length}"
            configs[name] = contest_config(shaped, kind).model_copy(update={"output": base.output / name})
    return configs


def _with_shape(base: TrainingConfig, depth: int, length: int) -> TrainingConfig:
    raw = base.model_dump()
    first = base.architecture.init_layers
    if first:
        last = first[-1]
        if depth > last + 1:
            raise ConfigError(f"a depth of {depth} cannot start from the target's layers up to {last}")
        first = tuple(range(last - depth + 1, last + 1))
    raw["architecture"] |= {"num_layers": depth, "block_size": length, "init_layers": first}
    return TrainingConfig.model_validate(raw)
