"""Kills the processes of a loaded server, one after the other, at random moments."""

import asyncio
import random
import time
from dataclasses import dataclass, field

import httpx
import psutil

from tests.integration.serving.apar_process import ENGINE, REPLICA, Server
from tests.integration.serving.load_clients import Load, under_load

RECOVERY_S = 180.0


@dataclass
class KillRun:
    """What was killed, when, and how the requests ended meanwhile."""

    load: Load
    killed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def table(self) -> str:
        """Kills by what was killed, and the requests."""
        kinds = {title: self.killed.count(title) for title in dict.fromkeys(self.killed)}
        return f"{len(self.killed)} kills {kinds} in {self.seconds:.0f} s\n{self.load.table()}"


async def kill_run(
    server: Server,
    num_kills: int,
    *,
    num_replicas: int = 2,
    num_clients: int = 16,
    seed: int = 0,
    titles: tuple[str, ...] = (REPLICA, ENGINE),
) -> KillRun:
    """Kill so many processes under load; every other one only once all replicas are back."""
    draw = random.Random(seed)
    started = time.monotonic()
    async with under_load(server.url, num_clients=num_clients, seed=seed) as load:
        run = KillRun(load)
        for number in range(num_kills):
            if number % 2 == 0:
                await asyncio.to_thread(
                    server.wait_for_replicas, num_replicas, timeout_s=RECOVERY_S
                )
            await asyncio.sleep(draw.uniform(0.0, 4.0))
            title = draw.choice(titles)
            if victims := server.processes(title):
                draw.choice(victims).kill()
                run.killed.append(title)
        await asyncio.to_thread(server.wait_for_replicas, num_replicas, timeout_s=RECOVERY_S)
        await asyncio.sleep(2)
    run.seconds = time.monotonic() - started
    return run


async def kill_and_watch(server: Server, title: str, seconds: float) -> Load:
    """Kill all processes of a kind under load, and go on for a while."""
    async with under_load(server.url, num_clients=8) as load:
        await asyncio.sleep(2)
        victims = server.processes(title)
        assert victims, title
        for victim in victims:
            victim.kill()
        await asyncio.sleep(seconds)
    return load


async def until_alive(server: Server, title: str, dead: set[int]) -> psutil.Process:
    """The process that has come in the place of one that was killed."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        fresh = [process for process in server.processes(title) if process.pid not in dead]
        if fresh:
            return fresh[0]
        assert time.monotonic() < deadline, title
        await asyncio.sleep(0.2)


async def healthy(server: Server) -> bool:
    """Whether the server says that it can serve."""
    async with httpx.AsyncClient(timeout=10) as client:
        return (await client.get(f"{server.url}/health")).status_code == 200
