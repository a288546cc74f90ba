from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.experiments import figures
from cluster.experiments.cells import CellStore
from cluster.experiments.experiment_engine import Conditions
from cluster.experiments.figures import Runner, keys_of, num_answers
from cluster.experiments.settings import ExperimentSettings
from tests.unit.cluster.experiments.played_cells import cell

SETTINGS = ExperimentSettings(
    trace=Path("answers.jsonl"),
    kv_shares=(0.1, 0.9),
    mixed_kv_shares=(0.5,),
    concurrencies=(1, 8),
)


def test_ways_of_decoding_follow_each_other_at_every_point() -> None:
    keys = keys_of("fig5a", SETTINGS, ["structured", "mixed"])

    assert [(key.trace, key.kv_share, key.mode) for key in keys[:4]] == [
        ("structured", 0.1, "sequential"),
        ("structured", 0.1, "eager"),
        ("structured", 0.1, "adaptive"),
        ("structured", 0.9, "sequential"),
    ]
    assert [(key.trace, key.kv_share) for key in keys[6:]] == [("mixed", 0.5)] * 3
    assert all(key.concurrency is None for key in keys)


def test_a_round_goes_over_all_points() -> None:
    keys = keys_of("fig5a", SETTINGS.model_copy(update={"rounds": 2}), ["structured"])

    assert [key.round for key in keys] == [0] * 6 + [1] * 6
    assert [key.model_copy(update={"round": 0}) for key in keys[6:]] == keys[:6]


def test_without_a_mixed_trace_there_are_no_runs_of_it() -> None:
    assert {key.trace for key in keys_of("fig5a", SETTINGS, ["structured"])} == {"structured"}


def test_latency_is_measured_with_the_most_memory() -> None:
    keys = keys_of("fig5b", SETTINGS, ["structured"])

    assert {key.kv_share for key in keys} == {0.9}
    assert [key.concurrency for key in keys] == [1, 1, 1, 8, 8, 8]


@pytest.mark.parametrize(
    ("field", "value"), [("kv_shares", (1.5,)), ("modes", ("greedy",)), ("answers", 0)]
)
def test_a_setting_that_makes_no_sense_is_named(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        ExperimentSettings.model_validate({"trace": "answers.jsonl", field: value})


def test_the_adaptive_policy_learns_under_the_conditions_it_is_measured_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven: list[tuple[Conditions, int]] = []

    def played(engine: object, conditions: Conditions, make: object, number: int, **_: Any) -> int:
        driven.append((conditions, number))
        return number

    monkeypatch.setattr(figures, "drive", played)
    monkeypatch.setattr(figures, "cell_of", lambda key, *given: cell(key.mode))
    store = CellStore(tmp_path, SETTINGS)
    answers: Any = {"structured": range(20)}
    engine: Any = None
    runner = Runner(engine, answers, SETTINGS, store)
    # What played cells are found by.
    for mode in ("sequential", "adaptive"):
        runner.run(cell(mode).key, lambda: None)

    [(_, all_answers), (learning, few), (measured, number)] = driven
    assert (all_answers, few, number) == (20, 8, 20)
    assert (learning.keeps_learned, measured.keeps_learned) == (False, True)
    assert replace(learning, keeps_learned=True) == measured


def test_a_closed_loop_of_few_clients_measures_fewer_answers() -> None:
    one, eight = (key for key in keys_of("fig5b", SETTINGS, ["structured"]) if key.mode == "eager")

    assert num_answers(one, 96) == 16
    assert num_answers(eight, 96) == 32
    assert num_answers(eight, 20) == 20
    assert num_answers(keys_of("fig5a", SETTINGS, ["structured"])[0], 96) == 96
