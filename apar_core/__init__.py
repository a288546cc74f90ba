"""Forked decoding: paragraph trees, vLLM scheduler and engine, and the methods offline."""
