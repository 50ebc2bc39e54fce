"""Training of drafters: data, target cache, anchors, losses, trainer."""
