"""vLLM's engine behind the same application (`engine.kind: vllm`); vllm itself is imported lazily."""
