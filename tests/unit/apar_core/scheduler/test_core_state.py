"""States of data-parallel ranks as one."""

from apar_core.scheduler.core_state import combined


def rank(threads: int, steps: int) -> dict[str, object]:
    return {
        "threads": threads,
        "fork_counters": {"forks": threads},
        "step_s": steps / 100,
        "steps": {"num_steps": steps, "num_rows": 10 * steps, "busy_s": steps / 10},
        "step_costs": {"fixed_s": steps},
    }


def test_counts_of_ranks_are_added_and_steps_are_those_of_the_busiest() -> None:
    assert combined([rank(3, 20), rank(4, 50)]) == {
        "threads": 7,
        "fork_counters": {"forks": 7},
        "step_s": 0.5,
        "steps": {"num_steps": 50, "num_rows": 700, "busy_s": 5.0},
        "step_costs": {"fixed_s": 50},
    }
    assert combined([rank(3, 20)]) == rank(3, 20)
