"""compose.yaml is valid and hardened, and refers to existing files. It is not run here."""

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from compose_spec import PyCompose

from cluster.cli.main import app
from deployments.config import load_config
from deployments.gateway.health import LIVE_PATH

REPOSITORY = Path(__file__).parents[3]
SERVED = REPOSITORY / "containers" / "serve.yaml"


def composed() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())
    return loaded


def problems_of(compose: dict[str, Any]) -> list[str]:
    """Problems of a compose file: invalid fields, missing files, missing hardening."""
    try:
        PyCompose.from_yaml(yaml.safe_dump(compose)).validate()
    except ValueError as error:
        return [str(error)]
    found = []
    for name, service in compose["services"].items():
        tag = service["image"].rpartition(":")[2]
        if "/" in tag or tag in (service["image"], "latest"):
            found.append(f"{name}: {service['image']} is not pinned")
        if not service.get("read_only") or service.get("cap_drop") != ["ALL"]:
            found.append(f"{name}: is not hardened")
        for port in service.get("ports", []):
            if not str(port).startswith("127.0.0.1:"):
                found.append(f"{name}: others reach {port}")
        for volume in service.get("volumes", []):
            source, _, target = volume.partition(":")
            if source.startswith(".") and not (REPOSITORY / source).exists():
                found.append(f"{name}: {source} does not exist")
            if source.startswith(".") and not target.endswith(":ro"):
                found.append(f"{name}: may write to {source}")
            if not source.startswith(".") and source not in compose["volumes"]:
                found.append(f"{name}: there is no volume {source}")
        for other in service.get("depends_on", {}):
            if other not in compose["services"]:
                found.append(f"{name}: there is no service {other}")
        found += (f"{name}: {problem}" for problem in problems_of_network(compose, service))
    # Ray Serve executes the HAProxy wrapper there; Docker's default is noexec.
    [options] = [each for each in compose["services"]["cluster"]["tmpfs"] if "/tmp:" in each]
    if "exec" not in options.removeprefix("/tmp:").split(","):
        found.append(f"cluster: nothing in /tmp can be started: {options}")
    return found


def problems_of_network(compose: dict[str, Any], service: dict[str, Any]) -> list[str]:
    """Problems of a service that joins the network of another one."""
    mode, _, owner = service.get("network_mode", "").partition(":")
    if mode != "service":
        return []
    # A restarted container has a new network; services that joined the old one lose theirs.
    if not compose["services"].get(owner, {}).get("image", "").startswith("registry.k8s.io/pause:"):
        return [f"loses its network when {owner} restarts"]
    return ["has ports, which its network publishes"] if "ports" in service else []


def test_compose_has_no_problems() -> None:
    assert problems_of(composed()) == []


@pytest.mark.parametrize(
    ("service", "field", "value", "problem"),
    [
        ("cluster", "shmsize", "1g", "shmsize"),
        ("cluster", "stop_grace_period", "soon", "soon"),
        ("network", "ports", ["8000:8000"], "others reach 8000:8000"),
        ("cluster", "ports", ["127.0.0.1:8000:8000"], "has ports, which its network publishes"),
        ("cluster", "tmpfs", ["/tmp:mode=1777,size=2g"], "nothing in /tmp can be started"),
        ("prometheus", "network_mode", "service:cluster", "when cluster restarts"),
        ("grafana", "image", "grafana/grafana", "grafana/grafana is not pinned"),
        ("grafana", "image", "grafana/grafana:latest", "is not pinned"),
        ("prometheus", "read_only", False, "is not hardened"),
        ("prometheus", "volumes", ["./nowhere:/etc:ro"], "./nowhere does not exist"),
        ("prometheus", "volumes", ["./dashboards:/etc"], "may write to ./dashboards"),
        ("prometheus", "volumes", ["metrics:/prometheus"], "metrics"),
        ("alertmanager", "depends_on", {"clutser": {"condition": "service_started"}}, "clutser"),
    ],
)
def test_a_mistake_is_found(service: str, field: str, value: Any, problem: str) -> None:
    compose = composed()
    compose["services"][service][field] = value

    assert any(problem in each for each in problems_of(compose)), problems_of(compose)


def test_the_cluster_serves_with_the_mounted_settings() -> None:
    config = load_config(SERVED, {}, {})
    services = composed()["services"]
    cluster = services["cluster"]

    assert f"127.0.0.1:{config.port}:{config.port}" in services["network"]["ports"]
    assert config.host == "0.0.0.0"
    assert f":{config.port}/ready'" in cluster["healthcheck"]["test"][-1]
    # Draining must be over before the container is killed.
    assert int(cluster["stop_grace_period"].removesuffix("s")) > config.drain_s
    dockerfile = (REPOSITORY / cluster["build"]["dockerfile"]).read_text()
    assert f":{config.port}{LIVE_PATH}'" in dockerfile


def test_the_load_is_a_valid_command_for_the_cluster() -> None:
    services = composed()["services"]
    load, cluster = services["load"], services["cluster"]
    _, *command = load["command"]

    def follow(group: Any, arguments: list[str]) -> dict[str, Any]:
        """Parse a command line with the real commands; returns the last one's values."""
        context = group.make_context(None, list(arguments))
        if not isinstance(group, typer.core.TyperGroup):
            return dict(context.params)
        _, chosen, rest = group.resolve_command(context, context._protected_args + context.args)
        return follow(chosen, rest)

    values = follow(typer.main.get_command(app), command)
    config = load_config(SERVED, {}, {})
    assert values["target"] == f"http://127.0.0.1:{config.port}"
    assert (values["prompts"], values["rate"], values["concurrency"]) == ("held-out", 0.5, None)
    # Requests need no key, and the load starts again when a run has ended.
    assert config.allow_anonymous
    assert load["image"] == cluster["image"]
    assert load["restart"] == "unless-stopped"
    assert load["depends_on"] == {"cluster": {"condition": "service_healthy"}}


def test_prometheus_scrapes_the_address_of_the_cluster() -> None:
    compose = composed()["services"]
    scraped = yaml.safe_load(
        (REPOSITORY / "dashboards/prometheus/prometheus-single-machine.yml").read_text()
    )
    [job] = scraped["scrape_configs"]

    # All share one network, so loopback is the same for all.
    for name in ("cluster", "load", "prometheus", "alertmanager", "grafana"):
        assert compose[name]["network_mode"] == "service:network"
    port = load_config(SERVED, {}, {}).metrics.port
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
    assert compose["grafana"]["environment"]["PROMETHEUS_URL"] == "http://127.0.0.1:9090"


def test_grafana_mounts_the_provisioned_dashboards_and_data_source() -> None:
    grafana = composed()["services"]["grafana"]
    mounts = dict(volume.removesuffix(":ro").split(":") for volume in grafana["volumes"])
    provisioning = REPOSITORY / "dashboards" / "grafana" / "provisioning"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "apar.yaml").read_text())[
        "providers"
    ]
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]

    assert mounts["./dashboards/grafana/provisioning"] == "/etc/grafana/provisioning"
    assert mounts["./dashboards/grafana/json"] == provider["options"]["path"]
    assert source["url"].strip("${}") in grafana["environment"]
