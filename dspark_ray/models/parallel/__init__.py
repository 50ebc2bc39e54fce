"""Tensor parallelism: one decoder over several ranks, of which rank 0 decides and the others follow."""
