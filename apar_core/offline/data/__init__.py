"""Training data: answers as paragraph trees, and the corpus of the embedded model."""
