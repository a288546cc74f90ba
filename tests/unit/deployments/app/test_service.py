"""The running application: errors while Ray Serve starts."""

import pytest
from ray.exceptions import RaySystemError
from ray.serve.config import HTTPOptions

from deployments.app.service import running_service
from deployments.config import ClusterConfig, StartError
from deployments.config.model import ModelConfig


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


@pytest.mark.parametrize(
    ("ray_address", "bound"), [(None, "127.0.0.1"), ("10.0.0.1:6379", "10.0.0.2")]
)
def test_the_gateways_own_port_is_on_loopback_of_a_private_cluster(
    monkeypatch: pytest.MonkeyPatch, ray_address: str | None, bound: str
) -> None:
    hosts = []

    def start(*, http_options: HTTPOptions, **_: object) -> None:
        hosts.append(http_options.host)
        raise RaySystemError("far enough")

    monkeypatch.setattr("ray.serve.start", start)
    monkeypatch.setattr("ray.serve.shutdown", lambda: None)
    config = ClusterConfig(host="10.0.0.2", allow_anonymous=True, ray_address=ray_address)

    with pytest.raises(StartError), running_service(config):
        pass

    assert hosts == [bound]
