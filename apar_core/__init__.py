"""Forked decoding itself: tree, scheduler, engine, training."""
