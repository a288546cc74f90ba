"""Training data of a model's own: questions that it asks itself, and its answers to them."""
