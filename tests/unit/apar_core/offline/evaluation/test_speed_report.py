"""Tables of the speed report, and the transcribed numbers of the paper."""

from __future__ import annotations

import pytest

from apar_core.offline.evaluation.paper_figures import (
    ATTENDED_TOKENS,
    CACHED_TOKENS,
    MEAN_ACCELERATED,
    SCORES,
    THREADS,
    category_label,
    paper_model,
)
from apar_core.offline.evaluation.speed_report import (
    ATTENDED,
    CACHED,
    SpeedRun,
    all_tables,
    saving_table,
    steps_table,
    summary_table,
    threads_table,
)
from apar_core.reporting import ReportTable
from tests.unit.apar_core.offline.evaluation.test_measurement import FORKED, measurement

PLAIN = measurement(question_id="3", category="math")
RUN = SpeedRun("vicuna-7b-v1.3", "mt-bench", (measurement(), FORKED, PLAIN))


def rows(table: ReportTable) -> dict[object, tuple[object, ...]]:
    return {row[0]: row[1:] for row in table.rows}


def test_savings_are_shown_by_category_with_the_papers() -> None:
    table = rows(saving_table(RUN, CACHED))

    assert list(table) == ["Math", "Writing", "Mean", "Mean(>1%)"]
    assert table["Writing"][:4] == (2, 22, 29, 1 - 22 / 29)
    assert table["Writing"][4:6] == (513.0, 587.6)
    assert table["Math"][:4] == (1, 19, 19, 0)
    assert table["Mean"][:3] == (3, 21, pytest.approx(77 / 3))
    # Mathematics saves nothing, so the last row has only writing.
    assert table["Mean(>1%)"][:3] == table["Writing"][:3]
    assert table["Mean(>1%)"][4:6] == (502.1, 571.1)


def test_the_summary_has_the_means_of_accelerated_categories() -> None:
    [row] = summary_table([RUN], ATTENDED, 2).rows

    assert row[:2] == ("MT Bench", "vicuna-7b-v1.3")
    assert row[2:4] == ((145 + 510) / 44, (145 + 735) / 40)
    assert row[6:8] == (417.5, 496.5)
    assert row[8] == pytest.approx(0.159, abs=0.0005)


def test_a_run_without_accelerated_categories_has_no_such_mean() -> None:
    run = SpeedRun("m", "mt-bench", (PLAIN,))

    assert summary_table([run], CACHED, 1).rows == (("MT Bench", "m", *[None] * 7),)
    assert rows(saving_table(run, CACHED))["Mean(>1%)"] == (None,) * 7


def test_threads_of_several_models_share_a_table() -> None:
    other = SpeedRun("13b", "mt-bench", (FORKED,))

    table = rows(threads_table([RUN, other]))

    assert table["Math"] == (1, 0, 1.1, 0.1, None, None, None, None)
    assert table["Writing"] == (2, 0.5, 3.7, 0.6, 3, 1, 3.4, 0.6)
    assert table["Mean"][:4] == (pytest.approx(5 / 3), pytest.approx(1 / 3), 2.7, 0.37)
    assert list(table)[-1] == "Mean"


def test_the_mean_stays_last_if_a_later_run_has_more_categories() -> None:
    first = SpeedRun("a", "traces", (FORKED,))
    second = SpeedRun("b", "traces", (PLAIN, FORKED))

    assert list(rows(threads_table([first, second]))) == ["Writing", "Math", "Mean"]


def test_speeds_are_shown_with_their_baseline() -> None:
    slow = (measurement(decoder="plain", decode_s=4.0, timed_tokens=16),)
    run = SpeedRun("m", "mine", (FORKED, PLAIN), slow)

    table = rows(steps_table(run))

    assert table["Writing"] == (1, 29, 12, 2.5, 28, 4, 7, None)
    assert table["Math"][4:] == (4, None, None, None)
    assert table["Mean"][4:6] == (12, 4)


def test_intervals_are_paired_over_questions() -> None:
    slow = [
        measurement(question_id=str(n), decoder="plain", decode_s=float(1 + n), timed_tokens=20)
        for n in range(1, 7)
    ]
    # Always twice as fast, whichever questions are drawn.
    fast = [each.model_copy(update={"decode_s": (each.decode_s or 0) / 2}) for each in slow]

    speeds = rows(steps_table(SpeedRun("m", "mine", fast, slow)))
    [summary] = summary_table([SpeedRun("m", "mine", [FORKED] * 4)], CACHED, 1).rows

    assert speeds["Mean"][6:] == (pytest.approx(2.0), "2.00 to 2.00")
    saved = f"{1 - 25 / 39:.1%}"
    assert summary[5] == f"{saved} to {saved}"


def test_a_report_has_each_table_once() -> None:
    vicuna = SpeedRun("vicuna-7b", "vicuna-bench", (FORKED,))

    names = [table.name for table in all_tables([RUN, vicuna])]

    assert len(names) == len(set(names)) == 2 + 2 + 3 * 2
    assert names[0] == "table1_max_cached_tokens"
    assert "attended_tokens_vicuna-7b-vicuna-bench" in names


def test_a_report_has_no_empty_columns() -> None:
    table = all_tables([SpeedRun("m", "mine", (FORKED,))])[3]

    assert [column.title for column in table.columns] == [
        *("Task", "Answers", "APAR", "Flattened", "Saved")
    ]
    assert rows(table)["Writing"] == (1, 25, 39, 1 - 25 / 39)


@pytest.mark.parametrize(
    ("label", "model"),
    [
        ("vicuna-7b-v1.3", "A-7B"),
        ("vicuna-13b-20230322-new-hp-fp16", "A-13B"),
        ("Llama-2-7B", "A-7B"),
        ("vicuna-33b-v1.3", None),
        ("apar-tiny", None),
        ("x-1.7b", None),
    ],
)
def test_the_papers_model_has_the_same_size(label: str, model: str | None) -> None:
    assert paper_model(label) == model


def test_the_papers_means_follow_from_its_rows() -> None:
    """A check of the transcription: cached tokens are averages over a category's questions."""
    questions = {"Coding": 7, "Math": 3}
    for (benchmark, _), table in CACHED_TOKENS.items():
        size = questions if benchmark == "vicuna-bench" else {}
        for column in (0, 1):
            kept = {
                name: row
                for name, row in table.items()
                if not name.startswith("Mean") and 1 - row[0] / row[1] > 0.01
            }
            weights = {name: size.get(name, 10) for name in kept}
            total = sum(row[column] * weights[name] for name, row in kept.items())
            assert total / sum(weights.values()) == pytest.approx(
                table[MEAN_ACCELERATED][column], abs=0.06
            )


def test_the_papers_tables_have_the_rows_of_our_categories() -> None:
    vicuna = "coding common-sense counterfactual fermi generic knowledge math roleplay writing"
    mt = "coding extraction humanities math reasoning roleplay stem writing"
    for (benchmark, _), table in {**THREADS, **CACHED_TOKENS, **ATTENDED_TOKENS}.items():
        categories = (vicuna if benchmark == "vicuna-bench" else mt).split()
        assert {category_label(name) for name in categories} == {
            name for name in table if not name.startswith("Mean")
        }
    assert SCORES["mt-bench"]["STEM"] == (7.92, 7.15, 7.67, 7.80)
