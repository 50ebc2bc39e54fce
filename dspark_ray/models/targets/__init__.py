"""Target models: the distributions that the output must keep."""

from dspark_ray.models.targets.decoder import TARGETS, Decoder, DecoderConfig, DecoderOutput, load_target

__all__ = ["TARGETS", "Decoder", "DecoderConfig", "DecoderOutput", "load_target"]
