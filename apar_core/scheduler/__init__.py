"""vLLM's scheduler with forks: a fork token opens a thread that shares its parent's KV blocks."""
