from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from apar_core.scheduler.block_sharing import ForkCounters
from cluster.experiments import simulated_scale_out
from cluster.experiments.fork_cost import CACHED, SHARED, fork_cost_table
from cluster.experiments.scale_out import ScaleOutSettings, scale_out_table
from cluster.experiments.step_profile import ProfileLoad, StepProfile, profile_table
from cluster.experiments.step_timers import PARTS
from tests.unit.cluster.experiments.played_cells import replicas_run


def test_a_fork_costs_what_its_counters_say_over_the_number_of_forks() -> None:
    shared = ForkCounters(forks=4, shared_tokens=400, computed_tokens=8, copied_blocks=3)
    cached = ForkCounters(forks=4, shared_tokens=320, computed_tokens=88, fallbacks=4)

    table = fork_cost_table({SHARED: shared, CACHED: cached}, 32)

    assert table.title == "Cost of a fork: 4 forks, blocks of 32 tokens"
    assert table.rows == ((SHARED, 2.0, 0.75, 100.0, 0), (CACHED, 22.0, 0.0, 80.0, 4))


def test_replicas_are_compared_with_the_fewest_of_the_same_way_of_decoding() -> None:
    runs = [
        replicas_run(2, forked=True, tokens=6000),
        replicas_run(1, forked=True, tokens=4000),
        replicas_run(1, forked=False, tokens=2000),
    ]

    rows = scale_out_table(runs).rows

    assert [(row[0], row[1], row[2], row[3]) for row in rows] == [
        ("sequential", 1, 200.0, 1.0),
        ("forked", 1, 400.0, 1.0),
        ("forked", 2, 600.0, 1.5),
    ]
    # 15 CPU seconds in 10 s, for 6,000 tokens.
    assert rows[-1][5:7] == (1.5, 2.5)


def test_what_the_cores_could_carry_follows_from_the_cpu_time_of_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.experiments.scale_out.psutil.cpu_count", lambda: 2)

    table = scale_out_table([replicas_run(1, forked=True, tokens=6000)])

    assert table.rows[0][-1] == pytest.approx(2 / 0.0025)
    assert table.title == "Replicas on this machine of 2 cores"
    assert "the client's also for its imports, tokenizing and report" in table.note


def test_every_replica_runs_on_one_core_and_replays() -> None:
    model = ScaleOutSettings(trace=Path("t"), concurrency=24).served_model(2)

    assert (model["replicas"], model["cpu_threads"], model["replay"]) == (2, 1, True)
    assert model["max_concurrency"] == 24


def test_no_replicas_are_no_experiment() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        ScaleOutSettings(trace=Path("t"), replicas=())


def test_parts_of_a_step_add_up_to_the_step_and_are_shown_a_row() -> None:
    seconds = dict.fromkeys(PARTS, 0.0) | {"model forward": 0.03, "schedule": 0.01}
    profile = StepProfile(seconds, rows=100, text_tokens=80)

    table = profile_table({"eager": profile}, ProfileLoad(num_requests=350))
    by_part = {row[0]: row[1:] for row in table.rows}

    assert by_part["model forward"] == pytest.approx((30.0, 300.0, 75.0))
    assert by_part["whole step"] == pytest.approx((40.0, 400.0, 100.0))
    assert "eager 100 rows and 80 text tokens (500 us a text token)" in table.note


def test_a_missing_folder_of_recordings_cannot_be_simulated(tmp_path: Path) -> None:
    assert not simulated_scale_out.can_simulate(tmp_path)
    for name in ("traces", "arrivals"):
        (tmp_path / name).mkdir()

    assert simulated_scale_out.can_simulate(tmp_path)


def test_the_simulation_is_found_where_only_the_package_is_installed(tmp_path: Path) -> None:
    # As the command `apar` does: from another folder, which is not on Python's path.
    code = (
        "from cluster.experiments.simulated_scale_out import PACKAGE, find_repository\n"
        "from importlib.util import find_spec\n"
        "before = find_spec('benchmarks')\n"
        "find_repository()\n"
        "print(before, find_spec(PACKAGE) is not None)\n"
    )

    found = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert found.stdout.split() == ["None", "True"]
