from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from cluster.experiments import open_engine
from cluster.experiments.open_engine import open_engines
from cluster.experiments.settings import ExperimentSettings


def test_engines_that_would_all_take_the_same_memory_are_refused() -> None:
    settings = ExperimentSettings(trace=Path("t"), model="some/checkpoint", side_by_side=True)

    with (
        pytest.raises(EvaluationError, match=r"3 engines .*gpu_memory_utilization.: 0\.30"),
        open_engines(settings, "some/checkpoint", 3),
    ):
        pass


def test_no_engine_schedules_ahead_into_the_turn_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Any] = []

    class Opened:
        def __init__(self, settings: ExperimentSettings, model_path: str) -> None:
            opened.append(settings.engine)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(open_engine, "open_engine", Opened)
    share = {"gpu_memory_utilization": 0.4}
    for number, settings in (
        (2, ExperimentSettings(trace=Path("t"), model="some/checkpoint", engine=share)),
        (1, ExperimentSettings(trace=Path("t"))),
    ):
        with open_engines(settings, "path", number) as engines:
            assert len(engines) == number

    assert opened == [{**share, "async_scheduling": False}] * 2 + [{}]
