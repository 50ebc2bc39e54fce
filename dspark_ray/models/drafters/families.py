"""The network that belongs to a configuration."""

from dspark_ray.models.drafters.autoregressive import AutoregressiveConfig, AutoregressiveNetwork
from dspark_ray.models.drafters.network import DSparkConfig, DSparkNetwork

DrafterConfig = DSparkConfig | AutoregressiveConfig
DrafterNetwork = DSparkNetwork | AutoregressiveNetwork


def new_network(config: DrafterConfig) -> DrafterNetwork:
    """With freshly initialised weights; on the meta device it costs nothing."""
    if isinstance(config, DSparkConfig):
        return DSparkNetwork(config)
    return AutoregressiveNetwork(config)
