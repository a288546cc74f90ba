"""Prompt tokens of apar-tiny: weights, acceptance table and card are in this folder."""

from pathlib import Path


def prompts_path() -> Path:
    """Return the folder of the prompt tokens, for `load_prompt_tokens` and `read_table`."""
    return Path(__file__).parent
