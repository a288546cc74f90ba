from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import DataError
from apar_core.offline.data.example_file import read_examples
from apar_core.offline.data.prepare import (
    ItemPreparation,
    Outcome,
    PreparationSettings,
    PreparedAnswer,
    Refusal,
    prepare,
)
from apar_core.offline.data.records import ExampleRecord, flat_text
from apar_core.offline.data.sampling import HELD_OUT_FILE
from apar_core.offline.data.sources import SourceItem
from apar_core.offline.data.structure import StructureRules
from cluster.loadtest.trace import read_trace


def outcomes(*turns: tuple[str, str]) -> list[Outcome]:
    item: Any = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    source = SourceItem(
        source="chats/a.json", number=3, unit="item", text=json.dumps(item).encode()
    )
    return list(ItemPreparation(StructureRules(), {}).outcomes(source))


def test_each_answer_becomes_an_example_after_the_earlier_turns() -> None:
    first, second = outcomes(("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", "a2"))

    assert isinstance(first, PreparedAnswer)
    assert isinstance(second, PreparedAnswer)
    assert b'"id": "chats/a:3:1"' in first.line
    assert b'"id": "chats/a:3:2"' in second.line
    assert second.line.count(b'"role"') == 3


def test_answers_before_the_first_question_are_refused_and_the_rest_is_kept() -> None:
    refusal, example = outcomes(("system", "s"), ("gpt", "a0"), ("human", "q1"), ("gpt", "a1"))

    assert isinstance(refusal, Refusal)
    assert refusal.reason == "answer without a question"
    assert isinstance(example, PreparedAnswer)
    assert b"a0" not in example.line
    assert b'"role": "system"' in example.line


def test_an_empty_answer_ends_the_chat() -> None:
    example, refusal = outcomes(
        ("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", " "), ("human", "q3"), ("gpt", "a")
    )

    assert isinstance(example, PreparedAnswer)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "empty answer"


LIST = "\n".join(f"{n}. Point {n}: with some content." for n in (1, 2, 3))
ALL = PreparationSettings(structured=None, unstructured=None)


def chat(*texts: str) -> dict[str, Any]:
    return {
        "conversations": [
            {"from": ("human", "gpt")[number % 2], "value": text}
            for number, text in enumerate(texts)
        ]
    }


def write_lines(path: Path, *items: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_each_answer_is_an_example_with_the_turns_before_it(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chats.jsonl", chat("q", LIST, "r", "Short."))

    report = prepare([source], tmp_path / "out", ALL)

    listed, short = read_examples(tmp_path / "out")
    assert (listed.kind, flat_text(listed.answer)) == ("ordered_list", LIST)
    assert [message.content for message in listed.messages] == ["q"]
    assert [message.content for message in short.messages] == ["q", LIST, "r"]
    assert listed.example_id != short.example_id
    assert (report.num_items, report.num_answers, report.num_forks) == (1, 2, 3)
    assert report.kinds == {"ordered_list": 1, "unstructured": 1}
    assert report.unstructured_reasons == {"no structure": 1}
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved == report.model_dump(mode="json")
    assert saved["training_ratio"] == "1:1"


def test_answers_and_chats_with_lists_are_counted_whether_they_fork_or_not(tmp_path: Path) -> None:
    bullets = "- one\n- two\n- three"
    chats = [chat("q", LIST, "r", "Short."), chat("q", bullets, "r", LIST), chat("q", "Short.")]
    source = write_lines(tmp_path / "chats.jsonl", *chats, chat("q", " "))

    report = prepare([source], tmp_path / "out", ALL)

    assert (report.num_items, report.num_chats, report.num_listed_chats) == (4, 3, 2)
    assert (report.num_answers, report.num_listed_answers) == (5, 3)


def test_an_array_gives_the_same_examples_as_lines(tmp_path: Path) -> None:
    items = [chat("q", LIST), chat("q"), chat("q", "Short.")]
    lines = write_lines(tmp_path / "chats.jsonl", *items)
    array = tmp_path / "chats.json"
    array.write_text("\ufeff \n" + json.dumps(items, indent=1))

    prepare([lines], tmp_path / "a", ALL)
    prepare([array], tmp_path / "b", ALL)

    assert list(read_examples(tmp_path / "a")) == list(read_examples(tmp_path / "b"))


def test_bad_lines_are_counted_with_their_place_and_reason(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chats.jsonl", chat("q", LIST))
    with source.open("ab") as file:
        file.write(b'{"broken\n\n"\xff"\n')
        for item in ({}, chat("q", " "), chat(" ", "a"), chat("q", "a", "b", "")):
            file.write(json.dumps(item).encode() + b"\n")

    report = prepare([source], tmp_path / "out", ALL)

    assert report.refusals == {
        "broken JSON": 1,
        "not UTF-8": 1,
        "missing field": 1,
        "empty answer": 2,
        "empty question": 1,
    }
    assert report.refusal_examples[0].place == f"{source}, line 2"
    assert report.refusal_examples[1].place == f"{source}, line 4"
    assert len(list(read_examples(tmp_path / "out"))) == 2


def test_a_thought_needs_an_answer_after_it(tmp_path: Path) -> None:
    answers = ("<think>\nHm.\n</think>\n\n" + LIST, "<think>\nHm, hm", "<think>\nHm.\n</think>\n")
    source = write_lines(tmp_path / "chats.jsonl", *(chat("q", answer) for answer in answers))

    report = prepare([source], tmp_path / "out", ALL)

    assert report.kinds == {"ordered_list": 1}
    assert report.refusals == {"thought without an answer": 2}


@dataclass(frozen=True)
class FewCharacters:
    """Fits examples to a number of characters instead of tokens."""

    context_length: int
    model_name: str = "few"

    def __call__(self, example: ExampleRecord) -> ExampleRecord | None:
        for start in range(0, len(example.messages), 2):
            messages = example.messages[start:]
            if sum(len(message.content) for message in messages) <= self.context_length:
                return replace(example, messages=messages)
        return None


def test_examples_that_do_not_fit_are_dropped_before_sampling(tmp_path: Path) -> None:
    items = [chat("q" * (5 if n % 2 else 50), LIST) for n in range(40)]
    source = write_lines(tmp_path / "chats.jsonl", *items, chat("long " * 4, "a", "q", LIST))
    settings = PreparationSettings(structured=20, unstructured=None)

    report = prepare([source], tmp_path / "out", settings, fit=FewCharacters(10))

    examples = list(read_examples(tmp_path / "out"))
    assert (report.structured.found, report.structured.written) == (21, 20)
    assert (report.num_too_long, report.num_answers, report.context_length) == (21, 21, 10)
    assert all(len(example.messages[-1].content) <= 5 for example in examples)
    # Strict mode only concerns invalid items.
    prepare([source], tmp_path / "strict", ALL.model_copy(update={"strict": True}),
            fit=FewCharacters(10))  # fmt: skip


def query_texts(example: ExampleRecord) -> set[str]:
    return {" ".join(each.content.split()) for each in example.messages if each.role == "user"}


def test_held_out_queries_share_no_conversation_and_no_text_with_training(tmp_path: Path) -> None:
    items = [
        {"id": f"aB3dE{n // 2:02}_{n % 2}", **chat(f"first {n}?", LIST, f"then {n}?", "Short.")}
        for n in range(40)
    ]
    # The same questions in another turn and with other whitespace.
    items += [chat("hello", "Hi.", f"first  {n}?\n", LIST) for n in range(40)]
    source = write_lines(tmp_path / "chats.jsonl", *items)
    settings = ALL.model_copy(update={"hold_out": 5})

    report = prepare([source], tmp_path / "out", settings)

    held = read_trace(tmp_path / "out" / HELD_OUT_FILE)
    training = list(read_examples(tmp_path / "out"))
    texts = {" ".join(line.prompt.split()) for line in held}
    assert len(held) == len(texts) == 5
    assert all(texts.isdisjoint(query_texts(example)) for example in training)
    # Items 1 and 2 are the parts aB3dE00_0 and aB3dE00_1: holding out one excludes both.
    trained = {int((example.example_id or "").split(":")[1]) for example in training}
    conversations = [(int(line.id.split(":")[1]) - 1) // 2 for line in held]
    assert len(set(conversations)) == 5
    assert all(trained.isdisjoint({2 * n + 1, 2 * n + 2}) for n in conversations if n < 20)
    assert report.held_out.written == 5
    assert len(training) == report.num_answers - 5 - report.num_near_held_out
    assert report.structured.found + report.unstructured.found == len(training)


def test_numbered_items_are_not_parts_of_a_conversation(tmp_path: Path) -> None:
    for name in ("alpaca", "chatgpt", "Example", "ROWDATA", "long-name"):
        items = [{"id": f"{name}_{n}", **chat(f"q{n}", LIST)} for n in range(9)]
        source = write_lines(tmp_path / f"{name}.jsonl", *items)

        report = prepare([source], tmp_path / name, ALL.model_copy(update={"hold_out": 3}))

        assert (report.held_out.written, report.num_near_held_out) == (3, 0)


@pytest.mark.parametrize(("mixed", "expected"), [(False, {"ordered_list"}), (True, None)])
def test_held_out_first_questions_fork_unless_the_natural_mix_is_wanted(
    tmp_path: Path, mixed: bool, expected: set[str] | None
) -> None:
    # Of four chats, one forks in its first answer and one in its second only.
    answers = [(LIST, "Short."), ("Short.", LIST), ("Short.", "Short."), ("Short.", "Short.")]
    items = [
        chat(f"first {n}?", answers[n % 4][0], f"then {n}?", answers[n % 4][1]) for n in range(80)
    ]
    source = write_lines(tmp_path / "chats.jsonl", *items)
    settings = ALL.model_copy(update={"hold_out": 30, "hold_out_mixed": mixed})

    report = prepare([source], tmp_path / "out", settings)

    held = [json.loads(line) for line in (tmp_path / "out" / HELD_OUT_FILE).open()]
    assert all(line["prompt"].startswith("first") for line in held)
    assert {line["category"] for line in held} == (expected or {"ordered_list", "unstructured"})
    assert (report.held_out.found, report.held_out.written) == ((80, 30) if mixed else (20, 20))


def test_held_out_queries_depend_only_on_the_seed(tmp_path: Path) -> None:
    items = [chat(f"q{n}", LIST if n % 3 else f"Short {n}.") for n in range(200)]
    source = write_lines(tmp_path / "chats.jsonl", *items)
    settings = PreparationSettings(structured=50, unstructured=20, hold_out=10)

    prepare([source], tmp_path / "one", settings, num_workers=1)
    prepare([source], tmp_path / "two", settings, num_workers=2)
    prepare([source], tmp_path / "seed", settings.model_copy(update={"seed": 4}))

    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert contents(tmp_path / "seed")[HELD_OUT_FILE] != contents(tmp_path / "one")[HELD_OUT_FILE]


def test_held_out_queries_of_an_earlier_run_are_deleted(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chats.jsonl", *(chat(f"q{n}", LIST) for n in range(3)))
    prepare([source], tmp_path / "out", ALL.model_copy(update={"hold_out": 1}))

    prepare([source], tmp_path / "out", ALL.model_copy(update={"overwrite": True}))

    assert not (tmp_path / "out" / HELD_OUT_FILE).exists()
    assert len(list(read_examples(tmp_path / "out"))) == 3


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"x": 18446744073709551615}', "missing field"),
        (b'{"x": [NaN, 1e400]}', "missing field"),
        (b'{"x": "a\tb"}', "broken JSON"),
        (b'{"x": }', "broken JSON"),
        (b'{"x": "\xff"}', "not UTF-8"),
        (rb'{"prompt": "q", "response": "\ud800"}', "no Unicode text"),
        (b'"a\\\\", "]", "\\"[{,"', "wrong type"),
        (b"[" * 100_000 + b"]" * 100_000, "broken JSON"),
        (b"", "broken JSON"),
    ],
)
def test_a_bad_element_of_an_array_costs_no_other(tmp_path: Path, bad: bytes, reason: str) -> None:
    source = tmp_path / "chats.json"
    good = json.dumps(chat("q", LIST)).encode()
    source.write_bytes(b"[" + good + b",\n" + bad + b",\n" + good + b"]\n")

    report = prepare([source], tmp_path / "out", ALL)

    assert report.refusals.keys() == {reason}
    assert report.refusal_examples[0].place.endswith("item 2")
    assert len(list(read_examples(tmp_path / "out"))) == 2


def test_an_array_is_split_wherever_reading_pauses(tmp_path: Path) -> None:
    # Reads end within strings, between a backslash and what it escapes, and between elements.
    items = [chat("q", LIST + '\\"' * length) for length in range(200_000, 200_012)]
    source = tmp_path / "chats.json"
    source.write_text(json.dumps(items))

    prepare([source], tmp_path / "out", ALL)

    answers = [flat_text(example.answer) for example in read_examples(tmp_path / "out")]
    assert answers == [item["conversations"][1]["value"] for item in items]


@pytest.mark.parametrize(
    ("damage", "refusals"),
    [
        (b"", {"damaged array": 1}),
        (b",", {"damaged array": 1}),
        (b', {"x": [', {"damaged array": 1}),
        (b', "x', {"broken JSON": 1, "damaged array": 1}),
        (b"] {}", {"damaged array": 1}),
        (b"] x", {"damaged array": 1}),
        (b", " + b"[" * 100_000, {"damaged array": 1}),
    ],
)
def test_items_before_damage_in_an_array_are_used(
    tmp_path: Path, damage: bytes, refusals: dict[str, int]
) -> None:
    source = tmp_path / "chats.json"
    source.write_bytes(b"[" + json.dumps(chat("q", LIST)).encode() + damage)

    report = prepare([source], tmp_path / "out", ALL)

    assert report.refusals == refusals
    assert len(list(read_examples(tmp_path / "out"))) == 1


def test_an_element_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    source = tmp_path / "chats.json"
    with source.open("wb") as file:
        file.write(b"[" + json.dumps(chat("q", LIST)).encode() + b', "')
        file.truncate(1 << 34)
    num_read = 0

    def count(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes

    report = prepare([source], tmp_path / "out", ALL, on_read=count)

    assert report.refusals == {"damaged array": 1}
    assert "64 MiB" in report.refusal_examples[0].message
    assert num_read <= 256 << 20


def test_an_answer_with_weight_0_is_read_but_not_trained(tmp_path: Path) -> None:
    turns = [("user", "q", None), ("assistant", "bad", 0), ("user", "r", None)]
    turns.append(("assistant", "good", 1))
    messages = [
        {"role": role, "content": text} | ({} if weight is None else {"weight": weight})
        for role, text, weight in turns
    ]
    source = write_lines(tmp_path / "chats.jsonl", {"messages": messages})

    report = prepare([source], tmp_path / "out", ALL)

    [example] = read_examples(tmp_path / "out")
    assert flat_text(example.answer) == "good"
    assert [message.content for message in example.messages] == ["q", "bad", "r"]
    assert (report.num_answers, report.num_not_trained) == (1, 1)


def test_without_a_usable_answer_nothing_is_replaced(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chats.jsonl", chat("q", "a"))
    prepare([source], tmp_path / "out", ALL)
    before = contents(tmp_path / "out")
    write_lines(source, {})

    prepare([source], tmp_path / "out", ALL.model_copy(update={"overwrite": True}))

    assert contents(tmp_path / "out") == before


def test_elements_that_are_not_chats_are_refused_individually(tmp_path: Path) -> None:
    items = [None, 5, "x", [], {}, [[1], {"a": [2]}], chat("q", LIST), True]
    source = tmp_path / "chats.json"
    source.write_text(json.dumps(items))

    report = prepare([source], tmp_path / "out", ALL)

    assert (report.num_items, report.num_answers) == (8, 1)
    assert report.refusals == {"wrong type": 6, "missing field": 1}


def test_strict_mode_stops_at_the_first_refusal_and_writes_nothing(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chats.jsonl", chat("q", "a"), chat("q"), {})

    with pytest.raises(DataError, match=r"chats.jsonl, line 2: no answer"):
        prepare([source], tmp_path / "out", ALL.model_copy(update={"strict": True}))

    assert list(tmp_path.iterdir()) == [source]


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    items = [chat(f"q{n}", LIST if n % 3 else f"Short {n}.") for n in range(300)]
    source = write_lines(tmp_path / "chats.jsonl", *items, {}, *items)
    settings = PreparationSettings(structured=50, unstructured=20, seed=3)

    report = prepare([source], tmp_path / "one", settings, num_workers=1)
    prepare([source], tmp_path / "two", settings, num_workers=2)

    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert (report.structured.found, report.structured.written) == (400, 50)
    assert (report.unstructured.found, report.unstructured.written) == (200, 20)
    prepare([source], tmp_path / "seed", settings.model_copy(update={"seed": 4}))
    assert contents(tmp_path / "seed") != contents(tmp_path / "one")


@dataclass
class CountedFit:
    """Fit that keeps every example and counts how often it is pickled."""

    model_name: str = "model"
    context_length: int = 100
    num_pickled: int = 0

    def __call__(self, example: ExampleRecord) -> ExampleRecord:
        return example

    def __reduce__(self) -> Any:
        self.num_pickled += 1
        return functools.partial, (copy.copy,)


def test_questions_and_fit_are_sent_once_per_process(tmp_path: Path) -> None:
    items = [chat(f"q{n}", "a") for n in range(600)]
    source = write_lines(tmp_path / "chats.jsonl", *items)
    fit = CountedFit()

    report = prepare([source], tmp_path / "out", ALL, num_workers=2, fit=fit)

    assert report.num_answers == 600
    assert fit.num_pickled <= 2


def test_question_files_and_rules_are_used(tmp_path: Path) -> None:
    bullets = "\n".join(f"- Point {n}: with some content." for n in (1, 2, 3))
    source = write_lines(tmp_path / "answers.jsonl", {"question_id": 7, "text": bullets})
    questions = write_lines(tmp_path / "q.jsonl", {"question_id": 7, "turns": ["q"]})
    rules = StructureRules(unordered_lists=True)
    settings = ALL.model_copy(update={"questions": (questions,), "rules": rules})

    assert prepare([source], tmp_path / "a", ALL).refusals == {"no question": 1}
    assert prepare([source], tmp_path / "b", settings).kinds == {"unordered_list": 1}


def test_files_in_a_folder_are_replaced_only_if_allowed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chats.jsonl", chat("q", "a"))
    prepare([source], tmp_path / "out", ALL)
    before = contents(tmp_path / "out")
    write_lines(source, chat("q", "b"))

    with pytest.raises(DataError, match="not empty"):
        prepare([source], tmp_path / "out", ALL)
    assert contents(tmp_path / "out") == before

    prepare([source], tmp_path / "out", ALL.model_copy(update={"overwrite": True}))
    assert contents(tmp_path / "out") != before


def test_a_file_with_several_names_is_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    a, b = (write_lines(folder / f"{name}.jsonl", chat(name, "x")) for name in "ab")
    link = folder / "c.jsonl"
    link.symlink_to(a)

    report = prepare([b, folder / "../in/b.jsonl", folder], tmp_path / "out", ALL)

    assert report.inputs == [str(b), str(a)]
    assert report.num_items == 2


def test_an_interrupted_run_writes_nothing(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "chats.jsonl", chat("q", "a"), chat("q", "b"))

    def interrupt(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", ALL, on_read=interrupt)

    assert list(tmp_path.iterdir()) == [source]


def test_every_byte_of_the_input_is_reported_as_read(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", chat("q", "a"), chat("q", "b"))
    array = tmp_path / "b.json"
    array.write_text("\ufeff" + json.dumps([chat("q", "a")] * 3))
    num_read = 0

    def count(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes

    prepare([tmp_path], tmp_path / "out", ALL, on_read=count)

    assert num_read == lines.stat().st_size + array.stat().st_size


def test_missing_inputs_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(DataError):
            prepare([path], tmp_path / "out", ALL)
