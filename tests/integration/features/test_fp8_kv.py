"""Forks on a KV cache of 8-bit floats."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import pytest

from apar_core.engine.answer_tree import AnswerTree
from apar_core.engine.offline_engine import OfflineEngine
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import chats

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Result = TypeVar("Result")
NUM_CHATS = 8
MAX_TOKENS = 150


@dataclass(frozen=True)
class Sequence:
    """All tokens of a thread, and the log-probabilities of its own, which are the last."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_child: bool


def sequences(engine: OfflineEngine) -> list[Sequence]:
    """Answer chats greedily; return what each thread read and wrote. Runs in the engine."""
    prompts = [
        engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats(NUM_CHATS)
    ]
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        {
            "temperature": 0.0,
            "max_tokens": MAX_TOKENS,
            "logprobs": 0,
            "extra_args": {"apar_tree": True},
        },
    )
    return [
        Sequence(
            tuple(tree.sequence(thread.id, prompt)),
            thread.logprobs or (),
            thread.parent is not None,
        )
        for prompt, tree in zip(prompts, map(_tree_of, answers), strict=True)
        for thread in tree.threads
    ]


def _tree_of(answer: Any) -> AnswerTree:
    assert answer.tree is not None
    tree: AnswerTree = answer.tree
    return tree


def read(engine: OfflineEngine, rows: list[Sequence]) -> list[list[float]]:
    """Return the log-probabilities of the threads' own tokens, read as prompts."""
    from vllm import SamplingParams

    prompts: list[Any] = [{"prompt_token_ids": list(row.token_ids)} for row in rows]
    outputs: list[Any] = engine.llm.generate(
        prompts,
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        use_tqdm=False,
    )
    return [
        [
            output.prompt_logprobs[position][token].logprob
            for position, token in enumerate(row.token_ids)
        ][-len(row.logprobs) :]
        if row.logprobs
        else []
        for row, output in zip(rows, (_without_first(each) for each in outputs), strict=True)
    ]


def _without_first(output: Any) -> Any:
    """vLLM has no log-probability of the first token of a prompt."""
    first = output.prompt_token_ids[0]
    output.prompt_logprobs[0] = {first: type("Certain", (), {"logprob": 0.0})()}
    return output


def test_threads_read_an_8_bit_kv_cache_as_one_sequence_would() -> None:
    """Blocks that a fork shares and copies hold the same 8-bit values."""
    rows = in_engine(sequences, kv_cache_dtype="fp8")
    # vLLM's own scheduler: ours would refuse prompts with control tokens.
    as_8_bit = in_engine(read, rows, kv_cache_dtype="fp8", scheduler_cls=None)
    as_16_bit = in_engine(read, rows, scheduler_cls=None)

    assert sum(row.is_child for row in rows) > NUM_CHATS
    # What the precision of the cache makes, and what the order of additions makes.
    assert 100 * gap(rows, as_8_bit) < gap(rows, as_16_bit)


def in_engine(function: Callable[..., Result], *args: Any, **arguments: Any) -> Result:
    """Return `function(engine, *args)`, run in an engine of its own."""
    engine = EngineProcess(dtype="bfloat16", **arguments)
    try:
        return engine.call(function, *args)
    finally:
        engine.close()


def gap(rows: list[Sequence], expected: list[list[float]]) -> float:
    """Return the mean difference of the log-probabilities."""
    return fmean(
        abs(one - other)
        for row, own in zip(rows, expected, strict=True)
        for one, other in zip(row.logprobs, own, strict=True)
    )
