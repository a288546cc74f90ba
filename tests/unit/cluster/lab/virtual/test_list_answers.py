"""Recorded answers as a model that writes lists in parallel would generate them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from apar_core.errors import EvaluationError
from apar_core.formats.lists import ListRules
from apar_core.formats.parallel_format import ListItems
from apar_core.formats.shipped_formats import LISTS
from cluster.lab.virtual.list_answers import ListAnswer, list_answer
from cluster.loadtest.trace import read_trace
from tests.fakes.block_scripts import END, TOKENIZER, tokens

TRACES = Path("../shared/data/traces")
PROMPT = tokens("Question")
FIRST = "Sure:\n\n1. Alpha: the first detail here.\n"
TEXT = (
    f"{FIRST}2. Beta: second detail.\n3. Gamma: third detail, and more.\n"
    "4. Delta: fourth detail.\n\nThat is all."
)
RULES = ListRules(LISTS.model_copy(update={"items": ListItems(ahead=2)}), TOKENIZER)


@pytest.fixture(scope="module")
def answer() -> ListAnswer:
    return list_answer(TEXT, RULES, len(PROMPT), END)


def written(answer: ListAnswer, path: tuple[int, ...], read: str) -> str:
    """Return what a thread writes after a text, with ~ for an end token."""
    script = answer.script(path, [*PROMPT, *tokens(read)])
    return TOKENIZER.decode([each for each in script if each != END]) + "~" * script.count(END)


def test_the_root_writes_on_from_where_its_text_ends(answer: ListAnswer) -> None:
    assert written(answer, (), "") == f"{TEXT}~"
    assert written(answer, (), f"{FIRST}2. Beta: second detail.").startswith("\n3. Gamma:")


def test_a_detail_begins_another_item_and_a_head_is_the_next_one(answer: ListAnswer) -> None:
    second = f"{FIRST}2. Beta:"

    assert written(answer, (0,), second) == " second detail.\n3. ~"
    assert written(answer, (1,), f"{second}\n3.") == " Gamma:"
    assert written(answer, (1, 0), f"{FIRST}3. Gamma:") == " third detail, and more.\n4. ~"
    assert written(answer, (1, 1), f"{second}\n3. Gamma:\n4.") == " Delta:"
    assert written(answer, (1, 1, 0), f"{FIRST}4. Delta:") == " fourth detail.\n5. ~"


def test_items_after_the_end_are_those_before_it_once_more(answer: ListAnswer) -> None:
    heads = f"{FIRST}2. Beta:\n3. Gamma:\n4. Delta:\n5."

    assert written(answer, (1, 1, 1), heads) == " Beta:"
    assert written(answer, (1, 1, 1, 0), f"{FIRST}5. Beta:") == " second detail.\n6. ~"
    # No further than the engine writes ahead of the end.
    assert len(answer.lists[0].items) == 3 + 2


def test_a_list_that_the_root_begins_itself_is_found_again_at_a_later_item(
    answer: ListAnswer,
) -> None:
    fourth = TEXT[: TEXT.index(" fourth detail")]

    assert len(answer.lists) == 2
    assert written(answer, (2,), fourth) == " fourth detail.\n5. ~"


def test_an_answer_without_a_list_is_one_thread() -> None:
    answer = list_answer("No list here.", RULES, len(PROMPT), END)

    assert not answer.lists
    assert written(answer, (), "No") == " list here.~"


def test_the_answer_is_the_same_after_the_way_through_a_request(answer: ListAnswer) -> None:
    assert ListAnswer.from_text(answer.to_text()) == answer


def test_a_text_that_the_tokens_do_not_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = ListRules(LISTS, TOKENIZER)
    monkeypatch.setattr(rules, "text_of", lambda _: "x")

    with pytest.raises(EvaluationError, match="do not join"):
        list_answer(TEXT, rules, 0, END)


def traces() -> Iterator[Path]:
    return TRACES.glob("*.jsonl")


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason=f"needs {TRACES}")
def test_the_lists_of_recorded_answers_join_to_their_text() -> None:
    from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text

    text = load_text(LLAMA_TOKENIZER)
    rules = ListRules(LISTS, text.tokenizer)

    answers = [
        list_answer(line.response, rules, 0, text.end_id)
        for trace in traces()
        for line in read_trace(trace)
    ]

    assert sum(bool(answer.lists) for answer in answers) > 300
