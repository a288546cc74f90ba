"""The papers' methods without a server: data, training, decoding and evaluation."""
