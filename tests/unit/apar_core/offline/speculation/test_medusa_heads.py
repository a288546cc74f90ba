from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from apar_core.errors import CheckpointError
from apar_core.formats.config_file import CONFIG_FILE
from apar_core.models.guesses import SHIPPED_HEADS
from apar_core.offline.speculation.medusa_heads import (
    WEIGHTS_FILE,
    MedusaHeads,
    MedusaHeadSettings,
    load_medusa_heads,
    save_medusa_heads,
)

SIZES = {"hidden_size": 8, "vocab_size": 12}


def random_heads(**sizes: Any) -> MedusaHeads:
    torch.manual_seed(0)
    return MedusaHeads(MedusaHeadSettings(**{**SIZES, **sizes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_medusa_heads(random_heads(), tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"medusa_num_heads": 4, "medusa_num_layers": 1}, {"medusa_fc_bias": True}],
)
def test_loaded_heads_equal_saved_ones(
    tmp_path: Path, dtype: torch.dtype, sizes: dict[str, Any]
) -> None:
    heads = random_heads(**sizes).to(dtype)

    save_medusa_heads(heads, tmp_path / "new" / "folder")
    loaded = load_medusa_heads(tmp_path / "new" / "folder")

    assert loaded.settings == heads.settings
    modes = {file.stat().st_mode for file in (tmp_path / "new" / "folder").iterdir()}
    assert len(modes) == 1
    assert not loaded.training
    expected = heads.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name])


def test_the_output_of_a_head_is_as_worked_out_by_hand() -> None:
    heads = random_heads(medusa_fc_bias=True)
    hidden = torch.randn(3, 8)

    with torch.inference_mode():
        logits = heads(hidden)

        assert logits.shape == (2, 3, 12)
        for head in range(2):
            expected = hidden
            for layer in range(2):
                weights = heads.state_dict()
                name = f"blocks.{head}.layers.{layer}"
                mapped = expected @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
                expected = expected + mapped * torch.sigmoid(mapped)
            expected = expected @ heads.state_dict()[f"lm_heads.{head}.weight"].T
            torch.testing.assert_close(logits[head], expected)


def test_new_heads_propose_like_the_models_output_layer() -> None:
    lm_head = torch.randn(12, 8, dtype=torch.float64)
    heads = MedusaHeads.like_lm_head(lm_head, num_heads=3, num_layers=1)
    hidden = torch.randn(5, 8, dtype=torch.float64)

    logits = heads(hidden)

    assert logits.dtype == torch.float64
    assert torch.equal(logits, (hidden @ lm_head.T).expand(3, 5, 12))


def test_heads_of_the_models_output_layer_have_no_matrix_of_their_own(tmp_path: Path) -> None:
    heads, hidden = random_heads(original_lm_head=True), torch.randn(3, 8)
    output_layer = nn.Linear(8, 12, bias=False)

    with torch.inference_mode():
        logits = heads(hidden, output_layer)
        expected = [output_layer(block(hidden)) for block in heads.blocks]

    assert torch.equal(logits, torch.stack(expected))
    save_medusa_heads(heads, tmp_path)
    # vLLM would load them with random matrices, so their type is one that it does not know.
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["model_type"] != "medusa"
    assert not any("lm_head" in name for name in load_file(tmp_path / WEIGHTS_FILE))
    with torch.inference_mode():
        assert torch.equal(load_medusa_heads(tmp_path)(hidden, output_layer), logits)


def test_the_configuration_has_the_fields_that_vllm_reads(folder: Path) -> None:
    assert json.loads((folder / CONFIG_FILE).read_text()) == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        **SIZES,
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "medusa_fc_bias": False,
        "original_lm_head": False,
        "dtype": "float32",
    }
    assert set(load_file(folder / WEIGHTS_FILE)) == {
        *(f"blocks.{head}.layers.{layer}.weight" for head in range(2) for layer in range(2)),
        *(f"lm_heads.{head}.weight" for head in range(2)),
    }


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_weight_names_of_the_first_checkpoints_are_converted(folder: Path, prefix: str) -> None:
    weights = load_file(folder / WEIGHTS_FILE)
    old = {}
    for head in range(2):
        for layer in range(2):
            name = f"blocks.{head}.layers.{layer}.weight"
            old[f"{prefix}{head}.{layer}.linear.weight"] = weights[name]
        old[f"{prefix}{head}.2.weight"] = weights[f"lm_heads.{head}.weight"]
    save_file(old, folder / WEIGHTS_FILE)

    loaded = load_medusa_heads(folder).state_dict()

    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_the_same_keys_are_accepted_as_in_vllm(folder: Path) -> None:
    save_medusa_heads(random_heads(medusa_num_heads=3, medusa_num_layers=1), folder)
    path = folder / CONFIG_FILE
    text = path.read_text().replace("medusa_num_heads", "num_heads")
    path.write_text(text.replace("medusa_num_layers", "num_hidden_layers"))

    settings = load_medusa_heads(folder).settings

    assert (settings.medusa_num_heads, settings.medusa_num_layers) == (3, 1)


def test_the_shipped_heads_are_two_of_two_layers() -> None:
    settings = load_medusa_heads(SHIPPED_HEADS["apar-tiny"]).settings

    assert (settings.medusa_num_heads, settings.medusa_num_layers) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'medusa' or .*, got 'llama'"),
        ({"hidden_size": 0}, r"hidden_size: .* \(got 0\)"),
        ({"vocab_size": "many"}, r"vocab_size: .* \(got 'many'\)"),
        ({"medusa_num_heads": -1}, r"medusa_num_heads: .* \(got -1\)"),
        ({"medusa_num_heads": 3}, r"weights missing .*blocks\.2.* 3 heads of 2 layers"),
        ({"medusa_num_layers": 1}, r"unknown \['blocks\.0\.layers\.1\.weight'"),
        ({"medusa_fc_bias": True}, r"weights missing \['blocks\.0\.layers\.0\.bias'"),
        ({"hidden_size": 16}, r"has shape \[8, 8\], the configuration asks for \[16, 16\]"),
        ({"truncated_vocab_size": 6}, "truncated_vocab_size 6 is not supported"),
        ({"original_lm_head": True}, r"unknown \['lm_heads\.0\.weight'"),
    ],
)
def test_an_invalid_configuration_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(folder, **changes)

    with pytest.raises(CheckpointError, match=message):
        load_medusa_heads(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\udcff"])
def test_an_unreadable_configuration_is_refused(folder: Path, text: str) -> None:
    (folder / CONFIG_FILE).write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(CheckpointError, match=f"{folder / CONFIG_FILE}"):
        load_medusa_heads(folder)


def test_a_folder_without_weights_and_one_with_broken_weights_are_refused(folder: Path) -> None:
    weights = folder / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"cannot read the Medusa heads in {weights}"):
        load_medusa_heads(folder)

    weights.unlink()
    with pytest.raises(CheckpointError, match=f"no safetensors file with Medusa heads in {folder}"):
        load_medusa_heads(folder)
    with pytest.raises(CheckpointError, match="no configuration of Medusa heads"):
        load_medusa_heads(folder / "missing")
