"""The overlay `local` in hand-made pods, deployed as KubeRay does and used by clients."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.fakes.overlays import K8S, NEEDS_KUBECTL, build, of_kind, pods, serve_config
from tests.integration.k8s.hand_made_cluster import (
    KEY,
    READY_S,
    Cluster,
    answer_of,
    records,
    wait_for_answer,
)
from tests.integration.k8s.pods_by_hand import cannot_make_pods, hand_made_pods

REASON = cannot_make_pods()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    NEEDS_KUBECTL,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

NEW_KEY = "apar-bob"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    objects = build(K8S / "overlays" / "local")
    templates = [pod for pod in pods(objects) if pod.ray_start is not None]
    folder = tmp_path_factory.mktemp("pods")
    with hand_made_pods(objects, folder, records(KEY)) as made:
        head = made.start(templates[0])
        try:
            head.wait_until("readinessProbe")
            engine = made.start(templates[1])
            engine.wait_until("livenessProbe")
            running = Cluster(made, head, engine)
            running.deploy(serve_config(of_kind(objects, "RayService")[0]))
            engine.wait_until("readinessProbe", timeout_s=READY_S)
        except BaseException:
            made.keep_logs(Path("out") / "pods")
            raise
        yield running


def test_a_pod_is_confined_as_its_template_says(cluster: Cluster) -> None:
    script = "id -u; touch /x /etc/x; touch /tmp/x && echo wrote; grep CapEff /proc/self/status"

    done = cluster.engine.run(["bash", "-c", script], timeout_s=20)

    assert done.stdout.split() == ["10001", "wrote", "CapEff:", "0" * 16]
    assert done.stderr.count("Read-only file system") == 2


def test_a_chat_is_answered_to_whoever_has_a_key(cluster: Cluster) -> None:
    assert "1." in answer_of(cluster.engine)
    with pytest.raises(openai.AuthenticationError):
        answer_of(cluster.engine, key="apar-nobody")


def test_the_engine_is_where_its_resource_is_and_all_pods_pass_their_probes(
    cluster: Cluster,
) -> None:
    assert set(cluster.replicas("Replica-apar-tiny").values()) == {cluster.engine.address}
    for pod in (cluster.head, cluster.engine):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert pod.passes(probe), (pod.name, probe)


def test_metrics_are_where_the_pod_monitors_look(cluster: Cluster) -> None:
    deadline = time.monotonic() + 30
    while "vllm:" not in cluster.engine.get("/metrics", "metrics").text:
        assert time.monotonic() < deadline
        time.sleep(1)
    assert cluster.head.get("/metrics", "ray-metrics").is_success


def test_a_changed_secret_reaches_the_running_gateway(cluster: Cluster) -> None:
    with pytest.raises(openai.AuthenticationError):
        answer_of(cluster.engine, key=NEW_KEY)

    (cluster.pods.keys / "keys.yaml").write_text(records(KEY, NEW_KEY))
    time.sleep(2)

    assert "1." in answer_of(cluster.engine, key=NEW_KEY)


def test_a_changed_user_config_changes_the_gateway_and_restarts_nothing(cluster: Cluster) -> None:
    before = [cluster.replicas(name) for name in ("Gateway", "Replica-apar-tiny")]
    [app] = cluster.config["applications"]
    changed = app | {
        "deployments": [{"name": "Gateway", "user_config": {"limits": {"max_prompt_chars": 5}}}]
    }
    whole = cluster.config

    cluster.deploy(whole | {"applications": [changed]})
    refusal = wait_for_answer(cluster.engine, refused=True)
    after = [cluster.replicas(name) for name in ("Gateway", "Replica-apar-tiny")]
    assert "characters" in refusal
    assert after == before
    cluster.deploy(whole)
    assert "1." in wait_for_answer(cluster.engine, refused=False)


def test_a_pod_that_is_to_end_hands_over_and_no_request_fails(cluster: Cluster) -> None:
    second = cluster.pods.start(cluster.engine.pod)
    second.wait_until("livenessProbe")
    ready = [cluster.engine]
    stop = threading.Event()
    answers: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            # As a Service does it: a pod that is about to end gets no new connections.
            answers.append(answer_of(ready[-1]))

    hook = cluster.engine.pod.container["lifecycle"]["preStop"]["exec"]["command"]
    with ThreadPoolExecutor(3) as executor:
        asking = executor.submit(ask)
        draining = executor.submit(cluster.engine.run, hook, 300)
        try:
            for _ in itertools.takewhile(lambda _: not second.passes("readinessProbe"), range(180)):
                time.sleep(0.5)
            ready.append(second)
            drained = draining.result()
            before = len(answers)
            cluster.engine.end()
            deadline = time.monotonic() + 30
            while len(answers) < before + 2 and not asking.done():
                assert time.monotonic() < deadline
                time.sleep(0.2)
            stop.set()
            asking.result()
        except BaseException:
            cluster.pods.keep_logs(Path("out") / "pods")
            raise
        finally:
            stop.set()

    assert drained.returncode == 0, drained.stderr
    assert drained.stdout.strip() == "0 replicas left"
    assert set(cluster.replicas("Replica-apar-tiny").values()) == {second.address}
    assert len(answers) >= 3
    assert len(set(answers)) == 1
