"""Decoders on transformers, one request at a time: plain, vanilla_apar and medusa_apar."""
