"""The prompt tokens and Medusa heads that are shipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS, SHIPPED_PROMPTS
from apar_core.models.smollm2 import FETCHED
from apar_core.offline.causal_model import load_causal_model
from apar_core.offline.speculation.acceptance import read_table
from apar_core.offline.speculation.medusa_heads import load_medusa_heads
from apar_core.offline.speculation.prompt_tokens import check_prompt_tokens, load_prompt_tokens

_10_MB = 10e6


def folder_of(model: str) -> Path:
    folder = checkpoint_path() if model == "apar-tiny" else FETCHED[model].folder
    if not folder.is_dir():
        pytest.skip("`apar fetch` was not run")
    return folder


@pytest.mark.parametrize("model", SHIPPED_PROMPTS)
def test_prompt_tokens_belong_to_their_model_and_have_a_table(model: str) -> None:
    prompts, table = load_prompt_tokens(SHIPPED_PROMPTS[model]), read_table(SHIPPED_PROMPTS[model])

    assert table.num_distances == prompts.settings.num_prompts
    # Random candidates would be right in 10 of thousands of cases.
    assert all(best[-1] > 0.1 for best in table.top_k())
    assert sum(file.stat().st_size for file in SHIPPED_PROMPTS[model].glob("*.*")) < 50_000
    check_prompt_tokens(prompts, load_causal_model(folder_of(model), dtype=torch.bfloat16))


@pytest.mark.parametrize("model", SHIPPED_HEADS)
def test_heads_fit_their_model_and_have_a_table(model: str) -> None:
    heads, table = load_medusa_heads(SHIPPED_HEADS[model]), read_table(SHIPPED_HEADS[model])

    assert table.num_distances == heads.settings.medusa_num_heads
    assert sum(file.stat().st_size for file in SHIPPED_HEADS[model].glob("*.*")) < _10_MB
    config = load_causal_model(folder_of(model), dtype=torch.bfloat16).config
    assert heads.settings.hidden_size == config.hidden_size
    assert heads.settings.vocab_size == config.vocab_size
