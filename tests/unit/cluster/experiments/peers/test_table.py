from __future__ import annotations

from cluster.experiments.peers.runs import PeerRun, RunKey
from cluster.experiments.peers.table import (
    comparison_table,
    comparisons,
    peer_goals,
    standing_table,
)


def run(
    method: str,
    number: int,
    tokens_per_s: float,
    *,
    latency_s: float = 1.0,
    prompts: int = 100,
    wall_s: float = 10.0,
    kept: int = 3,
) -> PeerRun:
    return PeerRun(
        key=RunKey(method=method, kv_share=0.5, round=number),
        answers=4,
        text_tokens=1000,
        wall_s=wall_s,
        tokens_per_s=tokens_per_s,
        kept_samples=kept,
        latency_mean_s=latency_s,
        latency_p99_s=2 * latency_s,
        steps=100,
        rows=800,
        sequences=4,
        prompt_tokens=prompts,
        peak_kv_tokens=640,
        kv_capacity_tokens=4096,
        preemptions=0,
    )


def of(*runs: PeerRun) -> dict[RunKey, PeerRun]:
    return {each.key: each for each in runs}


def test_ratios_are_medians_of_ratios_within_a_round() -> None:
    # The machine was twice as fast in the second round, and all alike in the third.
    [found] = comparisons(
        of(
            run("sequential", 0, 100.0), run("eager", 0, 150.0),
            run("sequential", 1, 200.0), run("eager", 1, 320.0),
            run("sequential", 2, 100.0), run("eager", 2, 100.0),
        )
    )  # fmt: skip

    assert found.ratio("eager", "sequential", lambda each: each.tokens_per_s) == 1.5
    assert found.median("eager", lambda each: each.tokens_per_s) == 150.0


def test_recomputed_tokens_are_those_beyond_sequential_decoding() -> None:
    [found] = comparisons(of(run("sequential", 0, 1.0), run("parent-stops", 0, 1.0, prompts=340)))
    table = comparison_table(found)
    column = [each.title for each in table.columns].index("recomputed")

    assert [row[column] for row in table.rows] == [0.0, 240.0]
    assert [row[0] for row in table.rows] == ["sequential (vLLM)", "parent stops, resubmitted"]


def test_whole_runs_are_shown_and_compared_where_one_of_them_has_too_few_samples() -> None:
    def shown(kept: int) -> tuple[list[object], str, str]:
        [found] = comparisons(
            of(
                run("sequential", 0, 100.0),
                run("client-forking", 0, 150.0, wall_s=8.0, kept=kept),
                run("eager", 0, 200.0, wall_s=20.0),
            )
        )
        table = comparison_table(found)
        titles = [column.title for column in table.columns]
        [goal] = peer_goals([found])
        names = ("kept samples", "whole run tokens/s", "throughput x")
        return [table.rows[1][titles.index(name)] for name in names], table.note, goal.measured

    cells, note, goal = shown(3)
    assert cells == [3, 125.0, 1.5]
    assert "by these samples" in note
    assert goal == "sequential: 2.00x, client-forking: 1.33x"
    cells, note, goal = shown(0)
    assert cells == [0, 125.0, 1.25]
    assert "by whole runs" in note
    assert goal == "sequential: 0.50x, client-forking: 0.40x (whole runs)"


def test_every_row_has_a_cell_for_every_column() -> None:
    [found] = comparisons(of(run("sequential", 0, 1.0), run("eager", 0, 2.0, latency_s=0.5)))

    for table in (comparison_table(found), standing_table([found])):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert standing_table([found]).rows == (("sequential (vLLM)", 0.5, 2.0, 0.5),)


def test_a_round_that_lacks_a_method_is_left_out() -> None:
    [found] = comparisons(
        of(run("sequential", 0, 1.0), run("eager", 0, 2.0), run("sequential", 1, 9.0))
    )

    assert len(found.rounds) == 1


def test_ours_is_ahead_only_if_it_beats_every_peer() -> None:
    def goal(client: float) -> tuple[str, bool | None]:
        [found] = peer_goals(
            comparisons(
                of(
                    run("sequential", 0, 100.0), run("client-forking", 0, client),
                    run("eager", 0, 150.0), run("adaptive", 0, 160.0),
                )
            )
        )  # fmt: skip
        return found.measured, found.is_met

    assert goal(128.0) == ("sequential: 1.60x, client-forking: 1.25x", True)
    assert goal(200.0) == ("sequential: 1.60x, client-forking: 0.80x", False)
