"""Corpus of the embedded model: hand-written content, questions about it, and seeded samples."""
