from pathlib import Path

import pytest

from apar_core.errors import EvaluationError
from apar_core.tree.statistics import TreeStatistics
from cluster.experiments.cells import CellKey, CellStore, cell_of, medians
from cluster.experiments.driver import Drive, Served
from cluster.experiments.experiment_engine import Conditions, StepCounts
from cluster.experiments.samples import Sample, Spread
from cluster.experiments.settings import ExperimentSettings
from tests.unit.cluster.experiments.played_cells import cell

SETTINGS = ExperimentSettings(trace=Path("answers.jsonl"))
KEY = CellKey(figure="fig5a", trace="structured", mode="eager", kv_share=0.5)


def served(answer_id: str, tokens: int, latency_s: float) -> Served:
    statistics = TreeStatistics(
        threads=3,
        forks=2,
        max_depth=1,
        decode_steps=50,
        sequential_steps=101,
        attended_tokens=1000,
        sequential_attended_tokens=2000,
        max_cached_tokens=80,
        sequential_max_cached_tokens=120,
        text_tokens=100,
        control_tokens=7,
    )
    return Served(answer_id, "writing", tokens, latency_s, statistics)


def run(samples: tuple[Sample, ...], *, counted: int) -> Drive:
    return Drive(
        wall_s=10.0,
        served=(served("a", 100, 4.0), served("b", 300, 6.0)),
        samples=samples,
        whole=Sample(10.0, counted / 10.0, 70.0, 3.0, False),
        counts=StepCounts(steps=200, rows=600, text_tokens=counted, computed_tokens=900),
        kv_tokens=512,
        forks=4,
        forks_delayed=1,
    )


def test_a_cell_sums_up_the_samples_that_count_and_all_answers() -> None:
    rates = (10.0, 15.0, 20.0, 30.0, 40.0)
    samples = tuple(Sample(3.0 * i, rate, 100.0 * i, i, True) for i, rate in enumerate(rates))

    found = cell_of(KEY, Conditions(kv_share=0.5), run(samples, counted=400), max_requests=8)

    assert found.throughput.mean == 30.0
    assert found.kept_samples == 3
    assert found.kv_tokens == 300.0
    assert found.rows == 3
    assert found.overall_tokens_per_s == 40.0
    assert found.latency_s.mean == 5.0
    assert found.token_latency_s == pytest.approx((4 / 100 + 6 / 300) / 2)
    assert found.step_s == 0.05
    counts = found.categories["writing"]
    assert (counts.answers, counts.forked, counts.threads) == (2, 2, 6)
    # Text, fork and end tokens are predicted.
    assert counts.predicted_tokens == 2 * (100 + 2 + 3)


def test_generated_tokens_that_no_reader_sees_are_no_throughput() -> None:
    samples = tuple(Sample(3.0 * i, 50.0, 0.0, 1.0, True) for i in range(5))

    found = cell_of(KEY, Conditions(), run(samples, counted=500), max_requests=8)

    # 400 of 500 tokens are the answers'.
    assert found.throughput.mean == 40.0
    assert found.overall_tokens_per_s == 40.0


def test_what_fills_a_closed_loop_up_counts_in_all_throughputs() -> None:
    found = cell_of(KEY, Conditions(concurrency=2), run((), counted=500), max_requests=8)

    assert found.throughput.mean == found.overall_tokens_per_s == 50.0


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_run_with_too_few_samples_counts_as_a_whole(number: int) -> None:
    samples = tuple(Sample(3.0 * i, 99.0, 9.0, 9.0, True) for i in range(number))

    found = cell_of(KEY, Conditions(), run(samples, counted=400), max_requests=8)

    assert found.kept_samples == 0
    assert found.throughput.mean == 40.0
    assert (found.kv_tokens, found.rows) == (70.0, 3.0)


def test_cells_are_found_again_by_the_next_run(tmp_path: Path) -> None:
    first = CellStore(tmp_path, SETTINGS)
    first.add(cell("eager"))

    again = CellStore(tmp_path, SETTINGS)

    assert again.find(cell("eager").key) == cell("eager")
    assert again.find(cell("sequential").key) is None
    assert again.all("fig5a", "structured") == [cell("eager")]
    assert again.all("fig5a", "mixed") == []


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    store = CellStore(tmp_path, SETTINGS)
    store.add(cell("sequential"))
    store.add(cell("eager"))
    path = tmp_path / "cells.jsonl"
    path.write_text(path.read_text()[:-20])

    again = CellStore(tmp_path, SETTINGS)

    assert again.find(cell("sequential").key) is not None
    assert again.find(cell("eager").key) is None


@pytest.mark.parametrize("changed", ["trace", "mixed_trace"])
def test_a_folder_of_a_trace_that_has_changed_is_refused(tmp_path: Path, changed: str) -> None:
    paths = {name: tmp_path / name for name in ("trace", "mixed_trace")}
    for path in paths.values():
        path.write_text("one answer")
    settings = ExperimentSettings.model_validate(paths)
    CellStore(tmp_path / "out", settings).add(cell("eager"))
    CellStore(tmp_path / "out", settings)
    paths[changed].write_text("another one")

    with pytest.raises(EvaluationError, match=f"{changed}_sha256 was"):
        CellStore(tmp_path / "out", settings)


def test_a_folder_may_get_more_rounds(tmp_path: Path) -> None:
    CellStore(tmp_path, SETTINGS).add(cell("eager"))

    again = CellStore(tmp_path, SETTINGS.model_copy(update={"rounds": 3}))

    assert again.find(cell("eager").key) is not None
    assert again.find(cell("eager", number=1).key) is None


def test_a_point_is_the_median_of_its_rounds() -> None:
    rounds = [
        cell("eager", number=0, tokens_per_s=100, steps=80, kept_samples=4),
        cell("eager", number=1, tokens_per_s=300, steps=81, kept_samples=3),
        cell("eager", number=2, tokens_per_s=110, steps=80, kept_samples=5),
    ]
    others = [cell("sequential", number=number) for number in range(3)]

    eager, sequential = medians([*rounds, *others])

    assert eager.key == cell("eager").key
    assert eager.throughput == Spread(110, 109, 111)
    assert (eager.steps, eager.kept_samples, eager.samples) == (80, 3, ())
    assert sequential.key == cell("sequential").key


def test_a_round_without_all_modes_is_left_out() -> None:
    whole = [cell("eager", tokens_per_s=100), cell("sequential", tokens_per_s=50)]
    begun = cell("sequential", number=1, tokens_per_s=80)

    assert [each.throughput.mean for each in medians([*whole, begun])] == [100, 50]


def test_where_a_round_has_too_few_samples_the_median_is_of_whole_runs() -> None:
    cells = [
        cell("eager", number=0, tokens_per_s=150, overall_tokens_per_s=100),
        cell("eager", number=1, tokens_per_s=90, overall_tokens_per_s=90, kept_samples=0),
    ]

    [found] = medians(cells)

    assert found.kept_samples == 0
    assert found.throughput == Spread(95, 95, 95)


def test_how_engines_are_asked_for_is_no_setting_but_what_comes_of_it_is(tmp_path: Path) -> None:
    CellStore(tmp_path, SETTINGS).add(cell("eager"))

    CellStore(tmp_path, SETTINGS.model_copy(update={"side_by_side": True}))
    with pytest.raises(EvaluationError, match="side_by_side was 'True', is 'False'"):
        CellStore(tmp_path, SETTINGS.model_copy(update={"side_by_side": False}))


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    CellStore(tmp_path, SETTINGS).add(cell("eager"))

    with pytest.raises(EvaluationError, match="answers was '48', is '12'"):
        CellStore(tmp_path, SETTINGS.model_copy(update={"answers": 12}))
