"""Lists of a real model without trained tokens: equal to a client that sends each part again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.formats.list_shape import (
    DetailReader,
    HeadReader,
    HeadState,
    ListFinder,
    NextLine,
    NextLineReader,
)
from apar_core.models.smollm2 import SMOLLM2
from apar_core.scheduler.core_state import CoreState, core_state
from tests.integration.engine_process import EngineProcess
from tests.integration.features.test_kv_offloading import LONG_TRANSFER, offloading
from tests.integration.plain_decoding import count_drafts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(not SMOLLM2.folder.is_dir(), reason="`apar fetch` was not run"),
    pytest.mark.timeout(1800),
]
QUESTIONS = (
    "List 4 benefits of regular exercise, with an explanation of each.",
    "Describe the main parts of a computer, one by one.",
    "What is the capital of France?",
    "Explain the three states of matter with a numbered list.",
)
MAX_TOKENS = 160
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
WAYS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "small steps": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    "short memory": {"num_gpu_blocks_override": 18},
    "n-gram speculation": {"speculative_config": NGRAM},
    "KV offloading": offloading(LONG_TRANSFER),
}


class Client:
    """Writes an answer with plain requests, each of which continues a context of tokens."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._end = self._tokenizer.eos_token_id

    def _plain(self, context: Sequence[int]) -> list[int]:
        (answer,) = self._engine.generate(
            [{"prompt_token_ids": list(context)}],
            {"temperature": 0.0, "max_tokens": MAX_TOKENS, "extra_args": {"apar_enabled": False}},
        )
        return list(answer.token_ids)

    def _piece(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _until(
        self, context: Sequence[int], shows: Callable[[str], bool]
    ) -> tuple[list[int], bool]:
        """Return what follows a context, up to the token that shows something."""
        tokens: list[int] = []
        for token_id in self._plain(context):
            if token_id == self._end:
                return tokens, False
            tokens.append(token_id)
            if shows(self._piece(token_id)):
                return tokens, True
        return tokens, False

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens of the answer, at most `MAX_TOKENS`."""
        text: list[int] = []
        while True:
            finder, found = ListFinder(), list[Any]()

            def finds(piece: str, finder: ListFinder = finder, found: list[Any] = found) -> bool:
                found[:] = [finder.feed(piece)]
                return found[0] is not None

            new, is_list = self._until([*prompt, *text], finds)
            start = len(text)
            text += new
            if not is_list or len(text) >= MAX_TOKENS:
                return text[:MAX_TOKENS]
            opened = found[0]
            first = [*prompt, *text[: start + opened.num_before]]
            outline, header, number = list(text), list[int](), opened.number
            while True:
                context = [*first, *header] if header else [*prompt, *text]
                detail, closing = self._detail(opened.shape, context)
                text += detail
                number += 1
                begins_line = len(closing) < len(opened.shape.separator)
                next_line = NextLineReader(opened.shape, number, begins_line=begins_line)
                probe, goes_on = self._probe(next_line, [*prompt, *text])
                marker = opened.shape.marker.text(number)
                outline += self._ids(opened.shape.separator + marker)
                head = self._head(opened.shape, [*prompt, *outline]) if goes_on else None
                if head is None or len(text) >= MAX_TOKENS:
                    text += probe
                    break
                outline += head
                header = [*self._ids(opened.lead + marker), *head]
                text += [*self._ids(closing), *self._ids(marker), *head]
            if len(text) >= MAX_TOKENS:
                return text[:MAX_TOKENS]

    def _detail(self, shape: Any, context: Sequence[int]) -> tuple[list[int], str]:
        reader, ends = DetailReader(shape), list[Any]()

        def shows(piece: str) -> bool:
            ends[:] = [reader.feed(piece)]
            return ends[0] is not None

        tokens, ended = self._until(context, shows)
        partial, closing = reader.closing(ends[0] if ended else None)
        kept = tokens[: reader.num_kept] if ended else tokens
        return [*kept, *(self._ids(partial) if partial else [])], closing

    def _head(self, shape: Any, context: Sequence[int]) -> list[int] | None:
        reader, states = HeadReader(shape.marker, shape.head_end), list[Any]()

        def shows(piece: str) -> bool:
            states[:] = [reader.feed(piece)]
            return states[0] is not HeadState.OPEN

        tokens, _ = self._until(context, shows)
        return tokens if states and states[0] is HeadState.ENDED else None

    def _probe(self, reader: NextLineReader, context: Sequence[int]) -> tuple[list[int], bool]:
        states = list[Any]()

        def shows(piece: str) -> bool:
            states[:] = [reader.feed(piece)]
            return states[0] is not NextLine.OPEN

        tokens, _ = self._until(context, shows)
        goes_on = bool(states) and states[0] is NextLine.ITEM
        return tokens if goes_on else [], goes_on


def client_answers(engine: OfflineEngine) -> list[str]:
    """The texts of a resubmitting client. Runs in the engine's process."""
    client = Client(engine)
    return [
        str(engine.tokenizer.decode(client.answer(engine.chat_prompt(each)["prompt_token_ids"])))
        for each in QUESTIONS
    ]


def engine_answers(
    engine: OfflineEngine, sampling: dict[str, Any]
) -> tuple[list[tuple[str, int]], CoreState, int]:
    """Texts and threads of all answers at once, and drafts. Runs in the engine's process."""
    drafts = count_drafts(engine.scheduler)
    answers = engine.generate([engine.chat_prompt(each) for each in QUESTIONS], sampling)
    found = []
    for answer in answers:
        assert answer.record is not None
        found.append((answer.text, answer.record.statistics.threads))
    return found, core_state(engine.scheduler), drafts[0]


def engine(**changes: Any) -> EngineProcess:
    return EngineProcess(
        model=str(SMOLLM2.folder),
        max_model_len=512,
        block_size=32,
        kv_cache_memory_bytes=1 << 30,
        additional_config={"apar": {"parallel_format": "lists"}},
        **changes,
    )


@pytest.fixture(scope="module")
def expected() -> list[str]:
    process = engine()
    try:
        return process.call(client_answers, timeout_s=900)
    finally:
        process.close()


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_a_resubmitting_client(way: str, expected: list[str]) -> None:
    process = engine(**WAYS[way])
    try:
        found, state, num_drafts = process.call(
            engine_answers, {"temperature": 0.0, "max_tokens": MAX_TOKENS}, timeout_s=900
        )
    finally:
        process.close()

    assert [text for text, _ in found] == expected
    threads = [number for _, number in found]
    assert threads[0] > 5
    assert threads[1] > 5
    assert threads[2] == 1
    assert (num_drafts > 0) == ("speculative_config" in WAYS[way])
    assert state.free_blocks == state.kv_blocks


def test_seeded_answers_and_their_log_probabilities_are_reproduced() -> None:
    process = engine()
    try:
        sampling = {"temperature": 0.7, "seed": 4, "max_tokens": MAX_TOKENS, "logprobs": 1}
        first, state, _ = process.call(engine_answers, sampling, timeout_s=900)
        second, _, _ = process.call(engine_answers, sampling, timeout_s=900)
    finally:
        process.close()

    assert [each[0] for each in first] == [each[0] for each in second]
    assert any(number > 1 for _, number in first)
    assert state.free_blocks == state.kv_blocks
