"""Kills the processes of a loaded server, one after the other, at random moments."""

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import psutil

from tests.integration.serving.apar_process import (
    CONTROLLER,
    ENGINE,
    GATEWAY,
    HAPROXY,
    REPLICA,
    Server,
)
from tests.integration.serving.load_clients import Load, repeated_attempts, under_load

RECOVERY_S = 180.0
NAMES = {
    REPLICA: "replica",
    ENGINE: "engine",
    GATEWAY: "gateway",
    HAPROXY: "haproxy",
    CONTROLLER: "controller",
}
ALL = tuple(NAMES)
"""All kinds of victims."""


@dataclass(frozen=True)
class Kill:
    """One killed process: its title, and when it died on the clock of `time.monotonic()`."""

    title: str
    at_s: float


@dataclass
class KillRun:
    """The kills of a run, and how the requests ended meanwhile."""

    load: Load
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0
    repeated_attempts: int = 0
    """Connection attempts on this machine that the kernel had to repeat."""

    def count(self, title: str) -> int:
        """Number of killed processes of this title."""
        return sum(kill.title == title for kill in self.kills)

    def num_in_flight(self, title: str) -> int:
        """Requests that had begun and not ended when a process of this title was killed."""
        return sum(
            outcome.ended_s - outcome.seconds < kill.at_s <= outcome.ended_s
            for kill in self.kills
            if kill.title == title
            for outcome in self.load.outcomes
        )

    def by_victim(self) -> dict[str, Counter[str]]:
        """Kinds of outcomes by the title of the last process killed before the request ended."""
        found = {
            title: Counter[str]() for title in dict.fromkeys(kill.title for kill in self.kills)
        }
        ends = [kill.at_s for kill in self.kills[1:]] + [float("inf")]
        for kill, end_s in zip(self.kills, ends, strict=True):
            found[kill.title].update(
                outcome.kind
                for outcome in self.load.outcomes
                if kill.at_s <= outcome.ended_s < end_s
            )
        return found

    def table(self) -> str:
        """Kills and outcomes by victim, then requests by manner."""
        by_victim = self.by_victim()
        kinds = [kind for kind, _ in sum(by_victim.values(), Counter[str]()).most_common()]
        rows = [["killed last", "kills", "in flight", "requests", *kinds]]
        for title, outcomes in by_victim.items():
            counts = (self.count(title), self.num_in_flight(title), outcomes.total())
            cells = [str(count) for count in (*counts, *(outcomes[kind] for kind in kinds))]
            rows.append([NAMES.get(title, title), *cells])
        table = "\n".join(" | ".join(cell.rjust(13) for cell in row) for row in rows)
        delays_s = self.load.delays_s
        longest_s = max(delays_s, default=0.0)
        return (
            f"{len(self.kills)} kills in {self.seconds:.0f} s\n{table}\n\n{self.load.table()}\n\n"
            f"connection attempts repeated by the kernel: {self.repeated_attempts}\n"
            f"times the clients' event loop was late: {len(delays_s)}, at most {longest_s:.1f} s"
        )


def rounds(draw: random.Random, titles: tuple[str, ...], number: int) -> list[str]:
    """Titles in random order, each as often as the others but for one."""
    order: list[str] = []
    while len(order) < number:
        order += draw.sample(titles, len(titles))
    return order[:number]


async def kill_run(
    server: Server,
    num_kills: int,
    *,
    num_replicas: int = 2,
    num_gateways: int = 1,
    num_clients: int = 16,
    num_requests: int = 0,
    seed: int = 0,
    titles: tuple[str, ...] = (REPLICA, ENGINE, GATEWAY),
) -> KillRun:
    """Kill this many processes under load; every other one only once everything is back.

    The clients go on until they have sent `num_requests`, and the kills are spread over them.
    """
    draw = random.Random(seed)
    started = time.monotonic()
    repeated = repeated_attempts()
    async with under_load(server.url, num_clients=num_clients, seed=seed) as load:
        run = KillRun(load)
        for number, title in enumerate(rounds(draw, titles, num_kills)):
            if number % 2 == 0:
                await until_back(server, num_replicas, num_gateways)
            # The next kill waits for its part of the requests.
            await until_sent(load, num_requests * number // num_kills)
            await asyncio.sleep(draw.uniform(0.0, 4.0))
            await _kill_one(server, title, draw)
            run.kills.append(Kill(title, time.monotonic()))
        await until_back(server, num_replicas, num_gateways)
        await until_sent(load, num_requests)
        await asyncio.sleep(2)
    run.seconds = time.monotonic() - started
    run.repeated_attempts = repeated_attempts() - repeated
    return run


async def _kill_one(server: Server, title: str, draw: random.Random) -> None:
    """Kill a process of a kind, as soon as there is one."""
    while True:
        victims = await processes(server, title) or [await until_alive(server, title, set())]
        # It may have ended since it was found.
        with suppress(psutil.NoSuchProcess):
            draw.choice(victims).kill()
            return


async def processes(server: Server, title: str) -> list[psutil.Process]:
    """Find the server's processes in a thread, so that the clients' event loop goes on."""
    return await asyncio.to_thread(server.processes, title)


async def until_back(server: Server, num_replicas: int, num_gateways: int) -> None:
    """Wait until all replicas and gateways run, and the server is healthy."""
    await asyncio.to_thread(server.wait_for_replicas, num_replicas, timeout_s=RECOVERY_S)
    async with asyncio.timeout(RECOVERY_S):
        # No event tells that another process has started.
        while len(await processes(server, GATEWAY)) < num_gateways:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def until_sent(load: Load, number: int) -> None:
    """Wait until this many requests have ended."""
    while len(load.outcomes) < number:  # noqa: ASYNC110 - the test has a time limit
        await asyncio.sleep(0.2)


async def kill_and_watch(server: Server, title: str, seconds: float) -> Load:
    """Kill all processes of a kind under load, and go on for a while."""
    async with under_load(server.url, num_clients=8) as load:
        await asyncio.sleep(2)
        victims = await processes(server, title)
        assert victims, title
        for victim in victims:
            victim.kill()
        await asyncio.sleep(seconds)
    return load


async def until_alive(server: Server, title: str, dead: set[int]) -> psutil.Process:
    """The process that has come in the place of one that was killed."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        found = await processes(server, title)
        fresh = [process for process in found if process.pid not in dead]
        if fresh:
            return fresh[0]
        assert time.monotonic() < deadline, title
        await asyncio.sleep(0.2)


async def healthy(server: Server) -> bool:
    """Whether the server says that it can serve."""
    async with httpx.AsyncClient(timeout=10) as client:
        return (await client.get(f"{server.url}/health")).status_code == 200
