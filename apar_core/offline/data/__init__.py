"""Training data: chats prepared as paragraph trees, and the corpus of the embedded model."""
