"""Times and objectives of a request, worked out by hand."""

import pytest

from apar_core.errors import EvaluationError
from cluster.loadtest.statistics import ITL, REQUEST_TIMES, meets, parse_slo, values_of
from tests.unit.cluster.loadtest.load_records import record


def test_every_time_matches_its_definition() -> None:
    # Text at 1, 1.5, 2, 2.5 and 3 s, 5 tokens; 3 steps on the critical path.
    one = record(apar={"decode_steps": 3})

    assert {name: time.of(one) for name, time in REQUEST_TIMES.items()} == {
        "ttft": 1.0,
        "tpot": 0.5,
        "path": 1.0,
        "certain": 2.0,
        "paragraph": 2.0,
        "silence": 0.5,
        "e2e": 3.0,
    }
    assert values_of(ITL, [one]) == [0.5] * 4


def test_times_of_requests_that_failed_do_not_count() -> None:
    assert values_of("e2e", [record(error="cut"), record()]) == [3.0]


def test_one_token_has_no_time_per_token() -> None:
    one = record(pieces=[(1.0, 4)], text_tokens=1)

    assert REQUEST_TIMES["tpot"].of(one) is None
    assert REQUEST_TIMES["path"].of(one) is None
    assert REQUEST_TIMES["silence"].of(one) is None


def test_the_longest_silence_is_that_between_two_chunks_of_text() -> None:
    one = record(pieces=[(1.0, 4), (1.5, 4), (4.0, 4), (4.5, 4)])

    assert REQUEST_TIMES["silence"].of(one) == 2.5


def test_the_time_to_certain_token_is_the_mean_over_the_text() -> None:
    one = record(pieces=[(1.0, 4), (2.0, 12)])

    assert REQUEST_TIMES["certain"].of(one) == (4 * 1.0 + 12 * 2.0) / 16
    assert REQUEST_TIMES["certain"].of(record(pieces=[])) is None


def test_objectives_are_read_with_their_units() -> None:
    assert parse_slo("ttft=2s, tpot=50ms,e2e=0.5s") == {"ttft": 2.0, "tpot": 0.05, "e2e": 0.5}


def test_an_objective_may_be_a_multiple_of_a_step() -> None:
    assert parse_slo("ttft=1s,tpot=1.5x", step_s=0.02) == {"ttft": 1.0, "tpot": 0.03}
    for text, problem in (
        ("ttft=fast", "nor a multiple of the step time, such as 1.5x"),
        ("tpot=-1x", "the time must be above 0"),
        ("tpot=nanx", "the time must be above 0"),
    ):
        with pytest.raises(EvaluationError, match=problem):
            parse_slo(text, step_s=0.02)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "first=2s",
            "unknown time 'first'; known: ttft, tpot, path, certain, paragraph, silence, e2e",
        ),
        ("ttft=2", "'2' is not a duration"),
        ("ttft=1.2.3s", "'1.2.3s' is not a duration"),
        ("ttft=0s", "the time must be above 0"),
        ("ttft=1s,ttft=2s", "ttft is repeated"),
        (" , ", "contains no objective"),
    ],
)
def test_an_invalid_objective_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(EvaluationError, match=r"--slo") as error:
        parse_slo(text)

    assert problem in str(error.value)


def test_an_objective_includes_its_limit() -> None:
    assert meets(record(), {"ttft": 1.0, "e2e": 3.0})
    assert not meets(record(), {"ttft": 0.999, "e2e": 3.0})
    assert not meets(record(error="cut"), {"ttft": 1.0})


def test_an_objective_on_a_missing_time_is_met() -> None:
    assert meets(record(), {"path": 0.001})
