"""Wrong names of models, and broken checkpoints, are refused before an engine starts."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from cluster.cli.doctor import check_checkpoint
from deployments.config import ConfigError
from deployments.config.model import PRESETS, AdapterConfig, ModelConfig

EMBEDDED = Path(PRESETS["apar-tiny"].path)


def problem(**settings: object) -> str:
    with pytest.raises(ConfigError) as raised:
        ModelConfig.model_validate(settings).check_checkpoint()
    return str(raised.value)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the embedded checkpoint."""
    return copytree(EMBEDDED, tmp_path / "my-model")


def test_a_mistyped_preset_is_answered_with_the_nearest_one() -> None:
    said = problem(checkpoint="apar-tinny")

    assert said.startswith(
        "checkpoint: apar-tinny is neither a preset nor a folder; presets: apar-tiny, "
    )
    assert said.endswith("; did you mean apar-tiny?")


@pytest.mark.parametrize("name", ["./nope", "nope/a/b", "/nope/model", "nope/", "a model"])
def test_what_can_only_be_a_folder_is_not_looked_up_on_the_hub(name: str) -> None:
    assert problem(checkpoint=name) == f"checkpoint: no such folder: {name}"


def test_a_similar_folder_is_suggested(copied: Path) -> None:
    assert problem(checkpoint=str(copied.with_name("my-modle"))).endswith(f"did you mean {copied}?")


@pytest.mark.parametrize(
    "name", ["apar-tiny", "gpt2", "THUDM/apar-7b", str(EMBEDDED), "s3://bucket/models/8b"]
)
def test_presets_folders_hub_names_and_object_storage_are_accepted(name: str) -> None:
    ModelConfig(checkpoint=name).check_checkpoint()


def test_a_folder_of_checkpoints_names_the_last_one(copied: Path) -> None:
    said = problem(checkpoint=str(copied.parent))

    assert said == (
        f"checkpoint: {copied.parent} is no checkpoint: it has no config.json; "
        f"did you mean {copied}?"
    )


def test_a_configuration_that_is_no_json_is_named(copied: Path) -> None:
    (copied / "config.json").write_text('{"a":')

    assert f"{copied / 'config.json'} is not valid JSON: " in problem(checkpoint=str(copied))


def test_a_checkpoint_without_weights_is_refused_unless_they_are_not_read(copied: Path) -> None:
    (copied / "model.safetensors").unlink()

    assert "has no weights" in problem(checkpoint=str(copied))
    ModelConfig(checkpoint=str(copied), engine={"load_format": "dummy"}).check_checkpoint()


def test_a_truncated_file_is_named_with_its_size(copied: Path) -> None:
    file = copied / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])

    assert f"{file} has {len(whole) - 1:,} bytes instead of {len(whole):,}" in problem(
        checkpoint=str(copied)
    )


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, (4).to_bytes(8, "little")])
def test_a_file_without_a_header_is_named(copied: Path, content: bytes) -> None:
    (copied / "model.safetensors").write_bytes(content)

    assert "is not a complete safetensors file" in problem(checkpoint=str(copied))


def test_a_pointer_of_git_lfs_is_recognised(copied: Path) -> None:
    (copied / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid ...")

    assert "run `git lfs pull`" in problem(checkpoint=str(copied))


def test_a_missing_shard_is_named(copied: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))

    assert "lacks model-2.safetensors" in problem(checkpoint=str(copied))


@pytest.mark.parametrize("index", [{"weight_map": None}, {"weight_map": {"a": ["b"]}}])
def test_an_index_of_another_form_is_named(copied: Path, index: object) -> None:
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))

    assert "does not map tensors to files" in problem(checkpoint=str(copied))


def test_a_link_to_nothing_is_named(copied: Path) -> None:
    (copied / "model-2.safetensors").symlink_to("nowhere")

    assert "model-2.safetensors cannot be read" in problem(checkpoint=str(copied))


def test_the_configuration_may_be_elsewhere(copied: Path) -> None:
    (copied / "config.json").unlink()

    engine = {"hf_config_path": str(EMBEDDED)}
    ModelConfig(checkpoint=str(copied), engine=engine).check_checkpoint()


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    adapter = AdapterConfig(name="a", path=str(tmp_path))

    assert problem(adapters=[adapter]) == (
        f"adapters: a: {tmp_path} is no LoRA adapter: it has no adapter_config.json"
    )


def test_doctor_finds_a_truncated_file(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])

    [finding] = check_checkpoint(str(copied))

    assert "is not a complete safetensors file" in str(finding.problem)
