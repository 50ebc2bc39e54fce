"""Floor 3, the native engine: sequences, paged KV, admission, drafting, verification, the step loop."""
