from apar_core.scheduler.step_time import StepClock
from apar_core.step_costs.costs import StepBatch
from tests.fakes.clock import Clock

BATCH = StepBatch(2, 100)


def test_first_step_lasts_from_its_schedule_to_its_output() -> None:
    clock = Clock()
    steps = StepClock(clock)
    clock.now_s = 5.0
    steps.begin("a", BATCH)
    clock.now_s = 5.25

    assert steps.end("a", still_busy=True) == (BATCH, 0.25)


def test_busy_steps_last_from_output_to_output() -> None:
    clock = Clock()
    steps = StepClock(clock)
    steps.begin("a", BATCH)
    clock.now_s = 1.0
    steps.end("a", still_busy=True)
    clock.now_s = 1.5  # the engine's own work between steps
    steps.begin("b", BATCH)
    clock.now_s = 3.0

    assert steps.end("b", still_busy=True) == (BATCH, 2.0)


def test_steps_their_rows_and_their_time_are_counted() -> None:
    clock = Clock()
    steps = StepClock(clock)
    assert (steps.num_steps, steps.num_rows, steps.busy_s) == (0, 0, 0.0)

    for number, batch in enumerate([BATCH, StepBatch(3, 100)]):
        steps.begin(number, batch)
        clock.now_s += 1.5
        steps.end(number, still_busy=False)
        clock.now_s += 10.0
    steps.end("unknown", still_busy=False)

    assert (steps.num_steps, steps.num_rows, steps.busy_s) == (2, 5, 3.0)


def test_idle_time_is_not_part_of_a_step() -> None:
    clock = Clock()
    steps = StepClock(clock)
    steps.begin("a", BATCH)
    clock.now_s = 1.0
    steps.end("a", still_busy=False)
    clock.now_s = 60.0
    steps.begin("b", BATCH)
    clock.now_s = 60.5

    assert steps.end("b", still_busy=True) == (BATCH, 0.5)


def test_steps_scheduled_ahead_share_their_time() -> None:
    clock = Clock()
    steps = StepClock(clock)
    steps.begin("a", BATCH)
    clock.now_s = 0.1
    steps.begin("b", StepBatch(3, 100))
    clock.now_s = 1.0
    assert steps.end("a", still_busy=True) == (BATCH, 1.0)
    clock.now_s = 2.0

    assert steps.end("b", still_busy=True) == (StepBatch(3, 100), 1.0)


def test_a_step_without_rows_is_not_timed() -> None:
    clock = Clock()
    steps = StepClock(clock)
    steps.begin("a", BATCH)
    clock.now_s = 1.0
    steps.end("a", still_busy=True)
    clock.now_s = 4.0
    assert steps.end("empty", still_busy=True) is None
    steps.begin("b", BATCH)
    clock.now_s = 5.0

    assert steps.end("b", still_busy=True) == (BATCH, 1.0)


def test_mean_follows_the_steps() -> None:
    clock = Clock()
    steps = StepClock(clock)
    for number in range(200):
        steps.begin(number, BATCH)
        clock.now_s += 0.01 if number < 100 else 0.03
        steps.end(number, still_busy=True)
        if number == 0:
            assert steps.mean_s == 0.01

    assert 0.029 < steps.mean_s <= 0.03
