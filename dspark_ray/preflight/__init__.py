"""A configuration judged before anything starts: memory, shapes, and what its engine cannot do."""
