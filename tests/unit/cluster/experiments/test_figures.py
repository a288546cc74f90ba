from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.experiments import figures, side_by_side
from cluster.experiments.cells import CellStore
from cluster.experiments.driver import RunPlan
from cluster.experiments.figures import Runner, keys_of, num_answers
from cluster.experiments.settings import ExperimentSettings
from tests.unit.cluster.experiments.peers.played import unforked_answer
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


class Played:
    """What a runner has done: each time, the runs that were side by side."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: int) -> None:
        self.driven: list[list[RunPlan]] = []
        monkeypatch.setattr(figures, "drive_side_by_side", self._drive)
        monkeypatch.setattr(side_by_side, "drive", self._drive_one)
        monkeypatch.setattr(
            figures, "cell_of", lambda key, *given: cell(key.mode).model_copy(update={"key": key})
        )
        self.store = CellStore(tmp_path, SETTINGS)
        answers: Any = {"structured": [unforked_answer()] * 20}
        names: Any = range(engines)
        self.runner = Runner(names, answers, SETTINGS, self.store)

    def _drive(self, plans: Sequence[RunPlan], **_: Any) -> list[Any]:
        self.driven.append(list(plans))
        return [None] * len(plans)

    def _drive_one(self, plan: RunPlan, **_: Any) -> Any:
        self.driven.append([plan])
        return SimpleNamespace(wall_s=1.0, counts=SimpleNamespace(steps=10))


def test_runs_of_a_point_are_side_by_side_each_in_its_own_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path, monkeypatch, engines=3)
    keys = keys_of("fig5a", SETTINGS, ["structured"])

    first, _ = played.runner.groups(keys)
    played.runner.run(first, lambda: None)

    flat, learning, together = played.driven
    assert [[plan.num_questions for plan in run] for run in played.driven] == [[8], [8], [20] * 3]
    used: list[Any] = [plan.engine for plan in (*flat, *learning, *together)]
    assert used == [2, 2, 0, 1, 2]
    assert [plan.conditions.policy for plan in together] == ["eager", "eager", "adaptive"]
    # Twice the step of the first answers.
    assert together[2].conditions == replace(learning[0].conditions, keeps_learned=True)
    assert together[2].conditions.token_time_s == pytest.approx(0.2)
    assert [played.store.find(key) is not None for key in keys] == [True] * 3 + [False] * 3


def test_with_one_engine_runs_follow_each_other_and_the_step_is_that_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path, monkeypatch, engines=1)
    groups = list(played.runner.groups(keys_of("fig5a", SETTINGS, ["structured"])[:3]))

    for group in groups:
        played.runner.run(group, lambda: None)

    assert [len(group) for group in groups] == [1, 1, 1]
    assert [plan.num_questions for [plan] in played.driven] == [20, 20, 8, 20]
    # Played cells have 80 steps in 4 seconds.
    assert played.driven[-1][0].conditions.token_time_s == pytest.approx(2 * 4 / 80)


def test_a_closed_loop_of_few_clients_measures_fewer_answers() -> None:
    one, eight = (key for key in keys_of("fig5b", SETTINGS, ["structured"]) if key.mode == "eager")

    assert num_answers(one, 96) == 16
    assert num_answers(eight, 96) == 32
    assert num_answers(eight, 20) == 20
    assert num_answers(keys_of("fig5a", SETTINGS, ["structured"])[0], 96) == 96
