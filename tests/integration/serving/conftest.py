"""The application that the integration tests talk to, started once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.config.model import ModelConfig
from cluster.local_ray import free_port, local_ray
from tests.integration.serving.running_application import (
    MAX_CONCURRENCY,
    MAX_QUEUED,
    RunningApplication,
)


@pytest.fixture(scope="package")
def application() -> Iterator[RunningApplication]:
    model = ModelConfig(
        checkpoint="apar-tiny",
        max_concurrency=MAX_CONCURRENCY,
        max_queued_requests=MAX_QUEUED,
        threads_per_request=1.0,
        cpu_threads=1,
        kv_cache_gib=0.5,
    )
    config = ClusterConfig(port=free_port(), models=(model,))
    with local_ray(num_cpus=2):
        from ray import serve

        from deployments.app.ingress import APPLICATION
        from deployments.app.service import running

        with running(config) as url:
            replica = serve.get_deployment_handle(model.deployment_name, APPLICATION)
            # No event loop runs here, so the handle brings its own.
            replica._init(_run_router_in_separate_loop=True)

            def load() -> dict[str, Any]:
                # Ray refuses to block where an event loop runs, as in asynchronous tests.
                with ThreadPoolExecutor(1) as executor:
                    answer = executor.submit(
                        lambda: replica.load.remote().result(timeout_s=30)
                    ).result()
                return dict(answer)

            yield RunningApplication(url, "apar-tiny", load)
