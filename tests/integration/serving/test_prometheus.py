"""Prometheus and Alertmanager with the shipped rules watch a loaded server."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.rules import RECORDS, RULES, configured, rule_groups, shipped, write_yaml
from tests.fakes.waiting import wait_until
from tests.integration.prometheus_process import (
    Prometheus,
    Webhook,
    alertmanager,
    needs_alertmanager,
    needs_prometheus,
    prometheus,
    webhook,
)
from tests.integration.serving.apar_process import REPLICA, TINY, Server, serving
from tests.integration.serving.load_clients import PROMPTS, chat

pytestmark = [pytest.mark.cluster, pytest.mark.slow, needs_prometheus, needs_alertmanager]
MODEL = "apar-tiny"
NUM_REQUESTS = 16
NUM_CLIENTS = 4
WINDOW_S = 60.0
SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass
class Watched:
    """A loaded server, its Prometheus, and the webhook of its alerts."""

    server: Server
    prometheus: Prometheus
    webhook: Webhook


def quick_rules() -> list[dict[str, Any]]:
    """Return the shipped rules with alerts that hold for seconds instead of minutes."""
    groups = rule_groups()
    for rule in [rule for group in groups for rule in group["rules"] if "for" in rule]:
        rule["for"] = f"{int(rule['for'][:-1]) * SECONDS[rule['for'][-1]] * 10}ms"
    return groups


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """Start two replicas; Prometheus finds them in the server's targets file."""
    targets, routing, config = (folder / name for name in ("targets.json", "am.yml", "p.yml"))
    write_yaml(folder / "rules.yml", {"groups": quick_rules()})
    scraping = configured(
        "prometheus-single-machine.yml", file_sd_configs=[{"files": [str(targets)]}]
    )
    notifying = shipped("alertmanager.yml")
    notifying["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    with webhook() as receiver:
        for each in notifying["receivers"]:
            each["webhook_configs"][0]["url"] = receiver.url
        write_yaml(routing, notifying)
        metrics = {"port": 0, "targets_file": str(targets)}
        with (
            alertmanager(routing, folder) as address,
            serving(folder, TINY | {"replicas": 2}, metrics=metrics) as server,
        ):
            [alerting] = scraping["alerting"]["alertmanagers"]
            alerting["static_configs"] = [{"targets": [address]}]
            write_yaml(config, scraping | {"rule_files": ["rules.yml"]})
            with prometheus(config, folder) as reader:
                yield Watched(server, reader, receiver)


async def answer(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """Return the `apar` object of an answer."""
    body = chat(PROMPTS[number % len(PROMPTS)], MODEL)
    if number % 2:
        whole = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
        return dict(whole.json()["apar"])
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = [line async for line in stream.aiter_lines() if line]
    last = json.loads(lines[-2].removeprefix("data: "))  # before [DONE]
    return dict(last["apar"])


async def load(url: str) -> list[dict[str, Any]]:
    """Send all requests from a few clients; return what `answer` returns for each."""
    places = asyncio.Semaphore(NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(number: int) -> dict[str, Any]:
            async with places:
                return await answer(client, number)

        return list(await asyncio.gather(*map(one, range(NUM_REQUESTS))))


@asynccontextmanager
async def loaded(folder: Path) -> AsyncIterator[tuple[Watched, list[dict[str, Any]], list[float]]]:
    """Yield the server after its load, the `apar` objects of the answers, and their seconds.

    The seconds are those of the request log: a client may read its clock before the gateway does.
    """
    with watched(folder) as all_of_it:
        all_of_it.prometheus.wait_for("count(apar_forks_total == 0) == 6")
        parts = await load(all_of_it.server.url)
        wait_until(lambda: len(answered(all_of_it.server)) == NUM_REQUESTS)
        seconds = [record["total_s"] for record in answered(all_of_it.server)]
        attended = total(parts, "attended_tokens")
        all_of_it.prometheus.wait_for(f"sum(apar_attended_tokens_total) == {attended}")
        all_of_it.prometheus.wait_for("apar_replicas == 2")
        yield all_of_it, parts, seconds


def answered(server: Server) -> list[dict[str, Any]]:
    """Return the log records of the answers."""
    return [record for record in server.records() if record["generated_tokens"]]


def total(parts: list[dict[str, Any]], field: str) -> int:
    """Sum a field."""
    return sum(part[field] for part in parts)


def check_targets(reader: Prometheus) -> None:
    """Check that the node is found once, under the job of the rules."""
    (target,) = reader.targets()
    assert target["health"] == "up", target
    assert target["labels"]["job"] == "apar"


def check_rules(reader: Prometheus) -> None:
    """Check that every rule can be evaluated and every recorded series exists."""
    rules = reader.rules()
    assert len(rules) == len(RULES)
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    assert RECORDS - reader.metric_names() == set()
    assert "vllm:num_preemptions_total" in reader.metric_names()
    assert reader.value("model:apar_replicas:max") == 2
    assert reader.value("model:apar_replicas_wanted:max") == 2
    assert reader.value("model:apar_server_errors:ratio_rate5m") == 0


def check_shares(reader: Prometheus, parts: list[dict[str, Any]], seconds: list[float]) -> None:
    """Check that Prometheus records what the clients received."""

    def near(expression: str, truth: float) -> None:
        assert reader.value(expression) == pytest.approx(truth, rel=0.03), expression

    near('model_outcome:apar_requests:increase5m{outcome="ok"}', NUM_REQUESTS)
    near("sum(model_outcome:apar_forks:rate5m) * 300", total(parts, "forks"))
    # Sums of histograms are exact.
    measured = reader.value("sum(apar_request_latency_seconds_sum)")
    assert measured == pytest.approx(sum(seconds), abs=1e-3)


def check_throughput(reader: Prometheus, since_s: float, parts: list[dict[str, Any]]) -> None:
    """Check that the recorded token rate adds up to the tokens of the answers."""
    tokens = total(parts, "text_tokens") + total(parts, "control_tokens") - total(parts, "forks")
    expression = 'model:apar_generated_tokens:rate1m{model="apar-tiny"}'
    (series,) = reader.query_range(expression, since_s, time.time(), 1)
    assert series.value == 0
    # In a series younger than its minute, `rate` adds up to half a scrape interval at either end.
    assert sum(value for _, value in series.points) == pytest.approx(tokens, rel=0.1)


async def test_rules_tell_the_truth_and_a_lost_replica_is_reported(tmp_path: Path) -> None:
    started = time.time()
    async with loaded(tmp_path) as (watching, parts, seconds):
        reader, receiver = watching.prometheus, watching.webhook
        check_targets(reader)
        check_rules(reader)
        assert receiver.alerts("AparReplicaMissing") == []
        ended = time.time()

        watching.server.processes(REPLICA)[0].kill()

        alert = receiver.wait_for("AparReplicaMissing")
        assert alert["labels"]["model"] == MODEL
        assert alert["labels"]["severity"] == "ticket"
        assert alert["annotations"]["description"] == f"1 replicas of {MODEL} are missing."
        receiver.wait_for("AparReplicaMissing", "resolved", timeout_s=120)
        reader.wait_for("model:apar_replica_restarts:increase30m == 1")
        assert {alert["labels"]["alertname"] for alert in reader.alerts()} <= {"AparReplicaMissing"}
        await asyncio.sleep(max(0.0, ended + WINDOW_S + 5 - time.time()))
        # Rates are extrapolated by half an interval, which no longer matters after a minute.
        check_shares(reader, parts, seconds)
        check_throughput(reader, started, parts)
