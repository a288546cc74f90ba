"""Arguments of KubeRay's serveConfigV2, and the application built from them."""

from pathlib import Path
from typing import Any

import pytest

from deployments.app.kuberay import application, arguments_of
from deployments.config import ConfigError
from deployments.serve_flags import SERVE_FLAGS

TINY: dict[str, Any] = {"checkpoint": "apar-tiny", "cpu_threads": 2}
OPEN: dict[str, Any] = {"allow_anonymous": True, "models": [TINY], "drain_s": 7}


@pytest.fixture(autouse=True)
def serve_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVE_FLAGS.items():
        monkeypatch.setenv(name, value)


def built(**changes: Any) -> list[Any]:
    """The deployments of the application: the gateway, then the replicas."""
    gateway: Any = application({"device": "cpu", "cluster": OPEN} | changes)._bound_deployment
    return [gateway, *(each._bound_deployment for each in gateway.init_args[1:])]


def test_the_application_follows_the_cluster_configuration() -> None:
    gateway, replica = built()

    assert replica.name == "Replica-apar-tiny"
    assert replica._deployment_config.max_ongoing_requests == 64
    assert replica._deployment_config.graceful_shutdown_timeout_s == 7
    assert replica._deployment_config.max_surge_percent == 0
    assert gateway.init_args[0].gateway.models[0].name == "apar-tiny"
    environment = replica.ray_actor_options["runtime_env"]["env_vars"]
    assert environment["OMP_NUM_THREADS"] == "2"


def test_the_device_comes_from_the_arguments_and_not_from_the_head_pod() -> None:
    _, on_cpu = built()
    _, on_gpu = built(device="gpu")

    assert on_cpu.ray_actor_options["num_gpus"] == 0
    assert on_gpu.ray_actor_options["num_gpus"] == 1


def test_an_engine_takes_one_unit_of_the_engine_resource() -> None:
    _, replica = built(engine_resource="engine")

    assert replica.ray_actor_options["resources"] == {"engine": 1}


def test_the_gateway_stays_on_pods_with_its_resource() -> None:
    anywhere, _ = built()
    gateway, replica = built(gateway_resource="gateway")

    assert anywhere.ray_actor_options["resources"] == {}
    assert gateway.ray_actor_options["resources"] == {"gateway": 0.001}
    assert "gateway" not in replica.ray_actor_options["resources"]


def test_with_spare_room_a_new_engine_starts_before_the_old_one_ends() -> None:
    _, replica = built(spare_room=True)

    assert replica._deployment_config.max_surge_percent == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"cluster": OPEN}, "args.device: Field required"),
        ({"device": "tpu", "cluster": OPEN}, "args.device: .*'cpu' or 'gpu'"),
        ({"device": "cpu", "cluster": OPEN, "replicas": 2}, "args.replicas: Extra inputs"),
        ({"device": "cpu", "cluster": OPEN | {"prot": 1}}, "args.cluster.prot: Extra inputs"),
        ({"device": "cpu", "cluster": [TINY]}, "args.cluster: a mapping"),
        ({"device": "cpu", "cluster": OPEN | {"port": 80}}, "args.cluster.port: .*http_options"),
        ({"device": "cpu", "cluster": OPEN | {"host": "::"}}, "args.cluster.host: .*http_options"),
        ({"device": "cpu", "cluster": OPEN | {"ray_address": "auto"}}, "args.cluster.ray_address"),
        ({"device": "cpu", "cluster": {"models": [TINY]}}, "requests need API keys"),
        ({"device": "cpu", "cluster": OPEN | {"models": [{}]}}, "apar-tiny: set `cpu_threads`"),
    ],
)
def test_invalid_arguments_are_named_before_anything_starts(
    args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments_of(args)


def test_a_missing_keys_file_is_named(tmp_path: Path) -> None:
    cluster = {"models": [TINY], "keys_file": str(tmp_path / "keys.yaml")}

    with pytest.raises(ConfigError, match=r"keys\.yaml"):
        application({"device": "cpu", "cluster": cluster})


def test_a_pod_without_the_flags_of_ray_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")

    with pytest.raises(ConfigError, match="RAY_SERVE_ENABLE_HA_PROXY=1"):
        application({"device": "cpu", "cluster": OPEN})
