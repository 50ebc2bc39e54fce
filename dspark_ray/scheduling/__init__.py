"""What to verify, when to draft and how replicas share: pure functions over numpy arrays."""
