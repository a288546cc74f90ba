"""Several gateways behind one HAProxy: shared limits, the death of one, and rolling restarts."""

import asyncio
import json
import time
from typing import Any

import httpx
import psutil
import pytest

from deployments.config.keys import hash_of
from tests.integration.serving.apar_process import (
    ENGINE,
    GATEWAY,
    REPLICA,
    TINY,
    Server,
    serving,
    slowed,
)
from tests.integration.serving.load_clients import (
    PROMPTS,
    RIGHT,
    outcome_of,
    texts,
    under_load,
)
from tests.integration.serving.shared_server import wait_for_a_new_minute

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LONG: dict[str, Any] = {
    "model": "apar-tiny",
    "messages": [{"role": "user", "content": "Give me 5 tips for sleeping well."}],
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0,
    "apar": {"enabled": False},
}
NUM_STREAMS = 8
# Fewer chunks: the clients share two cores with the server.
PACED = TINY | {"coalesce_s": 0.1}
WAIT_S = 60.0
# HAProxy notices a hung one after three failed checks (HAPROXY_SETTINGS).
HUNG_S = 5.0
ANSWERED_S = 15.0


class Reader:
    """A client that reads one stream."""

    def __init__(self) -> None:
        self.text = ""
        self.done = self.closed = False

    async def read(self, client: httpx.AsyncClient) -> None:
        try:
            async with client.stream(
                "POST", "/v1/chat/completions", json=LONG | {"stream": True}
            ) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    self.done = self.done or line == "data: [DONE]"
                    if line and not self.done:
                        for choice in json.loads(line.removeprefix("data: "))["choices"]:
                            self.text += choice["delta"].get("content") or ""
        except httpx.TransportError:
            self.closed = True


async def until(condition: Any, seconds: float) -> float:
    """Wait until a condition holds, and return how long that took."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)
    return time.monotonic() - began


def num_open(readers: list[Reader]) -> int:
    return sum(not reader.closed for reader in readers)


def num_inside(server: Server) -> int:
    return sum(load["requests_inside"] for load in server.loads())


async def test_a_killed_gateway_ends_only_its_own_streams_and_no_generation_goes_on(
    tmp_path: Any,
) -> None:
    with serving(tmp_path, PACED | {"replicas": 2}, gateways=2) as server:
        victim, survivor = server.processes(GATEWAY)
        readers = [Reader() for _ in range(NUM_STREAMS)]
        async with server.async_client() as client:
            tasks = [asyncio.create_task(reader.read(client)) for reader in readers]
            with slowed(server.processes(ENGINE)):
                await until(lambda: all(len(reader.text) > 20 for reader in readers), WAIT_S)
                victim.kill()
                await until(lambda: sum(reader.closed for reader in readers) > 0, WAIT_S)
                # The engines notice a dead gateway by its closed connections.
                await until(lambda: num_inside(server) <= num_open(readers), WAIT_S)
                alive = [reader for reader in readers if not reader.closed]
                finished_before = sum(reader.done for reader in alive)
            await asyncio.gather(*tasks)
        lost = [reader for reader in readers if reader.closed]
        assert 0 < len(lost) < NUM_STREAMS
        assert finished_before == 0, "a generation of the dead gateway went on"
        assert all(reader.done for reader in alive)
        assert len({reader.text for reader in alive}) == 1
        assert all(alive[0].text.startswith(reader.text) for reader in lost)
        server.wait_until_idle(2)
        assert survivor.is_running()
        await until(lambda: len(server.processes(GATEWAY)) == 2, 60)


async def test_a_hung_gateway_gets_no_further_requests_and_is_replaced(tmp_path: Any) -> None:
    with serving(tmp_path, PACED | {"replicas": 2}, gateways=2, drain_s=5) as server:
        expected = await texts(server.url, "apar-tiny")
        victim, _ = server.processes(GATEWAY)
        victim.suspend()
        began_s = time.monotonic()
        tasks: list[tuple[float, asyncio.Task[Any]]] = []
        while time.monotonic() < began_s + 3 * HUNG_S:
            manner, prompt = ("httpx stream", "httpx whole")[len(tasks) % 2], PROMPTS[0]
            sent_s = time.monotonic() - began_s
            asked = outcome_of(server.url, manner, prompt, "apar-tiny", expected[prompt])
            tasks.append((sent_s, asyncio.create_task(asked)))
            await asyncio.sleep(0.4)
        outcomes = [(sent_s, await task) for sent_s, task in tasks]

        assert {outcome.kind for _, outcome in outcomes} == {RIGHT}, outcomes
        late = [(sent_s, outcome.seconds) for sent_s, outcome in outcomes if sent_s > HUNG_S]
        assert max(seconds for _, seconds in late) < ANSWERED_S, late
        # Those that the hung gateway has taken wait for its end.
        assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
        await until(lambda: len(server.processes(GATEWAY)) == 2, 60)
        server.wait_until_idle(2)


async def test_limits_hold_over_two_gateways(tmp_path: Any) -> None:
    keys = [
        {"name": "slow", "hash": hash_of("slow"), "requests_per_minute": 10},
        {"name": "narrow", "hash": hash_of("narrow"), "max_threads": 3},
        {"name": "plain", "hash": hash_of("plain")},
    ]
    body = LONG | {"max_tokens": 100}
    with serving(tmp_path, PACED | {"replicas": 2}, gateways=2, keys=keys) as server:
        async with server.async_client() as client:

            async def ask(key: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                return answer.status_code

            wait_for_a_new_minute()
            statuses = await asyncio.gather(*(ask("slow") for _ in range(20)))
            assert sorted(statuses) == [200] * 10 + [429] * 10

            tasks = [asyncio.create_task(ask("narrow")) for _ in range(12)]
            seen = []
            while not all(task.done() for task in tasks):
                seen.append(await asyncio.to_thread(num_inside, server))
            assert [task.result() for task in tasks] == [200] * 12
            assert max(seen) == 3
        server.wait_until_idle(2)


async def test_a_rolling_restart_of_gateways_and_replicas_fails_no_request(tmp_path: Any) -> None:
    model = PACED | {"replicas": 2}
    with serving(tmp_path, model, gateways=2) as server:
        before = pids(server)
        async with under_load(server.url, num_clients=6) as load:
            await asyncio.sleep(2)
            server.write(model, gateways=2, restart_id="again")
            said = await asyncio.to_thread(server.roll_out)
            assert "all gateways and replicas are restarted" in said
            await until(lambda: not before & pids(server), 120)
            await asyncio.sleep(2)
        assert {outcome.kind for outcome in load.outcomes} == {RIGHT}, load.table()
        assert len(pids(server)) == 4
        server.wait_until_idle(2)


def pids(server: Server) -> set[int]:
    return {process.pid for title in (GATEWAY, REPLICA) for process in server.processes(title)}
