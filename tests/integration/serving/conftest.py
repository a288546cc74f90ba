"""One server for all tests that need not start their own."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.fakes.otlp_collector import http_collector
from tests.integration.serving.apar_process import Server, serving
from tests.integration.serving.shared_server import MODEL, SECRETS, SharedServer, configuration


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        for name, secret in SECRETS.items():
            patched.setenv(name, secret)
        collector = stack.enter_context(http_collector())
        common = configuration(tmp_path_factory.mktemp("logs"), collector)
        folder = tmp_path_factory.mktemp("shared")
        server = stack.enter_context(serving(folder, MODEL, **common))
        yield SharedServer(server, collector, common)


@pytest.fixture
def server(shared: SharedServer) -> Server:
    """Return the shared server with one replica."""
    return shared.with_replicas(1)


@pytest.fixture
def replicated(shared: SharedServer) -> Server:
    """Return the shared server with two replicas."""
    return shared.with_replicas(2)
