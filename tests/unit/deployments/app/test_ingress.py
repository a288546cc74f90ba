"""Live settings of the gateway's deployment."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from deployments.app import ingress as ingress_module
from deployments.app.autoscaling import gateway_report
from deployments.app.ingress import IngressSettings
from deployments.config.keys import KeyConfig, hash_of
from deployments.config.limits import LimitsConfig
from deployments.config.logging import LoggingConfig
from deployments.config.routing import RoutingPolicy, RoutingSettings
from deployments.gateway.settings import GatewaySettings
from deployments.metrics.catalogue import SETTINGS_REFUSED
from deployments.routing.shared_router import ROUTERS
from deployments.wire.response import ResponseStart
from tests.fakes.bare_ingress import BareIngress
from tests.fakes.replicas import CHAT, JSON, FakeReplicas, settings_of


async def test_autoscaling_counts_only_requests_that_more_replicas_could_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))
    replicas.gate.clear()
    monkeypatch.setattr(ingress_module, "HandleCalls", lambda _: replicas)
    keys = (
        KeyConfig(name="bound", hash=hash_of("bound"), max_threads=1),
        KeyConfig(name="free", hash=hash_of("free")),
    )
    settings = settings_of(
        1, max_queued=9, keys=keys, logging=LoggingConfig(folder=tmp_path), metrics=False
    )
    (model,) = settings.models
    handle = SimpleNamespace(deployment_name=model.deployment)
    built = IngressSettings(gateway=settings, deployments=(model.deployment,))
    ingress = BareIngress(built, handle)
    transport = httpx.ASGITransport(app=await ingress.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        # One request of each key runs, and both keys have waiting ones.
        tasks = [
            asyncio.create_task(
                http.post(CHAT, json={}, headers={"authorization": f"Bearer {name}"})
            )
            for name in ("bound", "free", "bound", "bound", "bound", "free", "free")
        ]
        async with asyncio.timeout(60):
            waiting = {"bound": 3, "free": 2}
            while ingress._gateway.waiting()[model.deployment].waiting != waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reported = await ingress.record_autoscaling_stats()
        replicas.gate.set()
        await asyncio.gather(*tasks)

    assert reported == gateway_report({model.deployment: 2})


async def asked(ingress: Any, token: str) -> int:
    """Status of a completion request: 404 for a known key, as there are no models, else 401."""
    transport = httpx.ASGITransport(app=ingress._drain)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.post(
            "/v1/completions", json={"model": "m"}, headers={"authorization": f"Bearer {token}"}
        )
    return answer.status_code


async def test_new_settings_beside_a_broken_keys_file_leave_the_gateway_serving_the_old_keys(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([{"name": "a", "hash": hash_of("a")}]))
    gateway = GatewaySettings(
        models=(), keys_file=file, metrics=False, logging=LoggingConfig(folder=tmp_path / "logs")
    )
    built = IngressSettings(gateway=gateway, deployments=())
    ingress = BareIngress(built)
    await ingress.reconfigure(built.as_user_config())
    file.write_text("- {name: a, hash: nonsense}")
    limits = LimitsConfig(max_prompt_chars=5)
    changed = built.model_copy(update={"gateway": gateway.model_copy(update={"limits": limits})})

    await ingress.reconfigure(changed.as_user_config())

    assert [await asked(ingress, token) for token in ("a", "b")] == [404, 401]
    assert ingress._gateway._settings.limits == limits


async def test_settings_that_cannot_be_applied_are_applied_again_with_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gateway = GatewaySettings(
        models=(), metrics=False, logging=LoggingConfig(folder=tmp_path / "logs")
    )
    built = IngressSettings(gateway=gateway, deployments=())
    ingress = BareIngress(built)
    await ingress.reconfigure(built.as_user_config())
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    log = LoggingConfig(folder=in_the_way / "logs")
    changed = built.model_copy(update={"gateway": gateway.model_copy(update={"logging": log})})

    await ingress.reconfigure(changed.as_user_config())
    recorder = ingress._gateway.metrics.recorder
    refused = recorder.value(SETTINGS_REFUSED, source="user_config")
    in_the_way.unlink()
    await ingress.reconfigure(changed.as_user_config())

    assert refused
    assert recorder.value(SETTINGS_REFUSED, source="user_config") == 0
    assert (in_the_way / "logs").is_dir()


async def test_new_routing_settings_reach_the_routers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configured: list[RoutingSettings] = []
    monkeypatch.setattr(ROUTERS, "configure", configured.append)
    gateway = GatewaySettings(models=(), metrics=False, logging=LoggingConfig(folder=tmp_path))
    same = IngressSettings(gateway=gateway, deployments=())
    ingress = BareIngress(same)
    changed = same.model_copy(update={"routing": RoutingSettings(policy=RoutingPolicy.RANDOM)})
    for settings in (same, changed, changed):
        await ingress.reconfigure(settings.as_user_config())
    assert configured == [changed.routing]
