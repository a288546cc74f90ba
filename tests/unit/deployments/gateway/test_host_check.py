"""Requests for other hosts at a server on a loopback address (DNS rebinding)."""

import pytest
from pydantic import ValidationError

from deployments.config import ClusterConfig
from deployments.gateway.host_check import HostCheck
from deployments.gateway.settings import gateway_settings
from tests.fakes.replicas import CHAT, answering, client_of, gateway_of


def names_for(host: str, *allowed: str) -> tuple[str, ...] | None:
    config = ClusterConfig.model_validate(
        {"host": host, "allowed_hosts": allowed, "allow_anonymous": host == "0.0.0.0"}
    )
    return gateway_settings(config).allowed_hosts


async def status_of(host: str | None, names: tuple[str, ...] | None, path: str = CHAT) -> int:
    http = client_of(HostCheck(gateway_of(answering(), page=True), names, lambda: None))
    method = "POST" if path == CHAT else "GET"
    request = http.build_request(method, path, content=b"{}")
    del request.headers["host"]
    if host is not None:
        request.headers["host"] = host
    return (await http.send(request)).status_code


OWN = (
    "localhost LOCALHOST:8000 localhost. me.localhost:80 127.0.0.1:80 127.9.9.9 [::1]:80 [::1] ::1 "
    "0.0.0.0:8000 [::]:8000"
)
OTHERS = (
    "evil.example evil.example:8000 127.0.0.1.evil.example localhost.evil.example 10.0.0.1:8000 "
    "[fe80::1]:80 notlocalhost evil.example:127.0.0.1 [::1].evil [127.0.0.1"
)


@pytest.mark.parametrize("host", [*OWN.split(), "Gpu.Example", "gpu.example:443", None])
async def test_loopback_names_and_allowed_ones_are_answered(host: str | None) -> None:
    assert await status_of(host, names_for("127.0.0.1", "GPU.example")) == 200


@pytest.mark.parametrize("host", [*OTHERS.split(), ""])
@pytest.mark.parametrize("path", [CHAT, "/", "/health", "/nowhere"])
async def test_requests_for_other_hosts_are_refused_everywhere(host: str, path: str) -> None:
    assert await status_of(host, names_for("localhost"), path) == 421


async def test_servers_that_others_reach_answer_to_every_name() -> None:
    assert await status_of("gpu.example", names_for("0.0.0.0")) == 200


async def test_the_error_names_the_host_and_the_setting() -> None:
    num_refused = []
    check = HostCheck(gateway_of(answering()), (), lambda: num_refused.append(1))

    answer = await client_of(check).post(CHAT, json={}, headers={"host": "evil.example"})

    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("host_not_allowed", "host")
    assert "`Host: evil.example`" in error["message"]
    assert "`allowed_hosts`" in error["message"]
    assert num_refused == [1]


@pytest.mark.parametrize("name", ["https://gpu.example", "gpu.example:80", "gpu example", ""])
def test_an_allowed_host_is_a_name_only(name: str) -> None:
    with pytest.raises(ValidationError, match="no name of a host"):
        ClusterConfig.model_validate({"allowed_hosts": [name]})
