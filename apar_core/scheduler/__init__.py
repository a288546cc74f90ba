"""vLLM's scheduler, extended: a fork token opens a thread that shares its parent's KV blocks."""
