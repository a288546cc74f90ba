from pathlib import Path
from typing import Any

import pytest

from cluster.config import MAX_THREADS, ConfigError, ServeConfig, load_config


@pytest.mark.parametrize(
    ("model", "requests", "threads"),
    [("apar-tiny", 64, 256), ("apar-7b", 350, MAX_THREADS), ("apar-13b", 180, 720)],
)
def test_presets_bound_requests_and_size_threads_from_them(
    model: str, requests: int, threads: int
) -> None:
    config = ServeConfig(model=model)

    assert config.requests_per_replica == requests
    assert config.threads_per_replica == threads
    assert config.public_name == model


def test_the_embedded_model_lies_in_the_package() -> None:
    assert (Path(ServeConfig().preset.path) / "config.json").is_file()


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 9000\nreplicas: 2\nmax_concurrency: 5\n")

    config = load_config(file, {"port": 9001, "replicas": None})

    assert (config.port, config.replicas, config.requests_per_replica) == (9001, 2, 5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 9000", "prot"),
        ("port: 70000", "port"),
        ("replicas: 0", "replicas"),
        ("max_concurrency: many", "max_concurrency"),
        ("threads_per_request: 0.5", "threads_per_request"),
        ("[1, 2]", "mapping"),
        ("a: [", "serve.yaml"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=named):
        load_config(file, {})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        load_config(tmp_path / "gone.yaml", {})


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("")

    assert load_config(file, {}) == ServeConfig()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"model": "org/model"}, "org/model"),
        ({"model": "org/model", "served_model_name": "mine"}, "mine"),
        ({"served_model_name": "mine"}, "mine"),
    ],
)
def test_the_name_that_clients_send(values: dict[str, Any], name: str) -> None:
    assert ServeConfig(**values).public_name == name


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()

    assert ServeConfig(model=str(folder)).public_name == "my-model"


def test_threads_are_never_fewer_than_requests() -> None:
    assert ServeConfig(max_concurrency=2000).threads_per_replica == 2000


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [({}, 2**28), ({"model": "apar-7b"}, 4 * 2**30), ({"kv_cache_gib": 0.5}, 2**29)],
)
def test_kv_cache_on_cpu(values: dict[str, Any], num_bytes: int) -> None:
    assert ServeConfig(**values).kv_cache_bytes == num_bytes
