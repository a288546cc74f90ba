"""Generating, replaying or counting all answers of an evaluation, each kept when done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apar_core.data.records import ParagraphRecord, chain
from apar_core.data.structure import extract_tree
from apar_core.decoders.interface import (
    AnswerDecoder,
    DecodeLimits,
    TokenChoice,
    decode_answer,
)
from apar_core.errors import RequestError
from apar_core.evaluation.answer_files import RecordedAnswer
from apar_core.evaluation.answer_store import AnswerStore
from apar_core.evaluation.measurement import (
    COUNT,
    AnswerKey,
    counted,
    measured,
)
from apar_core.evaluation.prompt_sets import Question
from apar_core.evaluation.replay_text import ModelText
from apar_core.evaluation.replay_tree import flat_tree, thread_scripts, token_tree
from apar_core.evaluation.speed_decoders import Decoders
from apar_core.tree.paragraph import ParagraphTree

Show = Callable[[], None]

PLAIN = "plain"

_WARM_UP = chain([("Why?", ParagraphRecord(" Because."))], closing=" So.")


def warm_up(decoders: Decoders, text: ModelText) -> None:
    """Let each decoder fork once, so that the first answer does not pay for what is built once."""
    tree = token_tree(_WARM_UP, text.encode)
    prompt_ids = text.encode_prompt("Hello")
    for name, decoder in decoders.in_turn(0):
        decode_answer(decoder, prompt_ids, TokenChoice.replay(_scripts(tree, name, text)))


@dataclass(frozen=True, slots=True)
class AnsweredKeys:
    """Which answers every decoder has given, and why others had to be left out."""

    keys: list[AnswerKey]
    left_out: list[str]


def generate_answers(
    decoders: Decoders,
    text: ModelText,
    questions: Sequence[Question],
    store: AnswerStore,
    limits: DecodeLimits,
    show: Show,
) -> AnsweredKeys:
    """Let the decoders answer all turns greedily, side by side.

    A later turn's prompt holds the decoder's own earlier answers. Plain decoding as the baseline is
    forced to the text of the first decoder: left to itself, a model that has learned to fork ends
    its answers early where it may not. `show` is called once a question.
    """
    done = AnsweredKeys([], [])
    for question in questions:
        keys = [
            AnswerKey(question.question_id, turn + 1, question.category)
            for turn in range(len(question.turns))
        ]
        try:
            _answer_question(decoders, text, question, store, limits)
            done.keys.extend(keys)
        except RequestError as error:
            done.left_out.append(f"question {question.question_id}: {error}")
        show()
    return done


def replay_answers(
    decoders: Decoders,
    text: ModelText,
    answers: Sequence[RecordedAnswer],
    store: AnswerStore,
    show: Show,
) -> AnsweredKeys:
    """Force the answers' trees through the decoders, and their flat texts through plain."""
    done = AnsweredKeys([], [])
    for number, answer in enumerate(answers):
        try:
            _replay(decoders, text, answer, number, store)
            done.keys.append(_key(answer))
        except RequestError as error:
            done.left_out.append(f"question {answer.question_id}, turn {answer.turn}: {error}")
        show()
    return done


def _replay(
    decoders: Decoders, text: ModelText, answer: RecordedAnswer, number: int, store: AnswerStore
) -> None:
    tree = token_tree(extract_tree(answer.text).tree, text.encode)
    prompt_ids = text.encode_chat(answer.messages)
    for name, decoder in decoders.in_turn(number):
        if store.find(answer.question_id, answer.turn, name) is not None:
            continue
        scripts = _scripts(tree, name, text)
        limits = DecodeLimits(
            max_tokens=max(1, sum(map(len, scripts.values()))),
            max_threads=max(1, len(scripts)),
            max_forks=max(1, len(scripts)),
        )
        decoded = decode_answer(decoder, prompt_ids, TokenChoice.replay(scripts), limits)
        store.add(measured(_key(answer), name, decoded, answer.text))


def count_answers(
    text: ModelText, answers: Sequence[RecordedAnswer], store: AnswerStore, show: Show
) -> AnsweredKeys:
    """Follow the schedule of the answers' trees without any model."""
    keys = [_key(answer) for answer in answers]
    for key, answer in zip(keys, answers, strict=True):
        if store.find(key.question_id, key.turn, COUNT) is None:
            tree = token_tree(extract_tree(answer.text).tree, text.encode)
            num_prompt_tokens = len(text.encode_chat(answer.messages))
            store.add(counted(key, tree, num_prompt_tokens, answer.text))
        show()
    return AnsweredKeys(keys, [])


def _scripts(tree: ParagraphTree[int], decoder: str, text: ModelText) -> dict[str, list[int]]:
    # One thread takes no fork tokens: it gets the same text in reading order.
    return thread_scripts(flat_tree(tree) if decoder == PLAIN else tree, text.tokens)


def _key(answer: RecordedAnswer) -> AnswerKey:
    return AnswerKey(answer.question_id, answer.turn, answer.category)


def _answer_question(
    decoders: Decoders,
    text: ModelText,
    question: Question,
    store: AnswerStore,
    limits: DecodeLimits,
) -> None:
    answers: list[_Answer] = []
    for name, decoder in decoders.in_turn(0):
        if name != decoders.baseline_name or name != PLAIN:
            given = _answer_turns(name, decoder, text, question, store, limits)
            answers = answers or given
        else:
            _repeat_turns(decoder, text, question, store, answers)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    token_ids: list[int]
    ended: bool


def _answer_turns(
    name: str,
    decoder: AnswerDecoder,
    text: ModelText,
    question: Question,
    store: AnswerStore,
    limits: DecodeLimits,
) -> list[_Answer]:
    """Return the answer of each turn; those that an earlier run has left are encoded again."""
    answers: list[_Answer] = []
    for turn in range(len(question.turns)):
        known = store.find(question.question_id, turn + 1, name)
        if known is None:
            prompt_ids = _prompt_ids(text, question, turn, [answer.text for answer in answers])
            decoded = decode_answer(decoder, prompt_ids, TokenChoice.greedy(), limits)
            token_ids = decoded.text_ids
            key = AnswerKey(question.question_id, turn + 1, question.category)
            known = measured(key, name, decoded, text.decode(token_ids))
            store.add(known)
        else:
            token_ids = text.encode(known.text)
        answers.append(_Answer(known.text, token_ids, known.ended))
    return answers


def _repeat_turns(
    plain: AnswerDecoder,
    text: ModelText,
    question: Question,
    store: AnswerStore,
    answers: Sequence[_Answer],
) -> None:
    """Force another decoder's answers through plain decoding."""
    for turn, answer in enumerate(answers):
        if store.find(question.question_id, turn + 1, PLAIN) is not None:
            continue
        prompt_ids = _prompt_ids(text, question, turn, [other.text for other in answers[:turn]])
        script = [*answer.token_ids, *([text.tokens.end_id] if answer.ended else [])]
        choice = TokenChoice.replay({"": script})
        decoded = decode_answer(plain, prompt_ids, choice, DecodeLimits(max_tokens=len(script)))
        key = AnswerKey(question.question_id, turn + 1, question.category)
        store.add(measured(key, PLAIN, decoded, answer.text))


def _prompt_ids(text: ModelText, question: Question, turn: int, texts: Sequence[str]) -> list[int]:
    if question.raw_prompt:
        return text.encode_prompt(question.turns[turn])
    return text.encode_chat(question.messages(turn, tuple(texts)))
