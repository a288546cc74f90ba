"""The corpus of the embedded model: hand-written content, and the forms it is asked for in."""
