"""Probes, and what clients learn of a model that starts."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from deployments.wire.response import ResponseStart
from deployments.wire.start import Stage, StartBoard, StartReport, StartReporter, described
from tests.fakes.clock import Clock
from tests.fakes.replicas import CHAT, JSON, FakeReplicas, client, key

LOADING = StartReport("r1", Stage.LOADING_WEIGHTS.value, 41.0, 63.0, 120.0)


def replicas(*, running: int = 1, answering: int | None = None, starts: bool = False) -> Any:
    fake = FakeReplicas(ResponseStart(200, JSON, b"{}"))
    fake.num_running, fake.num_answering = running, answering
    fake.reports = [LOADING] if starts else []
    return fake


async def get(http: httpx.AsyncClient, path: str, token: str | None = None) -> httpx.Response:
    return await http.get(path, headers={"authorization": f"Bearer {token}"} if token else {})


async def test_health_names_every_model_and_needs_all_of_them() -> None:
    well, hung = replicas(running=2), replicas(running=2, answering=0)

    answer = await get(client(well, hung), "/health")

    assert answer.status_code == 503
    body = answer.json()
    assert body["status"] == "degraded"
    assert body["error"]["message"] == "1 of 2 models cannot serve: `m1`."
    states = {name: model["status"] for name, model in body["models"].items()}
    assert states == {"m": "ok", "m1": "down"}
    assert body["models"]["m1"]["replicas"] == {"wanted": 1, "running": 2, "answering": 0}


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 503), ("/health/m", 200), ("/health/m1", 503), ("/ready", 200)]
)
async def test_one_model_that_is_down_leaves_the_other_one_ready(path: str, status: int) -> None:
    http = client(replicas(), replicas(answering=0))

    assert (await get(http, path)).status_code == status


async def test_nothing_is_ready_while_no_model_answers() -> None:
    answer = await get(client(replicas(running=0, starts=True)), "/ready")

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "57"  # What is left of the last start's time.
    assert "loading weights" in answer.json()["error"]["message"]


async def test_a_starting_model_tells_what_it_does() -> None:
    body = (await get(client(replicas(running=0, starts=True)), "/health/m")).json()

    assert body["status"] == "starting"
    assert body["starting"] == [
        {
            "stage": "loading weights",
            "stage_seconds": 41.0,
            "seconds": 63.0,
            "expected_seconds_left": 57.0,
        }
    ]


@pytest.mark.parametrize(
    ("token", "shown", "one"), [(None, [], 401), ("wrong", [], 401), ("a", ["m"], 404)]
)
async def test_without_a_key_probes_show_no_models(
    token: str | None, shown: list[str], one: int
) -> None:
    http = client(replicas(), replicas(), keys=(key("a", models=("m",)),))

    answer = await get(http, "/health", token)

    assert (answer.status_code, list(answer.json()["models"])) == (200, shown)
    assert (await get(http, "/health/m1", token)).status_code == one


async def test_replicas_are_asked_at_most_once_a_second() -> None:
    fake, asked = replicas(), []

    async def answering(wait_s: float) -> int:
        asked.append(wait_s)
        return 1

    fake.answering = answering
    http = client(fake)
    await asyncio.gather(*(get(http, path) for path in ("/health", "/ready", "/health/m") * 5))

    assert len(asked) == 1


@pytest.mark.parametrize("given", ["0", "-1", "nan", "4000", "soon"])
async def test_an_invalid_wait_is_refused(given: str) -> None:
    answer = await client(replicas()).post(CHAT, json={}, headers={"x-apar-wait-s": given})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-apar-wait-s"
    assert repr(given) in answer.json()["error"]["message"]


@pytest.mark.usefixtures("simulated_clocks")
@pytest.mark.parametrize(("running", "wait_s"), [(0, 300.0), (1, 60.0)])
async def test_a_client_may_wait_for_a_start_but_not_longer_for_a_busy_replica(
    running: int, wait_s: float
) -> None:
    fake = replicas(running=running)

    answer = await client(fake).post(CHAT, json={}, headers={"x-apar-wait-s": "300"})

    assert answer.status_code == 200
    assert fake.requests[0].replica_wait_s == pytest.approx(wait_s)


class Memory:
    """The store of a cluster."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.is_set = threading.Event()

    def put(self, key: str, value: str) -> None:
        self.kept[key] = value
        self.is_set.set()

    def values(self, prefix: str) -> list[str]:
        return [value for key, value in self.kept.items() if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        self.kept.pop(key, None)


async def test_reports_reach_the_board_until_the_replica_runs() -> None:
    clock, store = Clock(), Memory()
    board = StartBoard("Replica-m", lambda: store, clock)
    reporter = StartReporter("Replica-m", "r1", store, clock=clock, period_s=3600)
    # The thread's own report must not take the time from before, and the stage from after this.
    assert await asyncio.to_thread(store.is_set.wait, 60)
    clock.now_s += 10
    reporter.reached(Stage.LOADING_WEIGHTS)
    reporter.report()
    clock.now_s += 5
    reporter.report()

    (report,) = await board.reports()
    assert (report.stage, report.total_s) == ("loading weights", 15.0)
    assert report.stage_s == 5.0

    reporter.close(runs=True)
    clock.now_s += 2
    assert await board.reports() == []
    StartReporter("Replica-m", "r2", store, clock=clock).close(runs=False)
    again = StartReporter("Replica-m", "r3", store, clock=clock)
    clock.now_s += 2
    again.report()
    (report,) = await board.reports()
    assert report.last_start_s == pytest.approx(15.0)
    again.close(runs=True)


async def test_a_replica_that_died_while_it_started_is_forgotten() -> None:
    clock, store = Clock(), Memory()
    reporter = StartReporter("Replica-m", "r1", store, clock=clock, period_s=3600)
    reporter.report()
    board = StartBoard("Replica-m", lambda: store, clock)
    assert len(await board.reports()) == 1

    clock.now_s += 31

    assert await board.reports() == []
    assert described([])[1] == 15.0
    reporter._ended.set()
