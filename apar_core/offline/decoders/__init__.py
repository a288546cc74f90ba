"""Decoders on transformers, one answer at a time: plain, vanilla_apar and medusa_apar."""
