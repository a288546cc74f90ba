"""`apar config`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config import load_config
from tests.fakes.apar_command import apar

FILE = """\
port: 9000
models:
  - checkpoint: apar-tiny
    replicas: 2
    forks: {max_threads: 4}
  - {checkpoint: org/plain, name: plain}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return path


def test_check_names_the_models_of_a_good_file(file: Path) -> None:
    result = apar("config", "check", file)

    assert result.exit_code == 0
    assert "apar-tiny, plain" in result.output


def test_check_takes_the_engine_arguments_of_vllm(file: Path) -> None:
    file.write_text("models: [{engine: {max_num_seqs: 4, enable_auto_tool_choice: true}}]")

    assert apar("config", "check", file).exit_code == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("models: [{replica: 2}]", "models.0.replica"),
        ("models: [{checkpoint: ./gone}]", "checkpoint: no such folder: ./gone"),
        ("models: [{name: a, engine: {max_seqs: 4}}]", "a: vLLM has no engine argument 'max_seqs'"),
        ("models: [{replica: 2}]", "did you mean replicas?"),
        ("limits: {max_body_byte: 2}", "did you mean max_body_bytes?"),
        ("models: [{engine: {max_num_seq: 4}}]", "did you mean max_num_seqs?"),
        ("model: []", "model: Extra inputs are not permitted; did you mean models?"),
        ("models: [{forks: {max_thread: 2}}]", "did you mean max_threads?"),
        ("models: [{adapters: [{folder: x, nam: a}]}]", "did you mean name?"),
        ("models: [{parallel_format: {like: apar, outlines: {patern: x}}}]", "mean pattern?"),
        ("models: [{parallel_format: lits}]", "did you mean lists?"),
        ("models: [{checkpoint: apar-tniy}]", "did you mean apar-tiny?"),
        ("port: off", "port: Input should be a valid integer"),
        ("port: 80:00", "port: Input should be a valid integer"),
        ("port: true", "port: a number is expected (got true)"),
        ("allow_anonymous: on", "allow_anonymous: true or false is expected (got 'on')"),
        ("metrics: {enabled: 1}", "metrics.enabled: true or false is expected (got 1)"),
        ("models: [{replicas: true}]", "models.0.replicas: a number is expected (got true)"),
        ("models: [{max_concurrency: 99999999999999999999}]", "99999999999999999999 is too large"),
        ("models: [{checkpoint: '${MODEL}'}]", "models.0.checkpoint: ${MODEL} is not replaced"),
        ("models: [{engine: {max_model_len: 2x}}]", "engine argument 'max_model_len': '2x'"),
        ("models: [{engine: {max_num_seqs: 2k}}]", "engine argument 'max_num_seqs': '2k'"),
        ("models: [{engine: {enforce_eager: off}}]", "'off' is not true or false"),
        ("models: [{engine: {dtype: bloat16}}]", "'bloat16' is none of auto, bfloat16"),
        (
            "models: [{engine: {enable_prefix_caching: false}}]",
            "engine argument 'enable_prefix_caching': forks share",
        ),
    ],
)
def test_check_names_what_is_wrong(file: Path, text: str, named: str) -> None:
    file.write_text(text)

    result = apar("config", "check", file)

    assert result.exit_code == 1
    assert named in result.output


@pytest.mark.parametrize(
    ("text", "exit_code", "named"),
    [
        ("models: [{name: 'a[/b]'}]", 0, "a[/b]"),
        ("models: [{checkpoint: './gone[bold]'}]", 1, "gone[bold]"),
    ],
)
def test_brackets_in_names_are_shown_as_they_are(
    file: Path, text: str, exit_code: int, named: str
) -> None:
    file.write_text(text)

    result = apar("config", "check", file)

    assert (result.exit_code, result.exception is None) == (exit_code, exit_code == 0)
    assert named in result.output


def test_show_fills_in_what_the_preset_gives(file: Path) -> None:
    file.write_text("models: [{checkpoint: apar-7b, engine: {seed: 1}}]")

    shown = apar("config", "show", file).output

    engine = yaml.safe_load(shown)["models"][0]["engine"]
    assert engine.pop("chat_template").endswith("vicuna_template.jinja")
    assert engine == {"max_model_len": 2048, "seed": 1}


def test_show_prints_a_file_that_means_the_same(file: Path, tmp_path: Path) -> None:
    shown = apar("config", "show", file).output
    again = tmp_path / "again.yaml"
    again.write_text(shown)

    written, read = load_config(file, {}, {}), load_config(again, {}, {})

    assert "2 x 64 requests, 256 threads per replica" in shown
    assert yaml.safe_load(shown)["models"][0]["max_concurrency"] == 64
    assert [m.public_name for m in read.models] == [m.public_name for m in written.models]
    assert [m.threads_per_replica for m in read.models] == [256, 256]
    assert read.models[0].forks == written.models[0].forks


def test_the_schema_describes_every_field() -> None:
    schema = json.loads(apar("config", "schema").output)

    defined = (each for each in schema["$defs"].values() if "enum" not in each)
    objects: list[dict[str, Any]] = [schema, *defined]
    assert {"ModelConfig", "ForkLimits"} <= schema["$defs"].keys()
    for each in objects:
        assert each["additionalProperties"] is False
        assert all("description" in field for field in each["properties"].values())
