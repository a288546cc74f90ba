"""The held-out check and the reference decoder, on the shipped checkpoint and on made answers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from apar_core.formats.control_tokens import TreeTokens
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.decoders.interface import DecodedThread
from apar_core.offline.evaluation.fork_check import (
    AnswerVerdict,
    CheckPrompt,
    ForkReport,
    HeldOutSettings,
    TransformersThreadDecoder,
    count_control_mistakes,
    held_out_prompts,
    judge,
    report_table,
)
from apar_core.offline.training.pretrained import tree_tokens
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId

FORK, CHILD, END = 3, 4, 2
TOKENS = TreeTokens(FORK, CHILD, END)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    return tokenizer


@pytest.fixture(scope="module")
def decoder(tokenizer: PreTrainedTokenizerFast) -> TransformersThreadDecoder:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    return TransformersThreadDecoder(model, tree_tokens(tokenizer), tokenizer.pad_token_id)


def ask(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def thread(
    name: str, parent: str | None, ordinal: int, *token_ids: int, ended: bool = True
) -> DecodedThread:
    return DecodedThread(
        ThreadId(name), ThreadId(parent) if parent else None, ordinal, token_ids, ended
    )


def test_misplaced_control_tokens_are_counted() -> None:
    assert count_control_mistakes(thread(ROOT_THREAD, None, 0, 10, FORK, 11, FORK), TOKENS) == 0
    assert count_control_mistakes(thread(ROOT_THREAD, None, 0, 10, FORK, FORK), TOKENS) == 1
    assert count_control_mistakes(thread("a", ROOT_THREAD, 0, FORK, 10), TOKENS) == 1
    assert count_control_mistakes(thread(ROOT_THREAD, None, 0, 10, CHILD, 11), TOKENS) == 1


def verdict(
    *, should_fork: bool, forked: bool, num_unended: int = 0, control_mistakes: int = 0
) -> AnswerVerdict:
    return AnswerVerdict(
        kind="numbered" if should_fork else "fact",
        should_fork=should_fork,
        forked=forked,
        same_forks=forked == should_fork,
        same_text=True,
        num_threads=1,
        num_unended=num_unended,
        control_mistakes=control_mistakes,
    )


def test_each_missed_bound_is_a_failure() -> None:
    good = [verdict(should_fork=True, forked=True)] * 19

    assert ForkReport([*good, verdict(should_fork=True, forked=False)]).failures() == []
    missed = ForkReport([*good, *[verdict(should_fork=True, forked=False)] * 2])
    assert len(missed.failures()) == 1
    wrong = ForkReport([*good, verdict(should_fork=False, forked=True)])
    assert wrong.failures() == ["100.0% fork where they should not"]
    cut = ForkReport([verdict(should_fork=True, forked=True, num_unended=2)])
    assert cut.failures() == ["2 threads did not end by themselves"]
    bad = ForkReport([verdict(should_fork=True, forked=True, control_mistakes=3)])
    assert bad.failures() == ["3 control tokens are misplaced"]
    assert len(report_table(wrong).rows) == 2


def test_the_held_out_prompts_include_answers_with_and_without_forks(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompts = held_out_prompts(HeldOutSettings(), tokenizer)

    assert len(prompts) == 400
    assert sum(prompt.num_forks > 0 for prompt in prompts) > 200
    assert sum(prompt.num_forks == 0 for prompt in prompts) > 60


@pytest.mark.parametrize(
    ("question", "num_forks"),
    [
        ("Give me 5 tips for learning guitar.", 5),
        ("List 3 facts about volcanoes.", 3),
        ("Give me 4 tips for baking bread as bullet points.", 4),
        ("Tell me about baking bread.", 3),
        ("Give me a detailed guide to making coffee.", 11),
        ("What is 12 + 7?", 0),
        ("What is the capital of France?", 0),
        ("Write a Python function that adds two numbers.", 0),
        ("Who are you?", 0),
    ],
)
def test_the_shipped_model_forks_where_it_should(
    tokenizer: PreTrainedTokenizerFast,
    decoder: TransformersThreadDecoder,
    question: str,
    num_forks: int,
) -> None:
    threads = decoder([ask(tokenizer, question)])[0]

    verdict = judge(
        CheckPrompt("fixed", [], num_forks, ""), threads, tree_tokens(tokenizer), tokenizer
    )

    assert verdict.same_forks
    assert verdict.num_threads == num_forks + 1
    assert verdict.num_unended == 0
    assert verdict.control_mistakes == 0


def test_batched_threads_equal_threads_decoded_alone(
    tokenizer: PreTrainedTokenizerFast, decoder: TransformersThreadDecoder
) -> None:
    questions = ["Give me 3 tips for singing.", "What is 2 + 2?", "Tell me about elephants."]
    prompts = [ask(tokenizer, question) for question in questions]

    together = decoder(prompts)

    assert together == [decoder([prompt])[0] for prompt in prompts]


def test_a_model_that_forks_forever_is_cut_off(
    tokenizer: PreTrainedTokenizerFast, decoder: TransformersThreadDecoder
) -> None:
    small = TransformersThreadDecoder(decoder.model, decoder.tokens, decoder.pad_id, max_threads=3)

    threads = small([ask(tokenizer, "Give me 5 tips for learning guitar.")])[0]

    assert len(threads) == 6
    assert [thread.ended for thread in threads].count(False) == 3
