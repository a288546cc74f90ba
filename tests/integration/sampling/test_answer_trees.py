"""Trees of answers for callers of `vllm.LLM`: threads, tokens and log-probabilities."""

from typing import Any

import pytest
import torch

from apar_core.engine.answer_tree import AnswerTree, answer_tree
from apar_core.engine.offline_engine import OfflineEngine
from tests.integration.engine_process import EngineProcess
from tests.integration.sampling.asking import (
    FULL_TEXT,
    QUESTION,
    encode,
    replayed,
    token_id,
)
from tests.integration.sampling.test_logprobs import FLOAT_NOISE, reference_model

pytestmark = pytest.mark.engine

FORK, CHILD, END = "[Fork]", "[Child]", "<eos>"
TREE = {"apar_tree": True}


def trees_of(
    engine: OfflineEngine, settings: dict[str, Any]
) -> tuple[list[int], list[AnswerTree], list[str]]:
    """Return the prompt, and tree and text of each choice. Runs in the engine's process."""
    from vllm import SamplingParams

    prompts: list[Any] = [engine.chat_prompt(QUESTION)]
    [output] = engine.llm.generate(prompts, SamplingParams(**settings), use_tqdm=False)
    trees = [answer_tree(completion) for completion in output.outputs]
    return list(output.prompt_token_ids or ()), trees, [each.text for each in output.outputs]


def ids(*parts: str) -> tuple[int, ...]:
    return tuple(
        token
        for part in parts
        for token in ((token_id(part),) if part in (FORK, CHILD, END) else encode(part))
    )


def test_a_tree_has_the_threads_of_the_answer(engine: EngineProcess) -> None:
    _, [tree], [text] = engine.call(trees_of, replayed(extra_args=TREE))

    assert tree.text == text == FULL_TEXT
    assert tree.finish_reason == "stop"
    root, rest, food, greens = tree.threads
    assert [each.id for each in tree.threads] == ["root", "root.0", "root.1", "root.1.0"]
    assert [each.parent for each in tree.threads] == [None, "root", "root", "root.1"]
    assert root.token_ids == ids("Tips:\n1. Rest", FORK, "\n2. Food", FORK, "\n3. Play.", END)
    assert food.token_ids == ids(": eat", FORK, " early.", END)
    # A child has read its parent up to the fork token.
    for child, parent in ((rest, root), (food, root), (greens, food)):
        assert child.forked_at is not None
        assert parent.token_ids[child.forked_at - 1] == token_id(FORK)
        assert child.seed_token_ids == ids(CHILD)
    assert [each.text for each in tree.threads] == [
        "Tips:\n1. Rest\n2. Food\n3. Play.",
        ": sleep well.",
        ": eat early.",
        " greens,",
    ]
    assert {each.finish_reason for each in tree.threads} == {"stop"}
    assert {each.logprobs for each in tree.threads} == {None}
    assert (tree.statistics.threads, tree.statistics.forks) == (4, 3)


def test_every_generated_token_has_the_log_probability_of_its_sequence(
    engine: EngineProcess,
) -> None:
    """Fork and end tokens too: they are the model's choices, as text is."""
    prompt, [tree], _ = engine.call(trees_of, replayed(extra_args=TREE, logprobs=0))

    for thread in tree.threads:
        sequence = tree.sequence(thread.id, prompt)
        own = thread.token_ids
        assert tuple(sequence[len(sequence) - len(own) :]) == own
        with torch.inference_mode():
            logits_TV = reference_model()(torch.tensor([sequence])).logits[0]
        rows = logits_TV.log_softmax(-1)[-len(own) - 1 : -1]
        assert thread.logprobs is not None
        for token, logprob, row in zip(own, thread.logprobs, rows, strict=True):
            assert abs(logprob - float(row[token])) < FLOAT_NOISE


def test_sampled_choices_have_trees_of_their_own(engine: EngineProcess) -> None:
    settings = {"n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 150, "logprobs": 0}

    _, trees, texts = engine.call(trees_of, {**settings, "extra_args": TREE})

    assert [tree.text for tree in trees] == texts
    assert len(set(texts)) == 3
    for tree in trees:
        generated = sum(len(thread.token_ids) for thread in tree.threads)
        assert generated == sum(len(thread.logprobs or ()) for thread in tree.threads)
        assert len(tree.threads) == tree.statistics.threads


def test_a_request_that_may_not_fork_has_one_thread(engine: EngineProcess) -> None:
    settings = {"temperature": 0.0, "max_tokens": 60, "detokenize": False}

    _, [tree], [text] = engine.call(
        trees_of, {**settings, "extra_args": {**TREE, "apar_enabled": False}}
    )

    [root] = tree.threads
    # vLLM was told not to detokenize; the tree has its text all the same.
    assert text == ""
    assert tree.text == root.text != ""
    assert root.finish_reason == tree.finish_reason


def test_a_stop_string_cuts_threads(engine: EngineProcess) -> None:
    _, [tree], [text] = engine.call(trees_of, replayed(extra_args=TREE, stop=[" greens"]))

    assert text == tree.text == FULL_TEXT[: FULL_TEXT.index(" greens")]
    assert tree.finish_reason == "stop"
    assert len(tree.threads) == 4
