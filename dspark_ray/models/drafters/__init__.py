"""Drafters: the DSpark network and its checkpoints, and the engine adapters over them."""
