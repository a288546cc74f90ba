"""Prompt tokens: file format, their model's fingerprint, and the average of an ensemble."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from apar_core.errors import CheckpointError
from apar_core.formats.config_file import CONFIG_FILE
from apar_core.formats.prompt_file import WEIGHTS_FILE
from apar_core.offline.speculation.prompt_tokens import (
    PromptTokens,
    check_prompt_tokens,
    load_prompt_tokens,
    model_fingerprint,
    save_prompt_tokens,
)
from tests.unit.apar_core.offline.training.random_trees import random_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_prompt_tokens(PromptTokens.like_text(random_model(), ensemble=2), tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("average", ["probabilities", "learned"])
def test_loaded_prompt_tokens_equal_saved_ones(
    tmp_path: Path, dtype: torch.dtype, average: str
) -> None:
    prompts = PromptTokens.like_text(
        random_model(), num_prompts=2, ensemble=3, average=average, mask="decoder", exits=2
    ).to(dtype)
    if prompts.weights is not None:
        torch.nn.init.normal_(prompts.weights)

    save_prompt_tokens(prompts, tmp_path / "new" / "folder")
    modes = {file.stat().st_mode for file in (tmp_path / "new" / "folder").iterdir()}
    assert len(modes) == 1
    loaded = load_prompt_tokens(tmp_path / "new" / "folder")

    assert loaded.settings == prompts.settings
    assert loaded.embeddings.shape == (2, 3, 32)
    assert loaded.embeddings.dtype == dtype
    assert torch.equal(loaded.embeddings, prompts.embeddings)
    assert (loaded.weights is None) == (average == "probabilities")
    if loaded.weights is not None and prompts.weights is not None:
        assert torch.equal(loaded.weights, prompts.weights)
    check_prompt_tokens(loaded, random_model())


def test_they_start_as_different_tokens_of_the_vocabulary() -> None:
    model = random_model()

    first, second = (PromptTokens.like_text(model, ensemble=4, seed=seed) for seed in (0, 1))

    rows = model.get_input_embeddings().weight
    for embedding in first.embeddings.flatten(0, 1):
        assert (embedding == rows).all(1).any()
    assert not torch.equal(first.embeddings, second.embeddings)
    assert len(first.embeddings.flatten(0, 1).unique(dim=0)) > 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "medusa"}, "model_type must be 'ppd_prompt_tokens', got 'medusa'"),
        ({"num_prompts": 0}, "num_prompts: Input should be greater than 0"),
        ({"average": "votes"}, "average: Input should be 'logits', 'probabilities' or 'learned'"),
        ({"fingerprint": None}, "fingerprint: Input should be a valid string"),
        ({"ensemble": 5}, r"embeddings has shape \[3, 2, 32\], the configuration asks for \[3, 5"),
    ],
)
def test_a_wrong_configuration_is_refused_naming_the_field(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(folder, **changes)

    with pytest.raises(CheckpointError, match=message):
        load_prompt_tokens(folder)


def test_missing_and_foreign_files_are_refused(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS_FILE)
    save_file({**weights, "extra": torch.ones(1)}, folder / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"weights must be \['embeddings'\], got"):
        load_prompt_tokens(folder)
    (folder / WEIGHTS_FILE).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"cannot read the prompt tokens in .*safetensors"):
        load_prompt_tokens(folder)
    with pytest.raises(CheckpointError, match="no configuration of prompt tokens"):
        load_prompt_tokens(folder / "nowhere")


def test_the_fingerprint_follows_the_weights_but_not_the_dtype() -> None:
    model = copy.deepcopy(random_model()).bfloat16()
    before = model_fingerprint(model)

    assert model_fingerprint(copy.deepcopy(model).float()) == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert model_fingerprint(model) != before


def test_prompt_tokens_of_another_model_are_refused() -> None:
    model = random_model()
    prompts = PromptTokens.like_text(model)

    with pytest.raises(CheckpointError, match=r"were trained for another model: .* fingerprint"):
        check_prompt_tokens(prompts, random_model(tied=True))
    narrow = PromptTokens(prompts.settings.model_copy(update={"hidden_size": 16}))
    with pytest.raises(CheckpointError, match="hidden_size 16, the model has 32"):
        check_prompt_tokens(narrow, model)


def test_an_ensemble_averages_logits_or_probabilities() -> None:
    settings = PromptTokens.like_text(random_model(), ensemble=2).settings
    output_VD = torch.tensor([[1.0, 0.0], [0.5, 2.0], [-1.0, 1.0]])
    hidden_KED = torch.tensor([[[1.0, 2.0], [3.0, -1.0]], [[0.5, 0.5], [2.0, 0.0]]])
    distance_K = torch.tensor([0, 2])
    logits_KEV = hidden_KED @ output_VD.T

    def prediction(average: str) -> tuple[PromptTokens, torch.Tensor]:
        prompts = PromptTokens(settings.model_copy(update={"average": average}))
        if prompts.weights is not None:
            with torch.no_grad():
                prompts.weights[:] = torch.tensor([[0.25, 0.75], [9.0, 9.0], [1.0, -1.0]])
        merged = prompts.merged(hidden_KED, distance_K)
        return prompts, prompts.combined(merged @ output_VD.T)

    torch.testing.assert_close(prediction("logits")[1], logits_KEV.mean(1))
    expected = logits_KEV.softmax(-1).mean(1)
    torch.testing.assert_close(prediction("probabilities")[1].exp(), expected)
    weights_KE1 = torch.tensor([[0.25, 0.75], [1.0, -1.0]])[..., None]
    torch.testing.assert_close(prediction("learned")[1], (weights_KE1 * logits_KEV).sum(1))
    torch.testing.assert_close(PromptTokens(settings).combined(logits_KEV[:, :1]), logits_KEV[:, 0])
