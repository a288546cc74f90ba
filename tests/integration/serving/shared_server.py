"""The server that most tests of this folder share."""

import time
from pathlib import Path
from typing import Any

from deployments.config.keys import KeyConfig, hash_of
from deployments.gateway.rate_limits import WINDOW_S
from tests.fakes.otlp_collector import Collector
from tests.integration.serving.apar_process import TINY, TOKEN, Server

MAX_CONCURRENCY = 224
MAX_QUEUED = 16
MAX_PROMPT_CHARS = 8_000_000
# The requests with which a test reaches a rate must fall into one minute of the clock.
MINUTE_LEFT_S = 20.0
SECRETS = {
    "APAR_TEST_CACHE_SECRET": "sentinel-of-the-cache",
    "APAR_TEST_COLLECTOR": "sentinel-of-the-collector",
}
MODEL: dict[str, Any] = TINY | {
    "max_concurrency": MAX_CONCURRENCY,
    "max_queued_requests": MAX_QUEUED,
    "threads_per_request": 1.0,
    "kv_cache_gib": 0.5,
    "replay": True,
    "engine": TINY["engine"] | {"enable_prompt_tokens_details": True},
}

REPLICATED = MODEL | {"replicas": 2, "max_concurrency": 32}


def key(name: str, **fields: Any) -> dict[str, Any]:
    """Return a key whose token is its name."""
    record = KeyConfig.model_validate({"name": name, "hash": hash_of(name)} | fields)
    return record.model_dump(mode="json", exclude_unset=True)


KEYS = (
    key(TOKEN),
    key("other"),
    key("few", requests_per_minute=2, tokens_per_minute=100_000),
    key("once", requests_per_minute=1),
    key("frugal", tokens_per_minute=150),
    key("narrow", max_threads=1),
    key("short", max_prompt_chars=20),
    key("elsewhere", models=[]),
)


def wait_for_a_new_minute() -> None:
    """Wait if this minute of the clock is nearly over: rates allow more in the next one."""
    left_s = WINDOW_S - time.time() % WINDOW_S
    if left_s < MINUTE_LEFT_S:
        time.sleep(left_s)


class SharedServer:
    """A server, the collector of its traces, and a way to change its configuration."""

    def __init__(self, server: Server, collector: Collector, fields: dict[str, Any]) -> None:
        self.server = server
        self.collector = collector
        self._fields = fields
        self._models: tuple[dict[str, Any], ...] = (MODEL,)
        self._keys: tuple[dict[str, Any], ...] = KEYS

    def write(
        self,
        *models: dict[str, Any],
        keys: tuple[dict[str, Any], ...] = KEYS,
        **fields: Any,
    ) -> None:
        """Write a configuration with these models (and keys) for the next rollout."""
        self._models, self._keys = models, keys
        self.server.write(*models, **self._fields | {"keys": list(keys)} | fields)

    def roll_out(self, *models: dict[str, Any], keys: tuple[dict[str, Any], ...] = KEYS) -> str:
        """Roll out these models and keys; return what the server prints about it."""
        self.write(*models, keys=keys)
        return self.server.roll_out()

    def with_replicas(self, number: int) -> Server:
        """Return the server with the usual configuration and one or two replicas."""
        model = MODEL if number == 1 else REPLICATED
        if (self._models, self._keys) != ((model,), KEYS):
            said = self.roll_out(model)
            assert "Rolled out" in said, said
        self.server.wait_for_replicas(number)
        return self.server


def configuration(logs: Path, collector: Collector) -> dict[str, Any]:
    """Return the configuration of the shared server apart from its models."""
    return {
        "keys": list(KEYS),
        "limits": {
            "max_prompt_chars": MAX_PROMPT_CHARS,
            "cache_secret": {"env": "APAR_TEST_CACHE_SECRET"},
        },
        "logging": {"folder": str(logs)},
        "metrics": {"port": 0},
        "tracing": {
            "endpoint": collector.endpoint,
            "export_s": 0.2,
            "headers": {"authorization": {"env": "APAR_TEST_COLLECTOR"}},
        },
        "retries": {"replica_wait_s": 200},  # a busy machine may need minutes to start two replicas
        "drain_s": 300,  # the streams of test_shutdown.py end, however busy the machine
    }
