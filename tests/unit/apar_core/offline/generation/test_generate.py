"""Generation with a scripted engine: resuming, filters, files and reports.

`tests/integration/test_generation.py` runs it with vLLM.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from apar_core.errors import DataError, EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.prepare import PreparationSettings, prepare
from apar_core.offline.evaluation.prompt_sets import read_question_file
from apar_core.offline.generation.generate import (
    GenerationReport,
    GenerationSettings,
    generate_chats,
)
from apar_core.offline.training.pretrained import VICUNA_TEMPLATE
from tests.fakes.examples import num_examples

WORDS = "river stone lamp violin garden winter bread cloud engine letter moon harbor".split()  # noqa: SIM905
LIST = "\n".join(f"{n}. Point {n}: with some content of its own, {n}." for n in (1, 2, 3))
MODEL = str(checkpoint_path())


@dataclass(frozen=True)
class Text:
    text: str
    token_ids: tuple[int, ...] = (1, 2, 3)
    finish_reason: str = "stop"


def question(seed: int) -> Text:
    """Return a question that depends on the seed; every fourth is a fragment."""
    words = " ".join(random.Random(seed).choices(WORDS, k=8))
    return Text(f"and then {words}" if seed % 4 == 0 else f"Why is {words} here?")


def answer(seed: int) -> Text:
    words = " ".join(random.Random(seed).choices(WORDS, k=4))
    return Text(f" {words}\n{LIST} ", finish_reason="length" if seed % 5 == 0 else "stop")


@dataclass
class ScriptedEngine:
    """Engine whose texts depend on the seeds alone, and which ends after some of them."""

    ask: Callable[[int], Text] = question
    reply: Callable[[int], Text] = answer
    ends_after: int | None = None
    num_generated: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    sampling: list[Mapping[str, Any]] = field(default_factory=list)
    is_running: bool = True

    def stream(
        self, prompts: Sequence[Any], sampling: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[int, list[Text]]]:
        self.prompts += [prompt["prompt_token_ids"] for prompt in prompts]
        self.sampling += sampling
        # Texts end in another order than they began.
        order = list(range(len(prompts)))
        random.Random(len(prompts)).shuffle(order)
        for index in order:
            if self.num_generated == self.ends_after:
                raise KeyboardInterrupt
            self.num_generated += 1
            # Only questions may not fork.
            write = self.ask if "extra_args" in sampling[index] else self.reply
            yield index, [write(sampling[index]["seed"])]

    def shutdown(self) -> None:
        self.is_running = False


class NoProgress:
    def start(self, _stage: str, _total: int, _done: int = 0) -> Callable[[], None]:
        return lambda: None


def chosen(**overrides: Any) -> GenerationSettings:
    values = {"model": MODEL, "model_name": "tiny", "num_questions": 8, "opened_share": 0}
    values |= overrides
    return GenerationSettings(**values)


def generate(out: Path, engine: ScriptedEngine | None = None, **overrides: Any) -> GenerationReport:
    used = engine or ScriptedEngine()
    return generate_chats(chosen(**overrides), out, lambda _context: used, NoProgress())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outputs(out: Path) -> dict[str, str]:
    names = ("questions.jsonl", "chats.jsonl", "report.json")
    return {name: (out / name).read_text() for name in names}


def test_questions_and_answers_become_chats_for_data_preparation(tmp_path: Path) -> None:
    report = generate(tmp_path / "out")

    chats = lines(tmp_path / "out" / "chats.jsonl")
    questions = read_question_file(tmp_path / "out" / "questions.jsonl")
    assert (report.questions.kept, len(questions), report.answers.generated) == (8, 8, 8)
    assert report.questions.rejected["begins in the middle"].count > 0
    num_cut = report.answers.rejected["cut at the token limit"].count
    assert report.answers.kept == len(chats) == 8 - num_cut
    assert report.kinds == {"ordered_list": len(chats)}
    assert all(len(chat["messages"]) == 2 for chat in chats)
    assert len({chat["id"] for chat in chats}) == len(chats)
    prepared = prepare(
        [tmp_path / "out" / "chats.jsonl"], tmp_path / "data", PreparationSettings(), 1
    )
    assert (prepared.structured.found, prepared.num_answers) == (len(chats), len(chats))


def test_the_model_continues_its_user_header_and_then_answers_each_question(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    generate(tmp_path / "out", engine, num_questions=1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    asked = read_question_file(tmp_path / "out" / "questions.jsonl")[0].turns[0]
    assert tokenizer.decode(engine.prompts[0]) == "<bos><|user|>"
    assert tokenizer.decode(engine.prompts[-1]) == f"<bos><|user|>{asked}<|assistant|>"
    assert engine.sampling[0]["stop_token_ids"] == [
        tokenizer.convert_tokens_to_ids("<|assistant|>")
    ]
    assert len({each["seed"] for each in engine.sampling}) == len(engine.sampling)
    assert not engine.is_running


def test_a_share_of_the_questions_begins_with_openings(tmp_path: Path) -> None:
    openings = tmp_path / "openings.txt"
    openings.write_text("Give me 5\n\nHow do I\n")
    engine = ScriptedEngine(ask=lambda seed: Text(f" {seed} of them, and why?"))
    generate(tmp_path / "out", engine, num_questions=40, opened_share=1 / 2, openings=openings)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    sampled = [line["text"] for line in lines(tmp_path / "out" / "sampled.jsonl")]
    num_opened = Counter(
        opening
        for text in sampled
        for opening in ("Give me 5 ", "How do I ")
        if text.startswith(opening)
    )
    assert set(num_opened) == {"Give me 5 ", "How do I "}
    assert len(sampled) / 4 < num_opened.total() < len(sampled) * 3 / 4
    headers = {tokenizer.decode(prompt) for prompt in engine.prompts[: len(sampled)]}
    assert headers == {f"<bos><|user|>{opening}" for opening in ("", "Give me 5", "How do I")}
    questions = [each.turns[0] for each in read_question_file(tmp_path / "out" / "questions.jsonl")]
    assert any(each.startswith("Give me 5 ") for each in questions)


def test_an_opening_stands_behind_the_blank_of_its_template(tmp_path: Path) -> None:
    engine = ScriptedEngine(ask=lambda seed: Text(f" {seed} of them, and why?"))
    openings = tmp_path / "openings.txt"
    openings.write_text("Give me 5")
    steering = {"chat_template": VICUNA_TEMPLATE, "openings": openings, "opened_share": 1 / 2}
    generate(tmp_path / "out", engine, **steering)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    num_sampled = len(lines(tmp_path / "out" / "sampled.jsonl"))
    headers = [str(tokenizer.decode(prompt)) for prompt in engine.prompts[:num_sampled]]
    assert {header.partition("USER:")[2] for header in headers} == {"", " Give me 5"}


def test_an_opening_with_which_nothing_is_asked_is_no_question(tmp_path: Path) -> None:
    endings = ["", ".", " tips for it, please?"]
    engine = ScriptedEngine(ask=lambda seed: Text(endings[seed % 3]))
    openings = tmp_path / "openings.txt"
    openings.write_text("\n".join(f"Give me {word}" for word in WORDS))
    report = generate(tmp_path / "out", engine, opened_share=1, openings=openings)

    assert report.questions.rejected["empty"].count > 0
    questions = read_question_file(tmp_path / "out" / "questions.jsonl")
    assert all(each.turns[0].endswith(" tips for it, please?") for each in questions)


@pytest.mark.parametrize(
    ("content", "said"),
    [(" \n", "contains no openings"), ("word " * 3000, "shorten --system or the openings")],
)
def test_unusable_openings_are_refused(tmp_path: Path, content: str, said: str) -> None:
    openings = tmp_path / "openings.txt"
    openings.write_text(content)
    with pytest.raises(DataError, match=said):
        generate(tmp_path / "out", opened_share=1, openings=openings)


def test_a_share_of_the_chats_goes_on_with_a_second_turn(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    report = generate(tmp_path, engine, num_questions=40, follow_up_share=1 / 2)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    chats = [chat["messages"] for chat in lines(tmp_path / "chats.jsonl")]
    longer = [messages for messages in chats if len(messages) == 4]
    assert 0.2 * len(chats) < len(longer) < 0.8 * len(chats)
    assert report.follow_ups.generated > report.follow_ups.kept >= len(longer)
    assert report.answers.generated == 40 + report.follow_ups.kept
    texts = list(map(tokenizer.decode, engine.prompts))
    for asked, answered, again, _ in longer:
        assert [each["role"] for each in (asked, answered, again)] == ["user", "assistant", "user"]
        before = tokenizer.apply_chat_template([asked, answered], tokenize=False)
        # The question was continued from the template's text, and answered with the whole chat.
        assert f"{before}<|user|>" in texts
        assert f"{before}<|user|>{again['content']}<|assistant|>" in texts
    # First turns are those of a run without second ones.
    generate(tmp_path / "without", num_questions=40)
    alone = [chat["messages"] for chat in lines(tmp_path / "without" / "chats.jsonl")]
    assert [messages[:2] for messages in chats] == alone


@given(
    name=st.sampled_from(
        ["sampled.jsonl", "answers.jsonl", "follow-ups.jsonl", "follow-up-answers.jsonl"]
    ),
    share=st.floats(0, 1),
    dropped=st.booleans(),
)
@settings(max_examples=num_examples(25), deadline=None)
def test_a_run_that_was_cut_at_any_byte_ends_with_the_same_files(
    whole_run: Path,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    share: float,
    dropped: bool,
) -> None:
    out = tmp_path_factory.mktemp("cut") / "out"
    shutil.copytree(whole_run, out)
    content = (out / name).read_bytes()
    (out / name).write_bytes(content[: round(share * len(content))])
    if dropped or name == "sampled.jsonl":
        for later in ("questions.jsonl", "chats.jsonl", "report.json"):
            (out / later).unlink()

    generate(out, follow_up_share=1 / 2)

    assert outputs(out) == outputs(whole_run)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    generate(out, follow_up_share=1 / 2)
    return out


@pytest.mark.parametrize("ends_after", [0, 1, 5, 12, 17, 21, 24])
def test_an_interrupted_run_keeps_what_was_generated(
    tmp_path: Path, whole_run: Path, ends_after: int
) -> None:
    first = ScriptedEngine(ends_after=ends_after)
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path, first, follow_up_share=1 / 2)
    second = ScriptedEngine()
    generate(tmp_path, second, follow_up_share=1 / 2)
    third = ScriptedEngine()
    generate(tmp_path, third, follow_up_share=1 / 2)

    assert not first.is_running
    assert outputs(tmp_path) == outputs(whole_run)
    whole = ScriptedEngine()
    generate(tmp_path / "whole", whole, follow_up_share=1 / 2)
    assert first.num_generated + second.num_generated == whole.num_generated
    assert third.num_generated == 0


def test_more_questions_extend_a_run(tmp_path: Path, whole_run: Path) -> None:
    generate(tmp_path, num_questions=3, follow_up_share=1 / 2)
    few = lines(tmp_path / "chats.jsonl")
    generate(tmp_path, num_questions=8, follow_up_share=1 / 2)

    assert outputs(tmp_path) == outputs(whole_run)
    assert lines(tmp_path / "chats.jsonl")[: len(few)] == few


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"seed": 1}, "seed was '0', is '1'"),
        ({"temperature": 0.5}, "temperature was '0.7', is '0.5'"),
        ({"max_tokens": 9}, "max_tokens was '512', is '9'"),
        ({"system": "Be brief."}, "system was 'none', is 'Be brief.'"),
    ],
)
def test_another_run_in_the_folder_is_refused(
    tmp_path: Path, overrides: dict[str, Any], words: str
) -> None:
    generate(tmp_path, num_questions=1)

    with pytest.raises(EvaluationError, match=words):
        generate(tmp_path, num_questions=1, **overrides)


def test_a_setting_that_is_no_longer_given_is_another_one(tmp_path: Path) -> None:
    generate(tmp_path, num_questions=1, system="Be brief.")

    with pytest.raises(EvaluationError, match=r"system was 'Be brief.', is 'none'"):
        generate(tmp_path, num_questions=1)


def test_a_system_message_that_leaves_no_room_for_a_question_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has \d+ tokens, and \d+ fit .*--system"):
        generate(tmp_path / "out", system="word " * 3000)

    assert not (tmp_path / "out").exists()


def test_a_model_that_asks_nothing_is_refused_with_the_reasons(tmp_path: Path) -> None:
    engine = ScriptedEngine(ask=lambda seed: Text("" if seed % 3 else "the same again and again"))

    with pytest.raises(DataError, match=r"only 0 of \d+ sampled .*empty: \d+.*--prompts"):
        generate(tmp_path, engine)


def test_only_new_questions_are_kept(tmp_path: Path) -> None:
    engine = ScriptedEngine(
        ask=lambda seed: Text(f"Why is the {WORDS[seed % 12]} of the small village so very old?")
    )
    report = generate(tmp_path, engine, num_questions=3)

    assert report.questions.kept == 3
    assert set(report.questions.rejected) <= {"duplicate", "near-duplicate"}


def test_thoughts_are_kept_and_the_filters_look_at_the_answer_behind_them(tmp_path: Path) -> None:
    thought = "<think>\n" + "Wait, is it so? " * 40 + "\n</think>\n\n"
    report = generate(tmp_path, ScriptedEngine(reply=lambda _seed: Text(thought + LIST)))

    assert report.answers.kept == 8
    assert report.kinds == {"ordered_list": 8}
    assert lines(tmp_path / "chats.jsonl")[0]["messages"][1]["content"] == thought + LIST


def test_a_thought_that_the_prompt_opens_gets_its_marker_back(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    )
    engine = ScriptedEngine(reply=lambda _seed: Text("Let me see.\n</think>\n\nIt is old."))

    generate(tmp_path / "out", engine, chat_template=template)

    [first, *_] = lines(tmp_path / "out" / "chats.jsonl")
    assert first["messages"][1]["content"] == "<think>\nLet me see.\n</think>\n\nIt is old."


def test_questions_of_a_file_are_answered_in_order_without_repeated_ones(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And why?"}]
    items = [{"prompt": "why?"}, {"messages": chat}, {"prompt": "why?"}, {"turns": ["Who?", "So?"]}]
    file.write_text("".join(json.dumps(item) + "\n" for item in items))

    report = generate(
        tmp_path / "out",
        ScriptedEngine(reply=lambda _seed: Text(LIST)),
        prompts=file,
        num_questions=None,
    )

    assert report.questions.rejected["duplicate"].count == 1
    asked = [line["messages"][:-1] for line in lines(tmp_path / "out" / "chats.jsonl")]
    assert asked == [
        [{"role": "user", "content": "why?"}],
        chat,
        [{"role": "user", "content": "Who?"}],
    ]


def test_a_question_longer_than_the_context_is_left_out_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "questions.txt"
    file.write_text("word " * 5000 + "\nWhy?\n")

    report = generate(
        tmp_path / "out",
        ScriptedEngine(reply=lambda _seed: Text(LIST)),
        prompts=file,
        num_questions=None,
    )

    assert report.answers.rejected["prompt too long"].count == 1
    assert report.answers.kept == 1
