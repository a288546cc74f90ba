"""Training of APAR models: tree packing, the tokenizer and the embedded model's recipe."""
