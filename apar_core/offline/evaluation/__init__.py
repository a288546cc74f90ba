"""Evaluation of checkpoints and decoders: fork check, speed and answer quality."""
