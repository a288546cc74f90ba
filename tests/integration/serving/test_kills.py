"""Kill processes at random moments under load; every request must end correctly.

`APAR_KILLS` sets the number of kills of the long run, `APAR_KILL_SEED` the seed.
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
    KillRun,
    healthy,
    kill_and_watch,
    kill_run,
    until_alive,
)
from tests.integration.serving.load_clients import CLOSED, RIGHT, Outcome, under_load

pytestmark = pytest.mark.cluster
NUM_KILLS = int(os.environ.get("APAR_KILLS", "50"))
SEED = int(os.environ.get("APAR_KILL_SEED", "0"))
# Two health checks without an answer, of 25 s each, and the end of a replica.
HANG_S = 80.0
# Errors that a client may get while no replica or no gateway can serve it.
CLEAN = {"engine_lost", "engine_lost_twice", "not_ready", "overloaded", "replica_unavailable"}
# A killed gateway closes the connections of its streams; HAProxy passes that on at once.
CLOSED_WITHIN_S = 10.0


def check(run: KillRun, num_kills: int) -> None:
    """Check that every kill happened and every request ended correctly.

    A request ends with the right text or an OpenAI error. A closed connection is allowed only just
    after a gateway was killed.
    """
    assert len(run.kills) == num_kills
    counts = [run.count(title) for title in (REPLICA, ENGINE, GATEWAY)]
    assert max(counts) - min(counts) <= 1, run.table()
    wrong = [outcome for outcome in run.load.outcomes if not may_end_so(outcome, run)]
    assert wrong == [], run.table()
    assert run.load.outcomes[-1].kind == RIGHT, run.table()


def may_end_so(outcome: Outcome, run: KillRun) -> bool:
    """Return whether this is the right text, a clean error, or a connection closed by a kill."""
    if outcome.kind == CLOSED:
        return any(
            kill.title == GATEWAY and 0 <= outcome.ended_s - kill.at_s < CLOSED_WITHIN_S
            for kill in run.kills
        )
    return outcome.clean and (outcome.kind == RIGHT or outcome.kind in CLEAN)


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
    with serving(tmp_path, TINY | {"replicas": 2}) as server:
        run = await kill_run(server, NUM_KILLS, seed=SEED)
        with capsys.disabled():
            print(f"\nseed {SEED}\n{run.table()}")  # noqa: T201  # the figures are its purpose
        check(run, NUM_KILLS)
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
async def test_a_killed_haproxy_is_started_again(tmp_path: Path) -> None:
    with serving(tmp_path, TINY) as server:
        before = {process.pid for process in server.processes(HAPROXY)}
        load = await kill_and_watch(server, HAPROXY, 15)
        await until_alive(server, HAPROXY, before)
        # Its connections are gone with it, and no one behind it could save them.
        assert {outcome.kind for outcome in load.failures} <= {CLOSED, "not_ready"}
        assert load.outcomes[-1].kind == RIGHT
        server.wait_until_idle(1)
