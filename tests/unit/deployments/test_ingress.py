"""The gateway's deployment takes new settings while it runs."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from cluster.keys_config import KeyConfig, hash_of
from cluster.logging_config import LoggingConfig
from cluster.routing_config import RoutingPolicy, RoutingSettings
from deployments import ingress as ingress_module
from deployments.answer_parts import AnswerStart
from deployments.autoscaling import gateway_report
from deployments.gateway_settings import GatewaySettings
from deployments.ingress import GatewayIngress, IngressSettings
from deployments.routing import registry
from tests.fakes.played_replicas import CHAT, JSON, PlayedReplicas, settings_of


async def test_autoscaling_is_told_only_of_what_more_replicas_could_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replicas = PlayedReplicas(AnswerStart(200, JSON, b"{}"))
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
    # Ray Serve's wrapper around the class is made to be awaited; the class itself is below it.
    ingress = GatewayIngress.__mro__[1](built, handle)
    transport = httpx.ASGITransport(app=await ingress.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        # One request of each key runs, and both keys have waiting ones.
        tasks = [
            asyncio.create_task(
                http.post(CHAT, json={}, headers={"authorization": f"Bearer {name}"})
            )
            for name in ("bound", "free", "bound", "bound", "bound", "free", "free")
        ]
        async with asyncio.timeout(10):
            waiting = {"bound": 3, "free": 2}
            while ingress._gateway.waiting()[model.deployment].waiting != waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reported = await ingress.record_autoscaling_stats()
        replicas.gate.set()
        await asyncio.gather(*tasks)

    assert reported == gateway_report({model.deployment: 2})


async def test_new_routing_settings_reach_the_routers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configured: list[RoutingSettings] = []
    monkeypatch.setattr(registry, "configure", configured.append)
    gateway = GatewaySettings(models=(), logging=LoggingConfig(folder=tmp_path))
    # Ray Serve's wrapper around the class is made to be awaited; the class itself is below it.
    same = IngressSettings(gateway=gateway, deployments=())
    ingress = GatewayIngress.__mro__[1](same)
    changed = same.model_copy(update={"routing": RoutingSettings(policy=RoutingPolicy.RANDOM)})
    for settings in (same, changed, changed):
        await ingress.reconfigure(settings.as_user_config())
    assert configured == [changed.routing]
