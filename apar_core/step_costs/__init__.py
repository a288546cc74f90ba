"""Duration of an engine step: measured, read from published tables, or a roofline."""
