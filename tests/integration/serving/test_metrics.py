"""Metrics of a real server agree with the answers of its requests."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config.keys import hash_of
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Kind
from tests.integration.serving.apar_process import ENGINE, REPLICA, TINY, Server, serving, slowed
from tests.integration.serving.metrics_reading import (
    OURS,
    Page,
    metrics_url,
    read_at_rest,
    read_when,
)
from tests.integration.serving.shared_server import wait_for_a_new_minute

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIST_PROMPT = "Give me 3 tips for sleeping well."
BLOCK_SIZE = 32
# Forks nothing, and ends at its last token only.
LONG = {"apar": {"enabled": False}, "ignore_eos": True, "max_tokens": 1900}
KEYS = [
    {"name": "gold", "hash": hash_of("gold"), "metrics_class": "paying"},
    {"name": "once", "hash": hash_of("once"), "requests_per_minute": 1},
]


@dataclass
class Answered:
    """Sums over answers: their statistics and their clients' seconds."""

    apar: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    num_requests: int = 0
    num_streams: int = 0
    seconds: float = 0.0

    def take(self, answer: dict[str, Any], seconds: float, *, streamed: bool) -> None:
        for name, value in answer["apar"].items():
            self.apar[name] = self.apar.get(name, 0) + value
        self.prompt_tokens += answer["usage"]["prompt_tokens"]
        self.num_requests += 1
        self.num_streams += streamed
        self.seconds += seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = TINY | {"max_concurrency": 2, "max_queued_requests": 1, "max_queue_s": 4}
    with serving(
        tmp_path_factory.mktemp("metrics"),
        model,
        keys=KEYS,
        limits={"max_body_bytes": 4000, "max_prompt_chars": 500},
        metrics={"port": 0},
    ) as started:
        yield started


@pytest.fixture(scope="module")
def page_url(server: Server) -> str:
    return metrics_url(server)


def headers(key: str = "gold") -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": LIST_PROMPT}]
    return {"model": "apar-tiny", "messages": messages, "temperature": 0} | fields


def ask(server: Server, answered: Answered, path: str = CHAT, **fields: Any) -> None:
    """Send a request and add its statistics to `answered`."""
    request = body(**fields)
    if path == COMPLETIONS:
        request.pop("messages")
    if streamed := bool(fields.get("stream")):
        request["stream_options"] = {"include_usage": True}
    began = time.monotonic()
    answer = httpx.post(server.url + path, json=request, headers=headers(), timeout=60)
    assert answer.status_code == 200, answer.text
    # The gateway reads its clock after it has sent the answer, and writes the record then.
    server.record(answer.headers["x-request-id"])
    seconds = time.monotonic() - began
    said = answer.json() if not streamed else last_chunk(answer.text)
    answered.take(said, seconds, streamed=streamed)


def last_chunk(events: str) -> dict[str, Any]:
    """Return the chunk of a stream that holds its usage."""
    chunks = [event.removeprefix("data: ") for event in events.split("\n\n")]
    return next(json.loads(chunk) for chunk in chunks if '"apar":' in chunk)


def test_every_metric_is_told_and_every_told_one_is_in_the_catalogue(
    server: Server, page_url: str
) -> None:
    ask(server, Answered(), max_tokens=5)
    declared = {
        metric.name + part
        for metric in catalogue.metrics()
        for part in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
    }

    page = read_when(page_url, lambda page: declared <= page.names)

    assert {name for name in page.names if name.startswith(OURS)} == declared
    assert any(name.startswith("vllm:time_to_first_token_seconds") for name in page.names)
    for metric in catalogue.metrics():
        for name, labels, _ in page.samples:
            if name == metric.name:
                assert set(metric.labels) == set(labels), name
            if name.startswith("vllm:"):
                assert "replica" in labels, name


def counts_of(answered: Answered) -> dict[catalogue.Metric, float]:
    """Return by how much the counters must have risen, according to the answers."""
    apar, forks = answered.apar, answered.apar["forks"]
    return {
        catalogue.ATTENDED_TOKENS: apar["attended_tokens"],
        catalogue.SEQUENTIAL_ATTENDED_TOKENS: apar["sequential_attended_tokens"],
        catalogue.CACHED_TOKENS: apar["max_cached_tokens"],
        catalogue.SEQUENTIAL_CACHED_TOKENS: apar["sequential_max_cached_tokens"],
        catalogue.CRITICAL_PATH_STEPS: apar["decode_steps"],
        catalogue.SEQUENTIAL_STEPS: apar["sequential_steps"],
        catalogue.PROMPT_TOKENS: answered.prompt_tokens,
        catalogue.FORKS: forks,
        # [Child] is not generated: it stands before a child's first token.
        catalogue.GENERATED_TOKENS: apar["text_tokens"] + apar["control_tokens"] - forks,
        catalogue.REQUESTS: answered.num_requests,
        catalogue.ROUTER_DECISIONS: answered.num_requests,
        catalogue.CHARGED_TOKENS: answered.prompt_tokens
        + apar["text_tokens"]
        + apar["control_tokens"]
        - forks,
        catalogue.REQUESTS_REJECTED: 0,
        catalogue.RETRIES: 0,
        catalogue.MIGRATIONS: 0,
        catalogue.GIVEN_UP: 0,
    }


def test_a_mix_of_requests_adds_up_to_what_their_answers_say(server: Server, page_url: str) -> None:
    answered = Answered()
    before = read_at_rest(page_url)

    def change(page: Page, metric: catalogue.Metric, part: str = "", **labels: str) -> float:
        return page.total(metric, part, **labels) - before.total(metric, part, **labels)

    for streamed in (False, True):
        ask(server, answered, stream=streamed)
        ask(server, answered, stream=streamed, apar={"enabled": False})
        ask(server, answered, stream=streamed, n=2, temperature=1, seed=7)
        ask(server, answered, stream=streamed, max_tokens=30)
    ask(server, answered, apar={"max_threads": 2})
    ask(server, answered, COMPLETIONS, prompt=["Name three fruits.", LIST_PROMPT], max_tokens=80)

    page = read_at_rest(page_url)

    apar, truth = answered.apar, counts_of(answered)
    assert apar["forks"] > 10
    assert {metric.name: change(page, metric) for metric in truth} == {
        metric.name: value for metric, value in truth.items()
    }
    assert change(page, catalogue.REQUESTS, outcome="ok") == answered.num_requests
    assert change(page, catalogue.FORKS, outcome="delayed") > 0  # of the two threads at most
    assert change(page, catalogue.FORK_DELAYS) == change(page, catalogue.FORKS, outcome="delayed")
    sums = {
        catalogue.REQUEST_THREADS: apar["threads"],
        catalogue.REQUEST_DEPTH: apar["max_depth"],
    }
    for metric, value in sums.items():
        assert change(page, metric, "_sum") == value
    counts = {
        catalogue.REQUEST_THREADS: answered.num_requests,
        catalogue.REQUEST_DEPTH: answered.num_requests,
        catalogue.TIME_PER_OUTPUT_TOKEN: answered.num_requests,
        catalogue.TIME_PER_CRITICAL_PATH_TOKEN: answered.num_requests,
        catalogue.REQUEST_LATENCY: answered.num_requests,
        catalogue.QUEUE_TIME: answered.num_requests,
        catalogue.TIME_TO_FIRST_TOKEN: answered.num_streams,
        catalogue.TIME_TO_CERTAIN_TOKEN: answered.num_streams,
        catalogue.LONGEST_SILENCE: answered.num_streams,
    }
    for metric, value in counts.items():
        assert change(page, metric, "_count") == value
        assert change(page, metric, "_bucket", le="+Inf") == value
    assert change(page, catalogue.TIME_TO_FIRST_TOKEN, "_sum") > 0
    forked = change(page, catalogue.TIME_TO_CERTAIN_TOKEN, "_count", forked="yes")
    assert 0 < forked <= answered.num_streams
    assert change(page, catalogue.TIME_TO_CERTAIN_TOKEN, "_count", forked="unknown") == 0
    assert 0 < change(page, catalogue.REQUEST_LATENCY, "_sum") <= answered.seconds


def test_the_engine_adds_up_to_what_it_says_of_itself(server: Server, page_url: str) -> None:
    ask(server, Answered())
    server.wait_until_idle(1)
    [load] = server.loads()
    sharing, steps = load["fork_counters"], load["steps"]

    page = read_at_rest(page_url)

    shared, copied = sharing["shared_blocks"], sharing["copied_blocks"]
    assert page.total(catalogue.ENGINE_STEPS) == steps["num_steps"]
    assert page.total(catalogue.ENGINE_BUSY_SECONDS) == pytest.approx(steps["busy_s"])
    assert page.total(catalogue.GENERATED_TOKENS) == load["generated_tokens"]
    assert page.total(catalogue.KV_SHARED_BLOCKS) == shared > 0
    assert page.total(catalogue.KV_COPIED_BLOCKS) == copied > 0
    assert shared * BLOCK_SIZE <= sharing["shared_tokens"] < (shared + copied) * BLOCK_SIZE
    assert page.total(catalogue.KV_RELEASED_EARLY_BLOCKS) == sharing["released_early_blocks"] > 0
    assert page.total(catalogue.KV_BLOCKS) == load["kv_blocks"]
    assert page.total(catalogue.KV_CACHE_USAGE) == 0
    assert page.by(catalogue.THREADS, "state") == {}
    assert page.total(catalogue.REPLICA_REQUESTS) == 0
    assert page.by(catalogue.REPLICAS, "model") == {("apar-tiny",): 1}
    assert page.by(catalogue.REPLICAS_WANTED, "model") == {("apar-tiny",): 1}
    assert page.by(catalogue.REPLICA_RESTARTS, "model") == {}


def test_every_refusal_has_its_reason_and_its_key_class(server: Server, page_url: str) -> None:
    names = ("reason", "key_class")
    wait_for_a_new_minute()
    before = read_at_rest(page_url)
    outcomes_before = before.by(catalogue.REQUESTS, "model", "outcome")

    def post(key: str = "gold", path: str = CHAT, **fields: Any) -> httpx.Response:
        return httpx.post(server.url + path, json=body(**fields), headers=headers(key), timeout=60)

    statuses = [
        post("nobody").status_code,
        post("once", max_tokens=1).status_code,
        post("once", max_tokens=1).status_code,
        post(messages=[{"role": "user", "content": "x" * 501}]).status_code,
        post(messages=[{"role": "user", "content": "x" * 5000}]).status_code,
        httpx.post(server.url + CHAT, content=b"{", headers=headers()).status_code,
        post(model="other").status_code,
        post(path="/v1/engines").status_code,
        # Let in, and then refused by vLLM: no refusal of the gateway's.
        post(max_tokens=-1).status_code,
    ]
    assert statuses == [401, 200, 429, 400, 413, 400, 404, 404, 400]

    page = read_at_rest(page_url)

    was = before.by(catalogue.REQUESTS_REJECTED, *names)
    now = page.by(catalogue.REQUESTS_REJECTED, *names)
    assert {key: value - was.get(key, 0) for key, value in now.items()} == {
        ("authentication", "anonymous"): 1,
        ("key_limit", "default"): 1,
        ("too_large", "paying"): 2,
        ("invalid", "paying"): 1,
        ("unknown_model", "paying"): 1,
        ("unknown_route", "anonymous"): 1,
    }
    outcomes = page.by(catalogue.REQUESTS, "model", "outcome")
    assert {key: value - outcomes_before.get(key, 0) for key, value in outcomes.items()} == {
        ("apar-tiny", "ok"): 1,
        ("apar-tiny", "client_error"): 2,  # length of the prompt, and vLLM's
        ("unknown", "client_error"): 5,
    }


def test_a_full_server_tells_who_runs_waits_is_refused_and_leaves(
    server: Server, page_url: str
) -> None:
    before = read_at_rest(page_url)
    leave = threading.Event()

    with (
        ThreadPoolExecutor(4) as executor,
        suspended(server, ENGINE) as suspend,
        ExitStack() as slow,
    ):
        slow.enter_context(slowed(server.processes(ENGINE)))
        running = [executor.submit(stream_until, leave, server) for _ in range(2)]
        page = read_when(
            page_url,
            lambda page: (
                page.total(catalogue.REPLICA_REQUESTS)
                == page.total(catalogue.REQUESTS_RUNNING)
                == page.total(catalogue.THREADS, state="running")
                == 2
            ),
        )
        assert page.total(catalogue.KV_CACHE_USAGE) > 0
        slow.close()
        suspend()  # Now nobody ends before the queue's time is over.
        waiting = executor.submit(status_of_one, server)
        read_when(page_url, lambda page: page.total(catalogue.REQUESTS_QUEUED) == 1)
        refused = status_of_one(server)
        assert waiting.result() == refused == 503
        leave.set()
    for each in running:
        each.result()

    page = read_at_rest(page_url)

    assert page.total(catalogue.REQUESTS, outcome="cancelled") == 2
    rejected = page.by(catalogue.REQUESTS_REJECTED, "reason")
    assert rejected["overloaded",] == rejected["queue_timeout",] == 1
    assert page.total(catalogue.REQUESTS, outcome="server_error") == 2
    # Both count with what they had generated by then, as threads that forked nothing.
    threads = page.total(catalogue.REQUEST_THREADS, "_sum")
    assert threads - before.total(catalogue.REQUEST_THREADS, "_sum") == 2
    attended = page.total(catalogue.ATTENDED_TOKENS) - before.total(catalogue.ATTENDED_TOKENS)
    sequential = page.total(catalogue.SEQUENTIAL_ATTENDED_TOKENS)
    assert attended == sequential - before.total(catalogue.SEQUENTIAL_ATTENDED_TOKENS) > 0


def stream_until(leave: threading.Event, server: Server) -> None:
    """Read a long stream until told to leave."""
    with (
        suppress(httpx.HTTPError),
        httpx.stream(
            "POST",
            server.url + CHAT,
            json=body(stream=True, **LONG),
            headers=headers(),
            timeout=60,
        ) as answer,
    ):
        for _ in answer.iter_bytes():
            if leave.is_set():
                return


def status_of_one(server: Server) -> int:
    request = body(max_tokens=2)
    answer = httpx.post(server.url + CHAT, json=request, headers=headers(), timeout=60)
    return answer.status_code


@contextmanager
def suspended(server: Server, title: str) -> Iterator[Callable[[], None]]:
    """Yield a function that suspends a process until the end."""
    [process] = server.processes(title)
    try:
        yield process.suspend
    finally:
        process.resume()


def test_a_killed_replica_is_a_migration_and_a_restart(server: Server, page_url: str) -> None:
    before = read_at_rest(page_url)
    [victim] = server.processes(REPLICA)
    killed = False
    request = body(stream=True, **LONG)
    with httpx.stream(
        "POST", server.url + CHAT, json=request, headers=headers(), timeout=120
    ) as answer:
        for _ in answer.iter_bytes():
            if not killed:
                victim.kill()
                killed = True

    page = read_when(
        page_url,
        lambda page: (
            page.total(catalogue.MIGRATIONS) == before.total(catalogue.MIGRATIONS) + 1
            and page.total(catalogue.REPLICA_RESTARTS) == 1
        ),
        # A restart counts when the new engine is up.
        timeout_s=180,
    )

    assert page.total(catalogue.RETRIES) == page.total(catalogue.GIVEN_UP) == 0
    assert page.by(catalogue.REPLICAS, "model") == {("apar-tiny",): 1}
    # What the dead one counted stays; the new one has a series of its own.
    assert len(page.by(catalogue.GENERATED_TOKENS, "replica")) == 2


def test_nothing_listens_where_metrics_are_off(tmp_path: Path) -> None:
    with serving(tmp_path, TINY, metrics={"enabled": False}) as server:
        assert "Metrics" not in server.log.read_text()
        assert httpx.post(f"{server.url}{CHAT}", json=body(max_tokens=2)).status_code == 200
