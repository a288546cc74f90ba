"""The papers' methods without a server.

Imports point one way: `data` (examples) <- `training` (packed trees, fine-tuning) <- `speculation`
(Medusa heads) <- `decoders` (one answer at a time on transformers) <- `evaluation`.
"""
