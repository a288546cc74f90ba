"""Sampling parameters of forked answers whose tokens the embedded model chooses itself."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from apar_core.engine.offline_engine import OfflineEngine
from tests.integration.engine_process import EngineProcess
from tests.integration.sampling.asking import (
    FORK,
    FULL_TEXT,
    Answer,
    chat,
    encode,
    replayed,
    token_id,
    tokenizer,
)
from tests.integration.sampling.conftest import Ask, assert_nothing_is_left

pytestmark = pytest.mark.engine

ITEMS = {"": ["1. A", FORK, "\n2. A", FORK, "\n3. A", FORK]}


def free_children(**settings: Any) -> dict[str, Any]:
    """Settings for an answer whose root thread is ITEMS, and whose children are sampled."""
    return replayed(ITEMS, **{"temperature": 1.5, "max_tokens": 150, **settings})


def children(answer: Answer) -> list[tuple[int, ...]]:
    return [thread.generated for thread in answer.threads if thread.prefix != answer.prompt_ids]


def sampled(answer: Answer) -> list[int]:
    return [token for child in children(answer) for token in child]


@dataclass(frozen=True)
class EngineThread:
    """A thread as the engine core saw it, with every token that was sampled."""

    seed: int | None
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]


def ask_and_watch(
    engine: OfflineEngine, settings: list[Any]
) -> tuple[list[Answer], list[EngineThread]]:
    """Answers, and every thread that ran. Runs in the engine's process."""
    scheduler = engine.scheduler
    requests: dict[str, Any] = {}
    schedule = scheduler.schedule

    def noting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        requests.update({request.request_id: request for request in scheduler.running})
        return output

    scheduler.schedule = noting
    try:
        answers = chat(engine, settings)
    finally:
        scheduler.schedule = schedule
    return answers, [
        EngineThread(
            request.sampling_params.seed,
            tuple(request.prompt_token_ids),
            tuple(request.output_token_ids),
        )
        for request in requests.values()
    ]


def test_choices_differ_and_each_is_restored_by_itself(ask_chat: Ask) -> None:
    [answer] = ask_chat(free_children(n=3, seed=7))

    assert len({choice.token_ids for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert re.match(r"1\. A(.|\n)*\n2\. A(.|\n)*\n3\. A", choice.text)
        assert tokenizer().decode(choice.token_ids, skip_special_tokens=False) == choice.text
    assert answer.statistics is not None
    assert answer.statistics.forks >= 9


def test_a_seed_gives_the_same_choices_again_also_in_other_company(ask_chat: Ask) -> None:
    wanted = free_children(n=2, seed=11)

    [alone] = ask_chat(wanted)
    beside, *_ = ask_chat(wanted, free_children(seed=3), free_children(), GREEDY)
    [other] = ask_chat(free_children(n=2, seed=12))

    assert beside.choices == alone.choices
    assert other.choices != alone.choices


def test_every_thread_has_random_numbers_of_its_own(engine: EngineProcess) -> None:
    settings = [free_children(n=2, seed=7)]

    answers, threads = engine.call(ask_and_watch, settings)
    _, threads_again = engine.call(ask_and_watch, settings)

    assert_nothing_is_left(answers)
    seeds = [thread.seed for thread in threads]
    assert len(seeds) == len(answers[0].threads) >= 8
    assert len(set(seeds)) == len(seeds)
    assert {thread.seed for thread in threads_again} == set(seeds)
    assert len(set(children(answers[0]))) == len(children(answers[0]))


GREEDY = {"temperature": 0.0, "max_tokens": 120}
# Settings under which sampling can only choose the likeliest token.
LIKELIEST: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
}


@pytest.mark.parametrize("name", LIKELIEST)
def test_truncated_sampling_holds_in_every_thread(ask_chat: Ask, name: str) -> None:
    greedy, truncated = ask_chat(
        free_children(temperature=0.0), free_children(temperature=1.0, **LIKELIEST[name])
    )

    assert truncated.choice == greedy.choice
    assert truncated.threads == greedy.threads


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.8}],
    ids=str,
)
def test_penalties_change_what_the_children_write(ask_chat: Ask, penalty: dict[str, float]) -> None:
    plain, penalised = ask_chat(
        free_children(temperature=0.0), free_children(temperature=0.0, **penalty)
    )

    assert children(penalised) != children(plain)
    assert penalised.choice.text.startswith("1. A")


def usual_word(answer: Answer) -> tuple[str, int]:
    """The commonest word among the sampled tokens that one token spells, also by itself."""
    for token, _ in Counter(sampled(answer)).most_common():
        text = str(tokenizer().decode([token]))
        word = text.strip()
        is_word = text.startswith(" ") and word.isalpha() and encode(text) == (token,)
        # vLLM bans a word behind a space only if it has as many tokens as without the space.
        if is_word and len(encode(word)) == 1:
            return word, token
    raise AssertionError("no token of the answer is a word")


def test_a_bad_word_appears_in_no_thread(ask_chat: Ask) -> None:
    [plain] = ask_chat(free_children(temperature=0.0))
    word, token = usual_word(plain)

    [answer] = ask_chat(free_children(temperature=0.0, bad_words=[word]))

    assert len(sampled(answer)) > 3
    assert token not in sampled(answer)
    assert sampled(answer) != sampled(plain)


def test_a_biased_token_appears_in_no_thread_or_in_all(ask_chat: Ask) -> None:
    [plain] = ask_chat(free_children(temperature=0.0))
    _, token = usual_word(plain)

    without, only = ask_chat(
        free_children(temperature=0.0, logit_bias={token: -100.0}),
        free_children(temperature=0.0, logit_bias={token: 100.0}, max_tokens=40),
    )

    assert len(sampled(without)) > 3
    assert token not in sampled(without)
    assert set(sampled(only)) == {token}
    assert all(children(only))


def test_allowed_tokens_hold_in_every_thread(ask_chat: Ask) -> None:
    allowed = [*encode("0123456789"), token_id("<eos>")]

    [answer] = ask_chat(free_children(allowed_token_ids=allowed, max_tokens=60, seed=1))

    assert len(sampled(answer)) > 3
    assert set(sampled(answer)) <= set(allowed)


def test_a_forced_length_is_written_by_one_thread(ask_chat: Ask) -> None:
    answers = ask_chat(
        {"temperature": 0.0, "max_tokens": 40, "min_tokens": 30},
        {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True},
    )

    for answer in answers:
        assert_unforked(answer)
    assert 30 <= len(answers[0].choice.token_ids) <= 40
    assert len(answers[1].choice.token_ids) == 40


def test_structured_outputs_are_written_by_one_thread(ask_chat: Ask) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {
        "type": "object",
        "properties": {"fits": {"type": "boolean"}, "colour": {"enum": ["red", "blue"]}},
        "required": ["fits", "colour"],
        "additionalProperties": False,
    }
    shapes: tuple[dict[str, Any], ...] = (
        {"choice": ["guitar", "piano"]},
        {"regex": r"[ab]{3}-[0-9]{2}"},
        {"json": schema},
    )

    choice, regex, structure = ask_chat(
        *(
            {
                "temperature": 0.0,
                "max_tokens": 60,
                "structured_outputs": StructuredOutputsParams(**shape),
            }
            for shape in shapes
        )
    )

    for answer in (choice, regex, structure):
        assert_unforked(answer)
    assert choice.choice.text in ("guitar", "piano")
    assert re.fullmatch(r"[ab]{3}-[0-9]{2}", regex.choice.text)
    value = json.loads(structure.choice.text)
    assert value.keys() == {"fits", "colour"}
    assert value["colour"] in ("red", "blue")


def assert_unforked(answer: Answer) -> None:
    assert answer.statistics is not None
    assert (answer.statistics.threads, answer.statistics.forks) == (1, 0)
    assert {token_id("[Fork]"), token_id("[Child]")}.isdisjoint(answer.choice.token_ids)


@pytest.mark.parametrize("value", [False, 0])
def test_a_request_may_choose_not_to_fork(ask_chat: Ask, value: object) -> None:
    [answer] = ask_chat({**GREEDY, "extra_args": {"apar_enabled": value}})

    assert_unforked(answer)
    assert answer.choice.text


def ask_and_measure(engine: OfflineEngine, settings: list[Any]) -> tuple[list[Answer], int]:
    """Answers, and the most threads that one step computed. Runs in the engine's process."""
    scheduler = engine.scheduler
    schedule = scheduler.schedule
    widest = 0

    def noting(*args: Any, **kwargs: Any) -> Any:
        nonlocal widest
        output = schedule(*args, **kwargs)
        widest = max(widest, len(output.num_scheduled_tokens))
        return output

    scheduler.schedule = noting
    try:
        return chat(engine, settings), widest
    finally:
        scheduler.schedule = schedule


def test_no_more_threads_run_at_once_than_the_request_allows(engine: EngineProcess) -> None:
    def asked(**settings: Any) -> tuple[Answer, int]:
        answers, widest = engine.call(ask_and_measure, [replayed(**settings)])
        assert_nothing_is_left(answers)
        return answers[0], widest

    free, free_width = asked()
    widths = {}
    for bound in (1, 2):
        answer, widths[bound] = asked(extra_args={"apar_max_threads": bound})
        assert answer.choice.text == FULL_TEXT
        assert answer.statistics == free.statistics

    assert widths == {1: 1, 2: 2}
    assert free_width > 2


def test_one_thread_at_a_time_writes_what_it_writes_beside_others(engine: EngineProcess) -> None:
    """Greedy threads whose tokens the model chooses itself."""
    whole = {"temperature": 0.0, "max_tokens": 500}
    one = free_children(**whole, extra_args={"apar_max_threads": 1})

    [free], free_width = engine.call(ask_and_measure, [free_children(**whole)])
    [limited], limited_width = engine.call(ask_and_measure, [one])

    assert_nothing_is_left([free, limited])
    assert (limited_width, free_width > 1) == (1, True)
    # No thread is cut by the token budget, which would depend on their order.
    assert free.choice.finish_reason == "stop"
    assert all(len(child) > 1 for child in children(free))
    assert set(limited.threads) == set(free.threads)
    assert limited.choice == free.choice


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("apar_enabled", "yes"),
        ("apar_max_threads", 0),
        ("apar_max_threads", -3),
        ("apar_max_threads", 2.5),
        ("apar_max_threads", True),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(
    ask_chat: Ask, argument: str, value: object
) -> None:
    with pytest.raises(VLLMValidationError, match=argument.replace("apar_", r"apar\.")):
        ask_chat({**GREEDY, "extra_args": {argument: value}})

    [answer] = ask_chat(replayed())
    assert answer.choice.text == FULL_TEXT


@pytest.mark.parametrize(
    "settings",
    [
        {"detokenize": False},
        {"skip_special_tokens": False},
        {"spaces_between_special_tokens": False},
    ],
    ids=str,
)
def test_settings_of_the_detokenizer_leave_the_tokens_alone(
    ask_chat: Ask, settings: dict[str, Any]
) -> None:
    [answer] = ask_chat(replayed(**settings))

    assert answer.choice.text == (FULL_TEXT if settings != {"detokenize": False} else "")
    assert tokenizer().decode(answer.choice.token_ids) == FULL_TEXT
