import random

import pytest

from apar_core.scheduler.fork_policy import AdaptivePolicy, EagerPolicy, build_policy
from apar_core.scheduler.step_time import MIN_STEPS
from apar_core.step_costs.costs import StepBatch


def step_s(rows: int) -> float:
    """Return 4 ms plus half a millisecond per row."""
    return 0.004 + 0.0005 * rows


def taught(token_time_s: float, *, most_rows: int = 32) -> AdaptivePolicy:
    policy = AdaptivePolicy(token_time_s)
    for number in range(20 * MIN_STEPS):
        rows = 1 + number % most_rows
        policy.observe(StepBatch(rows, 0), step_s(rows))
    return policy


def admitted(policy: AdaptivePolicy, batch: StepBatch, wanted: int) -> int:
    """Return how many of `wanted` forks the policy admits, one by one."""
    for number in range(wanted):
        batch = batch.grown(rows=1, attended_tokens=0)
        if not policy.admits(batch):
            return number
    return wanted


def test_eager_admits_into_any_batch() -> None:
    policy = EagerPolicy()
    policy.observe(StepBatch(1, 1), 1000.0)

    assert policy.admits(StepBatch(10**6, 10**9))


@pytest.mark.parametrize(("token_time_s", "rows"), [(0.0084, 8), (0.0124, 16), (0.0184, 28)])
def test_adaptive_fills_the_step_up_to_the_time_per_token(token_time_s: float, rows: int) -> None:
    assert admitted(taught(token_time_s), StepBatch(2, 0), 100) == rows - 2


def test_adaptive_admits_nothing_into_a_step_that_is_already_too_long() -> None:
    assert admitted(taught(0.010), StepBatch(20, 0), 5) == 0


def test_adaptive_is_eager_until_it_has_seen_enough_steps() -> None:
    policy = AdaptivePolicy(0.001)
    for _ in range(MIN_STEPS - 1):
        policy.observe(StepBatch(1, 0), 1.0)
    assert policy.admits(StepBatch(100, 0))

    policy.observe(StepBatch(1, 0), 1.0)
    assert not policy.admits(StepBatch(2, 0))


def test_adaptive_counts_the_tokens_that_a_fork_attends_to() -> None:
    policy = AdaptivePolicy(0.010)
    for number in range(20 * MIN_STEPS):
        attended = 1000 * (number % 8)
        policy.observe(StepBatch(4, attended), 0.005 + attended * 1e-6)

    assert policy.admits(StepBatch(5, 4500))
    assert not policy.admits(StepBatch(5, 5500))


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 8, 8), (0.2, 3, 6)])
def test_adaptive_keeps_a_margin_for_the_scatter_of_steps(
    noise: float, least: int, most: int
) -> None:
    policy = AdaptivePolicy(0.0084)
    numbers = random.Random(1)
    for number in range(30 * MIN_STEPS):
        rows = 1 + number % 32
        policy.observe(StepBatch(rows, 0), step_s(rows) * numbers.gauss(1, noise))

    assert least <= 1 + admitted(policy, StepBatch(1, 0), 100) <= most


@pytest.mark.parametrize(("most_rows", "rows"), [(6, 12), (2, 8)])
def test_adaptive_grows_to_at_most_twice_the_rows_seen_or_to_eight(
    most_rows: int, rows: int
) -> None:
    policy = taught(10.0, most_rows=most_rows)
    assert admitted(policy, StepBatch(1, 0), 100) == rows - 1

    policy.observe(StepBatch(12, 0), step_s(12))
    assert admitted(policy, StepBatch(1, 0), 100) == 2 * 12 - 1


@pytest.mark.parametrize(
    ("rows", "useful_share", "pays"),
    # One more row takes 0.5 ms of 4 ms and 0.5 ms per row.
    [(2, 0.4, True), (2, 0.15, False), (10, 0.4, False), (10, 0.6, True), (30, 1.0, True)],
)
def test_a_row_pays_if_the_step_grows_by_less_than_its_text(
    rows: int, useful_share: float, pays: bool
) -> None:
    batch = StepBatch(rows, 0)

    assert taught(1.0).pays(batch, attended=0, useful_share=useful_share) is pays
    assert EagerPolicy().pays(batch, attended=0, useful_share=0.0)
    assert AdaptivePolicy(1.0).pays(batch, attended=0, useful_share=useful_share)


def test_a_row_that_attends_to_much_pays_less() -> None:
    policy = AdaptivePolicy(1.0)
    for number in range(20 * MIN_STEPS):
        attended = 1000 * (number % 8)
        policy.observe(StepBatch(4, attended), 0.005 + attended * 1e-6)

    assert policy.pays(StepBatch(4, 2000), attended=500, useful_share=0.5)
    assert not policy.pays(StepBatch(4, 2000), attended=1500, useful_share=0.5)


def test_policies_are_built_by_name() -> None:
    assert isinstance(build_policy("eager", 0.01), EagerPolicy)
    adaptive = build_policy("adaptive", 0.025)
    assert isinstance(adaptive, AdaptivePolicy)
    assert adaptive.token_time_s == 0.025
