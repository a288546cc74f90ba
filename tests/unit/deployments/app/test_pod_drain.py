"""The preStop hook counts its pod's replicas and reports why it cannot drain."""

import subprocess
import sys
import time

import pytest

from deployments.app import pod_drain
from deployments.app.pod_drain import replicas_here


def wait_for(number: int) -> None:
    deadline = time.monotonic() + 50
    while replicas_here() != number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_replicas_are_found_by_their_process_titles_until_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Replicas of other tests may run on this machine.
    title = f"ray::OnlyHere{time.monotonic_ns()}:"
    monkeypatch.setattr(pod_drain, "REPLICA_TITLE", title)
    command = ["bash", "-c", f"exec -a '{title}apar:Gateway' sleep 60"]
    with subprocess.Popen(command) as replica:
        wait_for(1)

        replica.kill()

        # A zombie counts as ended.
        wait_for(0)


@pytest.mark.parametrize(
    ("environment", "said"),
    [({}, "RAY_ADDRESS"), ({"RAY_ADDRESS": "127.0.0.1:1"}, "POD_IP")],
)
def test_a_pod_without_addresses_is_an_error(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["pod_drain", "--seconds", "1"])
    for name in ("RAY_ADDRESS", "POD_IP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(SystemExit, match=f"not drained: .*{said}"):
        pod_drain.main()
