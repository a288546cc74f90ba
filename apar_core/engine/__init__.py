"""vLLM engines that fork: what runs in the API process, and how the pieces are installed."""
