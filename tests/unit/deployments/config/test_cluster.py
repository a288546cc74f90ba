"""The configuration file and the command line's values over it."""

from pathlib import Path

import pytest

from deployments.config import ClusterConfig, ConfigError, load_config
from deployments.config.model import ModelConfig


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    return file


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 9000\nmodels: [{replicas: 2, max_concurrency: 5}]\n")

    config = load_config(file, {"port": 9001, "host": None}, {"replicas": 3, "checkpoint": None})

    [model] = config.models
    assert (config.port, model.replicas, model.requests_per_replica) == (9001, 3, 5)


def test_the_command_line_names_a_model_where_the_file_names_none(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "port: 9000"), {}, {"checkpoint": "apar-7b"})

    assert config == ClusterConfig(port=9000, models=(ModelConfig(checkpoint="apar-7b"),))


def test_models_of_a_file_keep_their_order_and_their_own_settings(tmp_path: Path) -> None:
    text = "models: [{checkpoint: apar-7b, replicas: 2}, {checkpoint: org/plain, name: plain}]"

    config = load_config(written(tmp_path, text), {}, {})

    assert [model.public_name for model in config.models] == ["apar-7b", "plain"]
    assert config.num_replicas == 3


def test_the_command_line_cannot_change_one_of_several_models(tmp_path: Path) -> None:
    file = written(tmp_path, "models: [{name: a}, {name: b}]")

    with pytest.raises(ConfigError, match=r"2 models; set replicas there"):
        load_config(file, {}, {"replicas": 2})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 9000", "prot"),
        ("port: 70000", r"port: .*70000"),
        ("models: []", "models"),
        ("models: 5", r"models: .*5"),
        ("models: [apar-tiny]", r"models\.0"),
        ("models: [{replicas: 0}]", r"models\.0\.replicas: .*got 0"),
        ("models: [{max_concurrency: many}]", r"models\.0\.max_concurrency: .*many"),
        ("models: [{threads_per_request: 0.5}]", r"models\.0\.threads_per_request"),
        ("models: [{gpu_memory_share: 1.5}]", r"models\.0\.gpu_memory_share"),
        ("models: [{forks: {max_treads: 3}}]", r"models\.0\.forks\.max_treads"),
        ("models: [{}, {}]", r"2 of them are called 'apar-tiny'"),
        ("models: [{name: a/b}, {name: a b}]", r"2 of them are called 'Replica-a-b'"),
        ("[1, 2]", "mapping"),
        ("a: [", r"serve\.yaml"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("port: 9000\nport: 9001", r"'port' is given twice\n.*line 2"),
        ("models: [{name: a, name: b}]", "'name' is given twice"),
    ],
)
def test_an_invalid_file_is_refused_and_the_field_named(
    tmp_path: Path, text: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(written(tmp_path, text), {}, {})


def test_a_wrong_model_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, "models: [{replicas: 0}]"), {}, {})

    assert "at least 1 item" not in str(error.value)


def test_a_mapping_may_merge_another(tmp_path: Path) -> None:
    text = "models: [&a {name: a, replicas: 2}, &b {<<: *a, name: b}, {<<: *b, name: c}]"

    config = load_config(written(tmp_path, text), {}, {})

    assert [model.name for model in config.models] == ["a", "b", "c"]
    assert config.num_replicas == 6


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        load_config(tmp_path / "gone.yaml", {}, {})


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, ""), {}, {})

    assert config == ClusterConfig()
    assert [model.public_name for model in config.models] == ["apar-tiny"]


TWO = "models: [{checkpoint: apar-7b, adapters: [{name: tuned, path: /a}]}, {name: plain}]\n"


def test_other_names_lead_to_models_and_adapters(tmp_path: Path) -> None:
    text = TWO + "aliases: {gpt: apar-7b, mine: tuned}\nfallback: {tuned: plain, plain: apar-7b}"

    config = load_config(written(tmp_path, text), {}, {})

    assert config.aliases == {"gpt": "apar-7b", "mine": "tuned"}
    assert config.fallback == {"tuned": "plain", "plain": "apar-7b"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("aliases: {gpt: none}", "aliases: 'gpt' leads to 'none', which is not served"),
        ("aliases: {plain: apar-7b}", "aliases: 'plain' is the name of a model"),
        ("fallback: {none: plain}", "fallback: 'none' is not served"),
        ("fallback: {plain: none}", "fallback: 'plain' leads to 'none', which is not served"),
        ("fallback: {plain: plain}", "fallback: 'plain' leads to itself"),
        ("fallback: {tuned: apar-7b}", "fallback: 'tuned' and 'apar-7b' have the same replicas"),
    ],
)
def test_other_names_that_lead_nowhere_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(written(tmp_path, TWO + text), {}, {})
