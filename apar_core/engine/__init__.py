"""vLLM engines that fork: the parts in the API process, logits processors, and the plugin."""
