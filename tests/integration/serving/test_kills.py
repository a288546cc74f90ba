"""Kill processes at random moments under load; every request must end correctly.

`APAR_KILLS` and `APAR_KILL_REQUESTS` set the least numbers of kills and requests of the long run
over 2 gateways and 2 replicas (by default 50 and 5000), `APAR_KILL_SEED` the seed. It prints how
requests ended, by the process that was killed last, and writes that to the file `APAR_KILL_TABLE`.
"""

import asyncio
import os
from pathlib import Path

import pytest

from tests.integration.serving.apar_process import (
    CONTROLLER,
    ENGINE,
    GATEWAY,
    HAPROXY,
    REPLICA,
    TINY,
    serving,
)
from tests.integration.serving.kill_run import (
    ALL,
    RECOVERY_S,
    KillRun,
    healthy,
    kill_and_watch,
    kill_run,
    until_alive,
)
from tests.integration.serving.load_clients import CLOSED, LATE, RIGHT, Outcome, under_load

pytestmark = pytest.mark.cluster
NUM_KILLS = int(os.environ.get("APAR_KILLS", "50"))
NUM_REQUESTS = int(os.environ.get("APAR_KILL_REQUESTS", "5000"))
TABLE = os.environ.get("APAR_KILL_TABLE")
SEED = int(os.environ.get("APAR_KILL_SEED", "0"))
# Two health checks without an answer, of 25 s each, and the end of a replica.
HANG_S = 80.0
# Errors that a client may get while no replica or no gateway can serve it.
CLEAN = {"engine_lost", "engine_lost_twice", "not_ready", "overloaded", "replica_unavailable"}
# A killed gateway closes the connections of its streams; HAProxy passes that on at once. A killed
# HAProxy closes all, and new ones are refused until another one stands in for it.
CLOSED_WITHIN_S = {GATEWAY: 10.0, HAPROXY: 10.0}


def check(
    run: KillRun, num_kills: int, titles: tuple[str, ...] = (REPLICA, ENGINE, GATEWAY)
) -> None:
    """Check that every kill happened and every request ended correctly.

    A request ends with the right text or an OpenAI error. A closed connection is allowed only just
    after a gateway or HAProxy was killed, and a client may be too late for its own timeout.
    """
    assert len(run.kills) == num_kills
    counts = [run.count(title) for title in titles]
    assert max(counts) - min(counts) <= 1, run.table()
    wrong = [outcome for outcome in run.load.outcomes if not may_end_so(outcome, run)]
    assert wrong == [], run.table()
    assert run.load.outcomes[-1].kind == RIGHT, run.table()


def may_end_so(outcome: Outcome, run: KillRun) -> bool:
    """Return whether this is the right text, a clean error, or a connection closed by a kill."""
    if outcome.kind == CLOSED:
        return any(
            0 <= outcome.ended_s - kill.at_s < CLOSED_WITHIN_S.get(kill.title, 0.0)
            for kill in run.kills
        )
    return outcome.clean and outcome.kind in CLEAN | {RIGHT, LATE}


@pytest.mark.slow
async def test_requests_end_well_while_replicas_engines_and_gateways_are_killed(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, TINY | {"replicas": 2}) as server:
        run = await kill_run(server, 6, seed=SEED)
        check(run, 6)
        server.wait_until_idle(2)


@pytest.mark.slow
@pytest.mark.kills
@pytest.mark.timeout(7200)
async def test_requests_end_well_over_many_kills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, TINY | {"replicas": 2}, gateways=2) as server:
        run = await kill_run(
            server,
            NUM_KILLS,
            num_gateways=2,
            num_requests=NUM_REQUESTS,
            seed=SEED,
            titles=ALL,
        )
        table = f"seed {SEED}\n{run.table()}\n"
        with capsys.disabled():
            print(f"\n{table}")  # noqa: T201  # the figures are its purpose
        if TABLE:
            Path(TABLE).write_text(table)  # noqa: ASYNC240 - nothing else runs
        check(run, NUM_KILLS, ALL)
        assert len(run.load.outcomes) >= NUM_REQUESTS
        server.wait_until_idle(2)


@pytest.mark.slow
async def test_an_engine_that_stands_still_is_given_up_and_its_requests_go_on(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, TINY | {"replicas": 2}) as server:
        async with under_load(server.url, num_clients=8) as load:
            await asyncio.sleep(2)
            victim = server.processes(ENGINE)[0]
            victim.suspend()
            async with asyncio.timeout(HANG_S):
                while victim.is_running():  # noqa: ASYNC110 - another process's end
                    await asyncio.sleep(0.5)
        assert load.failures == []
        slowest = max(outcome.seconds for outcome in load.outcomes)
        assert slowest > 10  # Some did sit in the engine that stood still.
        await asyncio.to_thread(server.wait_for_replicas, 2)
        server.wait_until_idle(2)


@pytest.mark.slow
async def test_serving_goes_on_without_the_controller(tmp_path: Path) -> None:
    with serving(tmp_path, TINY) as server:
        (before,) = server.processes(CONTROLLER)
        load = await kill_and_watch(server, CONTROLLER, 10)
        await until_alive(server, CONTROLLER, {before.pid})
        assert await healthy(server)
        assert load.failures == []
        assert len(load.outcomes) > 10
        server.wait_until_idle(1)


@pytest.mark.slow
async def test_a_replica_that_dies_while_the_next_controller_reads_its_state_is_replaced(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, TINY) as server:
        (replica,) = server.processes(REPLICA)
        (controller,) = server.processes(CONTROLLER)
        replica.suspend()  # The next controller asks it for its state, and waits.
        controller.kill()
        await until_alive(server, CONTROLLER, {controller.pid})
        await asyncio.sleep(8)
        replica.kill()

        await until_alive(server, REPLICA, {replica.pid})

        async with asyncio.timeout(RECOVERY_S):
            while not await healthy(server):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.5)
        server.wait_until_idle(1)


@pytest.mark.slow
async def test_a_killed_haproxy_is_started_again(tmp_path: Path) -> None:
    with serving(tmp_path, TINY) as server:
        before = {process.pid for process in server.processes(HAPROXY)}
        load = await kill_and_watch(server, HAPROXY, 15)
        await until_alive(server, HAPROXY, before)
        # Its connections are gone with it, and no one behind it could save them.
        assert {outcome.kind for outcome in load.failures} <= {CLOSED, "not_ready"}
        assert load.outcomes[-1].kind == RIGHT
        server.wait_until_idle(1)
