"""A head with its state in Redis rejoins its cluster after a crash; engines keep running."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.overlays import K8S, NEEDS_KUBECTL, build, of_kind, pods, serve_config
from tests.integration.k8s.hand_made_cluster import KEY, READY_S, Cluster, answer_of, records
from tests.integration.k8s.pods_by_hand import NETWORK, cannot_make_pods, hand_made_pods

REASON = cannot_make_pods("redis-server")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    NEEDS_KUBECTL,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
PASSWORD = "of-the-test"
REDIS_PORT = 6380


@contextmanager
def redis(folder: Path) -> Iterator[None]:
    """Run Redis at the address of its Service."""
    command = ["redis-server", "--port", str(REDIS_PORT), "--bind", f"{NETWORK}.1"]
    command += ["--requirepass", PASSWORD, "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            yield
        finally:
            server.terminate()


def test_a_head_that_dies_comes_back_to_its_engines(tmp_path: Path) -> None:
    objects = build(K8S / "overlays" / "head-fault-tolerance")
    templates = [pod for pod in pods(objects) if pod.ray_start is not None]
    [service] = of_kind(objects, "RayService")
    assert service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    # What KubeRay makes of these options.
    parameters = (templates[0].ray_start or {}) | {"redis-password": PASSWORD}
    head_template = replace(templates[0], ray_start=parameters)
    with hand_made_pods(objects, tmp_path, records(KEY)) as made, redis(tmp_path):
        try:
            head = made.start(
                head_template,
                RAY_REDIS_ADDRESS=f"redis://{NETWORK}.1:{REDIS_PORT}",
                RAY_external_storage_namespace="apar",
            )
            head.wait_until("readinessProbe")
            engine = made.start(templates[1], RAY_gcs_rpc_server_reconnect_timeout_s="600")
            engine.wait_until("livenessProbe")
            cluster = Cluster(made, head, engine)
            cluster.deploy(serve_config(service))
            engine.wait_until("readinessProbe", timeout_s=READY_S)
            before = cluster.replicas("Replica-apar-tiny")

            head.kill()
            made.start_again(head)
            head.wait_until("readinessProbe")
            engine.wait_until("readinessProbe", timeout_s=READY_S)

            assert "1." in answer_of(engine)
            assert engine.process is not None
            assert engine.process.poll() is None
            # The engine has not been started again.
            assert cluster.replicas("Replica-apar-tiny") == before
        except BaseException:
            made.keep_logs(Path("out") / "pods-redis")
            raise
