"""Confidences that mean what they say: temperatures, how they are fitted, and how far off they are."""
