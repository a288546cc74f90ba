"""How long an engine step takes: measured, read from published tables, or a roofline."""
