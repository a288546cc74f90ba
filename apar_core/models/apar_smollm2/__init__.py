"""Parts that make SmolLM2-135M-Instruct fork: an adapter, two rows and the model's card."""
