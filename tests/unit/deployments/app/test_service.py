"""The running application: errors while Ray Serve starts."""

import pytest
from ray.exceptions import RaySystemError

from cluster.config import ClusterConfig, StartError
from cluster.config.model import ModelConfig
from deployments.app.service import running_service


def test_ray_serve_that_does_not_start_is_reported_and_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutdowns = []

    def start(**_: object) -> None:
        raise RaySystemError("HAProxy crashed during startup")

    monkeypatch.setattr("ray.serve.start", start)
    monkeypatch.setattr("ray.serve.shutdown", lambda: shutdowns.append(True))

    with (
        pytest.raises(StartError, match=r"Ray Serve could not start: .*HAProxy crashed"),
        running_service(ClusterConfig(models=(ModelConfig(name="a"),))),
    ):
        pass

    assert shutdowns == [True]
