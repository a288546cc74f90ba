"""The Ray Serve configuration of the overlay `local` starts and answers without pods."""

import copy
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.local_ray import free_port, local_ray
from tests.fakes.overlays import K8S, NEEDS_KUBECTL, build, of_kind, serve_config
from tests.integration.k8s.hand_made_cluster import KEY, QUESTION, records

pytestmark = [pytest.mark.cluster, pytest.mark.slow, NEEDS_KUBECTL]
READY_S = 150.0


def for_this_machine(config: dict[str, Any], keys_file: Path) -> dict[str, Any]:
    """Adapt addresses, the keys file, cores and memory to this machine."""
    made = copy.deepcopy(config)
    made["http_options"] = {"host": "127.0.0.1", "port": free_port()}
    [app] = made["applications"]
    del app["args"]["engine_resource"], app["args"]["gateway_resource"]
    cluster = app["args"]["cluster"]
    cluster["keys_file"] = str(keys_file)
    [model] = cluster["models"]
    model |= {"cpu_threads": 1, "kv_cache_gib": 0.1}
    return made


def test_ray_serve_builds_and_runs_the_application(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(records(KEY))
    [service] = of_kind(build(K8S / "overlays" / "local"), "RayService")
    config = for_this_machine(serve_config(service), tmp_path / "keys.yaml")
    url = f"http://127.0.0.1:{config['http_options']['port']}"
    with local_ray(num_cpus=2):
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        serve.start(proxy_location="EveryNode", http_options=config["http_options"])
        # What `serve deploy`, and KubeRay through the dashboard, end in.
        controller: Any = _get_global_client()
        controller.deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
        try:
            wait_until_healthy(url)
            answer = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY).chat.completions.create(
                model="apar-tiny", messages=QUESTION, temperature=0
            )
            refused = httpx.get(f"{url}/v1/models")
            told = httpx.post(
                f"{url}/v1/chat/completions",
                headers={"Authorization": f"Bearer {KEY}"},
                json={"model": "apar-tiny", "messages": [{"role": "user", "content": "a" * 20001}]},
            )
        finally:
            serve.shutdown()

    assert "1." in (answer.choices[0].message.content or "")
    assert refused.status_code == 401
    # The overlay's `user_config`, which is the gateway's from its start.
    assert told.status_code == 400
    assert "20000" in told.text


def wait_until_healthy(url: str) -> None:
    from ray import serve

    deadline = time.monotonic() + READY_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, serve.status()
        time.sleep(0.5)
