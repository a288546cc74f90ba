"""Redis starts with the command of its pod."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from cluster.local_ray import free_port
from tests.fakes.overlays import K8S, NEEDS_KUBECTL, Pod, build, pods
from tests.fakes.tools import needs

pytestmark = [
    pytest.mark.cluster,
    NEEDS_KUBECTL,
    needs("redis-server"),
]


@pytest.fixture
def redis() -> Pod:
    [pod] = [
        pod
        for pod in pods(build(K8S / "overlays" / "head-fault-tolerance"))
        if "redis" in pod.owner
    ]
    return pod


def test_it_asks_for_the_password_and_keeps_what_it_was_told(redis: Pod, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "data").mkdir()
    # Its volumes are folders here, and its port is a free one.
    environment = os.environ | {"REDIS_PASSWORD": "se cret"}

    def here(command: str) -> list[str]:
        moved = command.replace("/tmp/", f"{tmp_path}/").replace("/data", f"{tmp_path}/data")
        return ["sh", "-c", moved.replace("redis-cli", f"redis-cli -p {port}")]

    def ping() -> bool:
        probe = redis.container["readinessProbe"]["exec"]["command"][-1]
        return subprocess.run(here(probe), env=environment, check=False).returncode == 0

    def ask(*command: str, password: str) -> str:
        said = subprocess.run(
            ["redis-cli", "-p", str(port), *command],
            env=os.environ | {"REDISCLI_AUTH": password},
            capture_output=True,
            text=True,
            check=False,
        )
        return said.stdout.strip()

    for expected in ("", "kept"):
        [start] = redis.container["args"]
        with subprocess.Popen([*here(f"{start} --port {port}")], env=environment) as server:
            deadline = time.monotonic() + 120
            while not ping():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            found = ask("get", "state", password="se cret")
            refused = ask("get", "state", password="wrong")
            ask("set", "state", "kept", password="se cret")
            # As a node that loses power.
            server.kill()

        assert found == expected
        assert "NOAUTH" in refused
