"""States of data-parallel ranks as one."""

from dataclasses import asdict

from apar_core.scheduler.core_state import CoreState, StepTotals, combined
from apar_core.step_costs.costs import StepCosts
from tests.fakes.core_states import a_core_state


def rank(threads: int, steps: int, kv_blocks: int = 10) -> CoreState:
    return a_core_state(
        threads=threads,
        kv_blocks=kv_blocks,
        fork_counters={"forks": threads},
        admission_counters={"delayed": {"policy": steps}},
        step_s=steps / 100,
        steps={"num_steps": steps, "num_rows": 10 * steps, "busy_s": steps / 10},
        step_costs={
            "name": "learned",
            "kind": "measured",
            "source": "",
            "matrix_s": [[1, steps]],
            "attended_token_s": 0.0,
        },
    )


def test_counts_of_ranks_are_added_and_steps_are_those_of_the_busiest() -> None:
    ranks = [rank(3, 20), rank(4, 50)]

    whole = combined(ranks)

    assert (whole.threads, whole.kv_blocks, whole.fork_counters.forks) == (7, 20, 7)
    assert whole.admission_counters.delayed == {"policy": 70}
    assert (whole.step_s, whole.steps) == (0.5, StepTotals(50, 700, 5.0))
    assert whole.step_costs == ranks[1].step_costs
    assert combined(ranks[:1]) == ranks[0]


def test_a_state_survives_its_plain_form() -> None:
    state = rank(3, 20)

    assert CoreState.from_plain(asdict(state)) == state
    assert isinstance(state.step_costs, StepCosts)
    assert CoreState.from_plain(asdict(a_core_state())) == a_core_state()


def test_ranks_with_vllms_own_scheduler_have_no_steps() -> None:
    whole = combined([a_core_state(threads=2)] * 2)

    assert (whole.threads, whole.steps, whole.kv_use) == (4, None, 0.0)
