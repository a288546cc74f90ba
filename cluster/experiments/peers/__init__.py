"""Other ways to write one answer in parallel, as programs for the engine that ours runs in."""
