from pathlib import Path

import pytest

from apar_core.scheduler.row_limits import RowWarnings
from tests.fakes.scripted_engine import END, FORK, EngineShape, ScriptedEngine

TREE = {"": [10, FORK, 11, FORK, 12, 13, 14, END], "0": [15, 16, 17, 18, END], "1": [19, 20, END]}


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("apar_core")]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_forks_beyond_the_rows_or_the_cuda_graphs_of_an_engine_are_reported_once(
    model_dir: Path, caplog: pytest.LogCaptureFixture, run_ahead: bool
) -> None:
    engine = ScriptedEngine(EngineShape(max_num_seqs=3, run_ahead=run_ahead), model_dir)
    # No graphs on a CPU.
    engine.scheduler.row_warnings = RowWarnings(max_rows=3, graph_rows=2)
    for number in range(3):
        engine.add(f"r{number}", [9] * 3, TREE, arrival_time=float(number))

    engine.run()

    messages = sorted(reported(caplog))
    assert [message[:44] for message in messages] == [
        "a step has 3 rows, more than the largest CUD",
        "forked threads wait because all 3 rows of th",
    ]
    assert "(2)" in messages[0]


def test_an_engine_with_room_reports_nothing(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(EngineShape(), model_dir)
    engine.add("r0", [9] * 3, TREE)

    engine.run()

    assert not reported(caplog)
