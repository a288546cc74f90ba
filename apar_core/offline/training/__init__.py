"""Training of APAR models: packed trees, fine-tuning, and the embedded model's own training."""
