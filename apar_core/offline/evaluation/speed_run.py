"""Generating, replaying or counting all answers of an evaluation, each kept when done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apar_core.errors import RequestError
from apar_core.offline.data.records import ParagraphRecord, chain, token_tree
from apar_core.offline.data.structure import extract_tree
from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice, decode_answer
from apar_core.offline.evaluation.answer_files import RecordedAnswer
from apar_core.offline.evaluation.answer_store import AnswerStore
from apar_core.offline.evaluation.measurement import (
    COUNT,
    AnswerKey,
    counted,
    measured,
)
from apar_core.offline.evaluation.prompt_sets import Question
from apar_core.offline.evaluation.replay_text import ModelText
from apar_core.offline.evaluation.speed_decoders import PLAIN, Decoders, NamedDecoder
from apar_core.tree.restore import restore
from apar_core.tree.threads import thread_scripts

Show = Callable[[], None]

_WARM_UP = chain([("Why?", ParagraphRecord(" Because."))], closing=" So.")


def warm_up(decoders: Decoders) -> None:
    """Let each decoder fork once, so that the first answer does not pay for what is built once."""
    for each in decoders.in_turn(0):
        prompt_ids = each.text.encode_prompt("Hello")
        decode_answer(each.decoder, prompt_ids, TokenChoice.replay(_scripts(_WARM_UP, each)))


@dataclass(frozen=True, slots=True)
class AnsweredKeys:
    """Which answers every decoder has given, and why others had to be left out."""

    keys: list[AnswerKey]
    left_out: list[str]


def generate_answers(
    decoders: Decoders,
    questions: Sequence[Question],
    store: AnswerStore,
    limits: DecodeLimits,
    show: Show,
) -> AnsweredKeys:
    """Let the decoders answer all turns greedily, side by side.

    A later turn's prompt holds the decoder's own earlier answers. Plain decoding of the same model
    as the baseline is forced to the text of the first decoder: left to itself, a model that has
    learned to fork ends its answers early where it may not. `show` is called once a question.
    """
    done = AnsweredKeys([], [])
    for question in questions:
        keys = [
            AnswerKey(question.question_id, turn + 1, question.category)
            for turn in range(len(question.turns))
        ]
        try:
            _answer_question(decoders, question, store, limits)
            done.keys.extend(keys)
        except RequestError as error:
            done.left_out.append(f"question {question.question_id}: {error}")
        show()
    return done


def replay_answers(
    decoders: Decoders,
    answers: Sequence[RecordedAnswer],
    store: AnswerStore,
    show: Show,
) -> AnsweredKeys:
    """Force the answers' trees through the decoders, and their flat texts through plain."""
    done = AnsweredKeys([], [])
    for number, answer in enumerate(answers):
        try:
            _replay(decoders, answer, number, store)
            done.keys.append(_key(answer))
        except RequestError as error:
            done.left_out.append(f"question {answer.question_id}, turn {answer.turn}: {error}")
        show()
    return done


def _replay(decoders: Decoders, answer: RecordedAnswer, number: int, store: AnswerStore) -> None:
    tree = extract_tree(answer.text).tree
    for each in decoders.in_turn(number):
        if store.find(answer.question_id, answer.turn, each.name) is not None:
            continue
        scripts = _scripts(tree, each)
        limits = DecodeLimits(
            max_tokens=max(1, sum(map(len, scripts.values()))),
            max_threads=max(1, len(scripts)),
            max_forks=max(1, len(scripts)),
        )
        prompt_ids = each.text.encode_chat(answer.messages)
        decoded = decode_answer(each.decoder, prompt_ids, TokenChoice.replay(scripts), limits)
        store.add(measured(_key(answer), each.name, decoded, answer.text))


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


def _scripts(answer: ParagraphRecord, decoder: NamedDecoder) -> dict[str, list[int]]:
    tree = token_tree(answer, decoder.text.encode)
    # One thread takes no fork tokens: it gets the same text in reading order.
    if decoder.kind == PLAIN:
        return {"": [*restore(tree), decoder.text.end_id]}
    tokens = decoder.text.tokens
    return thread_scripts(tree, tokens.fork_id, tokens.end_id)


def _key(answer: RecordedAnswer) -> AnswerKey:
    return AnswerKey(answer.question_id, answer.turn, answer.category)


def _answer_question(
    decoders: Decoders, question: Question, store: AnswerStore, limits: DecodeLimits
) -> None:
    answers = [_answer_turns(each, question, store, limits) for each in decoders.measured]
    if decoders.baseline is not None and decoders.repeats_text:
        _repeat_turns(decoders.baseline, question, store, answers[0])
    elif decoders.baseline is not None:
        _answer_turns(decoders.baseline, question, store, limits)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    token_ids: list[int]
    ended: bool


def _answer_turns(
    decoder: NamedDecoder, question: Question, store: AnswerStore, limits: DecodeLimits
) -> list[_Answer]:
    """Return the answer of each turn; those that an earlier run has left are encoded again."""
    answers: list[_Answer] = []
    text = decoder.text
    for turn in range(len(question.turns)):
        known = store.find(question.question_id, turn + 1, decoder.name)
        if known is None:
            prompt_ids = _prompt_ids(text, question, turn, [answer.text for answer in answers])
            decoded = decode_answer(decoder.decoder, prompt_ids, TokenChoice.greedy(), limits)
            token_ids = decoded.text_ids
            key = AnswerKey(question.question_id, turn + 1, question.category)
            known = measured(key, decoder.name, decoded, text.decode(token_ids))
            store.add(known)
        else:
            token_ids = text.encode(known.text)
        answers.append(_Answer(known.text, token_ids, known.ended))
    return answers


def _repeat_turns(
    plain: NamedDecoder, question: Question, store: AnswerStore, answers: Sequence[_Answer]
) -> None:
    """Force another decoder's answers through plain decoding of the same model."""
    text = plain.text
    for turn, answer in enumerate(answers):
        if store.find(question.question_id, turn + 1, plain.name) is not None:
            continue
        prompt_ids = _prompt_ids(text, question, turn, [other.text for other in answers[:turn]])
        script = [*answer.token_ids, *([text.end_id] if answer.ended else [])]
        choice = TokenChoice.replay({"": script})
        limits = DecodeLimits(max_tokens=len(script))
        decoded = decode_answer(plain.decoder, prompt_ids, choice, limits)
        key = AnswerKey(question.question_id, turn + 1, question.category)
        store.add(measured(key, plain.name, decoded, answer.text))


def _prompt_ids(text: ModelText, question: Question, turn: int, texts: Sequence[str]) -> list[int]:
    if question.raw_prompt:
        return text.encode_prompt(question.turns[turn])
    return text.encode_chat(question.messages(turn, tuple(texts)))
