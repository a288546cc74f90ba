from cluster.experiments.cells import Cell
from cluster.experiments.goals import latency_goals, throughput_goals
from tests.unit.cluster.experiments.played_cells import cell


def throughputs(eager: dict[float, float], sequential: dict[float, float]) -> list[Cell]:
    return [
        *(cell("eager", kv_share=share, tokens_per_s=rate) for share, rate in eager.items()),
        *(
            cell("sequential", kv_share=share, tokens_per_s=rate)
            for share, rate in sequential.items()
        ),
    ]


def verdicts(structured: list[Cell], mixed: list[Cell]) -> list[bool | None]:
    return [goal.is_met for goal in throughput_goals(structured, mixed, "eager")]


def test_goals_are_ratios_at_equal_memory() -> None:
    structured = throughputs({0.1: 90, 0.2: 151, 0.9: 225}, {0.1: 50, 0.2: 100, 0.9: 150})
    mixed = [cell("eager", tokens_per_s=101), cell("sequential", tokens_per_s=100)]

    # 1.8x, 1.51x and 1.5x; 0.2 of the memory gives 151 against at best 150.
    assert verdicts(structured, mixed) == [True, True, True, True]


def test_each_goal_can_be_missed_by_itself() -> None:
    good = {0.1: 50.0, 0.2: 100.0, 0.9: 150.0}
    mixed = [cell("eager", tokens_per_s=99), cell("sequential", tokens_per_s=100)]

    # 1.49x at one point, 1.69x at best, 149 tokens/s with 0.2 of the memory.
    structured = throughputs({0.1: 84.5, 0.2: 149.0, 0.9: 225.0}, good)
    assert verdicts(structured, mixed) == [False, False, False, False]


def test_what_was_not_run_is_not_judged() -> None:
    assert verdicts([], []) == [None, None, None, None]


def test_claims_about_all_of_the_memory_need_both_its_ends() -> None:
    for shares in ((0.1, 0.2), (0.2, 0.9)):
        rates = dict.fromkeys(shares, 100.0)
        structured = throughputs(dict.fromkeys(shares, 200.0), rates)
        assert verdicts(structured, []) == [None, True, None, None]
    both = (0.1, 0.2, 0.9)
    structured = throughputs(dict.fromkeys(both, 200.0), dict.fromkeys(both, 100.0))
    assert verdicts(structured, []) == [True, True, True, None]


def test_where_a_run_has_too_few_samples_whole_runs_are_compared_and_that_is_said() -> None:
    cells = [
        cell("sequential", kv_share=share, tokens_per_s=100, overall_tokens_per_s=90)
        for share in (0.1, 0.2, 0.9)
    ]
    cells += [
        cell("eager", kv_share=share, tokens_per_s=200, overall_tokens_per_s=126, kept_samples=kept)
        for share, kept in ((0.1, 3), (0.2, 0), (0.9, 3))
    ]

    goals = throughput_goals(cells, cells, "eager")

    assert [goal.is_met for goal in goals] == [False, False, True, True]
    assert goals[0].measured == "0.1: 1.40x, 0.2: 1.40x, 0.9: 1.40x (whole runs)"
    assert all(goal.measured.endswith("1.40x (whole runs)") for goal in goals)


def test_a_ratio_is_the_median_of_those_within_a_round() -> None:
    # The machine became twice as slow after the first round, and for a moment in the third.
    rates = [(100, 200), (50, 90), (50, 60)]
    cells = [
        each
        for number, (sequential, eager) in enumerate(rates)
        for share in (0.1, 0.2, 0.9)
        for each in (
            cell("sequential", number=number, kv_share=share, tokens_per_s=sequential),
            cell("eager", number=number, kv_share=share, tokens_per_s=eager),
        )
    ]

    goals = throughput_goals(cells, [], "eager")

    assert goals[0].measured == "0.1: 1.80x, 0.2: 1.80x, 0.9: 1.80x"
    assert goals[2].measured == "1.80x"


def test_latency_is_judged_where_the_ratio_is_worst() -> None:
    cells = [
        cell("sequential", figure="fig5b", concurrency=1, latency_s=1.0),
        cell("eager", figure="fig5b", concurrency=1, latency_s=0.5),
        cell("sequential", figure="fig5b", concurrency=8, latency_s=2.0),
        cell("eager", figure="fig5b", concurrency=8, latency_s=1.32),
    ]

    [goal] = latency_goals(cells, "eager")

    assert goal.measured == "1: 0.50x, 8: 0.66x"
    assert goal.is_met is False
    assert latency_goals(cells[:2], "eager")[0].is_met is True
