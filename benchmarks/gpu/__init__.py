"""Checks that need a GPU: one harness, and what a borrowed machine without a network lacks."""
