"""Where an answer ends: stop strings, stop tokens, token budgets. All of them on the restored text.

The engine is made to generate the threads of a known answer, so each end can be told by hand.
"""

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.integration.sampling.asking import (
    FORK,
    FULL_TEXT,
    READING_ORDER,
    SCRIPT,
    encode,
    full_ids,
    replayed,
    token_id,
    tokenizer,
)
from tests.integration.sampling.conftest import Ask

pytestmark = pytest.mark.engine

# Threads that write nothing, and what is read of them in the end.
EMPTY_THREADS: dict[str, tuple[dict[str, list[Any]], str]] = {
    "the only thread": ({"": []}, ""),
    "a child": ({"": ["One", FORK, " two"], "0": []}, "One two"),
    "a root but for its fork": ({"": [FORK], "0": [" one"]}, " one"),
    "both": ({"": [FORK], "0": []}, ""),
}
STOP_STRINGS = {
    "within the root": "1. Re",
    "within a child": "sleep",
    "within a child's child": "greens",
    "from a parent into its child": "Rest: sl",
    "from a child into its parent's next paragraph": "well.\n2. F",
    "from a child's child back into its parent": "greens, early",
    "from a child's child through two levels": "ns, early.\n3. P",
    "the last character": "Play.",
}


def test_the_script_is_restored_in_reading_order(ask_chat: Ask) -> None:
    [answer] = ask_chat(replayed())

    assert answer.choice.text == FULL_TEXT
    assert list(answer.choice.token_ids) == full_ids()
    assert (answer.choice.finish_reason, answer.choice.stop_reason) == ("stop", None)
    assert len(answer.threads) == 4


def test_threads_without_text_leave_no_gap(ask_chat: Ask) -> None:
    answers = ask_chat(*(replayed(script) for script, _ in EMPTY_THREADS.values()))

    for (script, text), answer in zip(EMPTY_THREADS.values(), answers, strict=True):
        assert (answer.choice.text, answer.choice.finish_reason) == (text, "stop")
        assert len(answer.threads) == len(script)


def test_a_stop_string_ends_its_own_choice_only(ask_chat: Ask) -> None:
    [answer] = ask_chat(
        replayed({"": ["One", FORK]}, n=3, seed=5, temperature=1.5, stop=["e", "a"], max_tokens=60)
    )

    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert not set("ae") & set(choice.text.removeprefix("One"))
        assert choice.finish_reason in ("stop", "length")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_restored_text(ask_chat: Ask, include: bool) -> None:
    answers = ask_chat(
        *(
            replayed(stop=[stop], include_stop_str_in_output=include)
            for stop in STOP_STRINGS.values()
        )
    )

    for stop, answer in zip(STOP_STRINGS.values(), answers, strict=True):
        end = FULL_TEXT.index(stop) + (len(stop) if include else 0)
        assert answer.choice.text == FULL_TEXT[:end]
        assert (answer.choice.finish_reason, answer.choice.stop_reason) == ("stop", stop)
        # As in vLLM the token that completes the stop string is the last one.
        ids = list(answer.choice.token_ids)
        assert ids == full_ids()[: len(ids)]
        assert stop in tokenizer().decode(ids)
        assert stop not in tokenizer().decode(ids[:-1])


def test_of_two_stop_strings_the_first_in_reading_order_counts(ask_chat: Ask) -> None:
    # "Food" is generated long before "well", which stands before it in the text.
    [answer] = ask_chat(replayed(stop=["Food", "well"]))

    assert answer.choice.text == FULL_TEXT[: FULL_TEXT.index("well")]
    assert answer.choice.stop_reason == "well"


def test_a_stop_string_that_never_comes_changes_nothing(ask_chat: Ask) -> None:
    [answer] = ask_chat(replayed(stop=["Guitar"]))

    assert answer.choice.text == FULL_TEXT
    assert (answer.choice.finish_reason, answer.choice.stop_reason) == ("stop", None)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_cuts_the_restored_text_where_it_first_stands(
    ask_chat: Ask, include: bool
) -> None:
    ids = full_ids()
    stops = sorted(set(ids))
    answers = ask_chat(
        *(replayed(stop_token_ids=[stop], include_stop_str_in_output=include) for stop in stops)
    )

    for stop, answer in zip(stops, answers, strict=True):
        kept = ids[: ids.index(stop) + 1]
        assert list(answer.choice.token_ids) == kept
        text = tokenizer().decode(kept if include else kept[:-1], skip_special_tokens=False)
        assert answer.choice.text == text
        assert (answer.choice.finish_reason, answer.choice.stop_reason) == ("stop", stop)


def test_the_first_stop_token_in_reading_order_is_the_stop_reason(ask_chat: Ask) -> None:
    # The first child is still writing when the second and then the root meet their stop tokens.
    script: dict[str, list[Any]] = {
        "": ["One", FORK, " two", FORK, " three four five six", " 9"],
        "0": [" a b c d e f g h i j k l m n o p q r s t u v w x y z"],
        "1": [" 7"],
    }
    [seven], [nine] = (set(encode(text)) - set(encode(" ")) for text in (" 7", " 9"))

    [answer] = ask_chat(replayed(script, stop_token_ids=[seven, nine]))

    assert answer.choice.token_ids[-1] == seven
    assert answer.choice.stop_reason == seven


@pytest.mark.parametrize("name", ["[Fork]", "[Child]"])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_a_request_cannot_end_or_force_threads_with_a_control_token(
    ask_chat: Ask, field: str, name: str
) -> None:
    value: Any = [token_id(name)]
    if field == "logit_bias":
        value = {token_id(name): 100.0}

    with pytest.raises(VLLMValidationError, match=f"`{field}` holds ids of control tokens"):
        ask_chat(replayed(**{field: value}))


def test_the_end_token_as_stop_token_ends_threads_and_not_the_answer(ask_chat: Ask) -> None:
    [answer] = ask_chat(replayed(stop_token_ids=[token_id("<eos>")]))

    assert answer.choice.text == FULL_TEXT
    assert answer.choice.finish_reason == "stop"


def test_a_token_budget_is_used_up_exactly(ask_chat: Ask) -> None:
    ids = full_ids()
    budgets = range(1, len(ids) + 2)
    answers = ask_chat(*(replayed(max_tokens=budget) for budget in budgets))

    for budget, answer in zip(budgets, answers, strict=True):
        got = list(answer.choice.token_ids)
        assert len(got) == min(budget, len(ids))
        assert answer.choice.finish_reason == ("length" if budget <= len(ids) else "stop")
        # Each paragraph is cut somewhere or absent, and all stand in their order.
        remaining = iter(ids)
        assert all(token in remaining for token in got)
        assert answer.choice.text == tokenizer().decode(got)


def test_a_budget_of_one_token_never_forks(ask_chat: Ask) -> None:
    [answer] = ask_chat(replayed({"": [FORK]}, max_tokens=1))

    assert answer.statistics is not None
    assert answer.statistics.forks == 0
    assert len(answer.choice.token_ids) == 1


def test_repetition_in_one_thread_ends_that_thread_and_names_the_reason(ask_chat: Ask) -> None:
    from vllm.sampling_params import RepetitionDetectionParams

    repeating = [" early"] * 12
    detection = RepetitionDetectionParams(max_pattern_size=1, min_count=5)

    [answer] = ask_chat(replayed({**SCRIPT, "0": repeating}, repetition_detection=detection))

    kept = [READING_ORDER[0], " early" * 5, *READING_ORDER[2:]]
    assert answer.choice.text == "".join(kept)
    assert answer.choice.finish_reason == "repetition"
