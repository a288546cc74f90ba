"""Shipped prompt tokens and Medusa heads, by the name of the model that they belong to."""

from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent

SHIPPED_PROMPTS: Mapping[str, Path] = {
    "apar-tiny": _FOLDER / "apar_tiny_prompts",
    "apar-smollm2": _FOLDER / "apar_smollm2_prompts",
    "smollm2-135m": _FOLDER / "smollm2_135m_prompts",
}
"""Folders of prompt tokens, for `load_prompt_tokens` and `read_table`."""

SHIPPED_HEADS: Mapping[str, Path] = {
    "apar-tiny": _FOLDER / "apar_tiny_medusa",
}
"""Folders of Medusa heads, for `load_medusa_heads`, `read_table` and vLLM."""
