"""Log-probabilities of a forked answer: in reading order, each of its own thread's sequence."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from apar_core.models.apar_tiny import checkpoint_path
from tests.integration.sampling.asking import (
    FULL_TEXT,
    READING_ORDER,
    Answer,
    encode,
    full_ids,
    replayed,
    token_id,
)
from tests.integration.sampling.conftest import Ask

pytestmark = pytest.mark.engine

# Two ways of adding up the same float32 numbers differ by less.
FLOAT_NOISE = 1e-4
# The sequence that the tokens of each part in READING_ORDER continue, behind the prompt.
F, C = "[Fork]", "[Child]"
READ_BEFORE: tuple[tuple[str, ...], ...] = (
    (),
    ("Tips:\n1. Rest", F, C),
    ("Tips:\n1. Rest", F),
    ("Tips:\n1. Rest", F, "\n2. Food", F, C),
    ("Tips:\n1. Rest", F, "\n2. Food", F, C, ": eat", F, C),
    ("Tips:\n1. Rest", F, "\n2. Food", F, C, ": eat", F),
    ("Tips:\n1. Rest", F, "\n2. Food", F),
)


@cache
def reference_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()


def reference(prompt_ids: tuple[int, ...]) -> list[torch.Tensor]:
    """For every token of the text the log-probabilities of the vocabulary, by transformers."""
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        for part, before in zip(READING_ORDER, READ_BEFORE, strict=True):
            ids = list(prompt_ids)
            for text in before:
                ids.extend([token_id(text)] if text in (F, C) else encode(text))
            start = len(ids)
            ids.extend(encode(part))
            logits_TV = reference_model()(torch.tensor([ids])).logits[0]
            rows.extend(logits_TV[start - 1 : -1].log_softmax(-1))
    return rows


@pytest.mark.parametrize("number", [0, 1, 5])
def test_every_token_has_the_log_probability_of_its_own_path(ask_chat: Ask, number: int) -> None:
    [answer] = ask_chat(replayed(logprobs=number))

    logprobs = answer.choice.logprobs
    assert logprobs is not None
    assert len(logprobs) == len(full_ids())
    rows = reference(answer.prompt_ids)
    for chosen, entry, row in zip(full_ids(), logprobs, rows, strict=True):
        # vLLM names the chosen token and the likeliest ones, of which it may be one.
        assert len(entry) in ({number, number + 1} if number else {1})
        assert chosen in entry
        ranks = sorted(rank for token, (_, rank) in entry.items() if token != chosen)
        assert all(rank <= number for rank in ranks)
        for token, (logprob, _) in entry.items():
            assert abs(logprob - float(row[token])) < FLOAT_NOISE


def test_requests_of_one_batch_each_get_as_many_log_probabilities_as_they_asked_for(
    ask_chat: Ask,
) -> None:
    """The wider ones end first, so the steps of the others differ in how wide their rows are."""
    numbers = (1, 5, 0, 3)
    lengths = (200, 4, 200, 9)

    answers = ask_chat(
        *(
            replayed(logprobs=number, max_tokens=length)
            for number, length in zip(numbers, lengths, strict=True)
        )
    )

    for number, answer in zip(numbers, answers, strict=True):
        logprobs = answer.choice.logprobs
        assert logprobs is not None
        assert len(logprobs) == len(answer.choice.token_ids)
        # The chosen token may be one of the likeliest.
        assert {len(entry) for entry in logprobs} <= {max(number, 1), number + 1}
    assert [answers[0].choice.text, answers[2].choice.text] == [FULL_TEXT] * 2


def test_log_probabilities_of_named_tokens_leave_other_requests_of_the_batch_alone(
    ask_chat: Ask,
) -> None:
    """The V1 sampler narrows every row of such a step to the named tokens."""
    named = [token_id("[Fork]")]

    others = ask_chat(
        replayed(logprobs=3),
        replayed(logprob_token_ids=named, max_tokens=6),
        replayed(logprobs=3),
    )

    for answer in (others[0], others[2]):
        assert answer.choice.text == FULL_TEXT
        assert answer.choice.logprobs is not None
        pairs = zip(answer.choice.token_ids, answer.choice.logprobs, strict=True)
        assert all(token in entry for token, entry in pairs)


def test_a_cut_text_has_a_log_probability_for_each_of_its_tokens(ask_chat: Ask) -> None:
    answers = ask_chat(
        replayed(logprobs=1, stop=["Food: e"]),
        replayed(logprobs=1, stop_token_ids=[encode("\n2. Food")[1]]),
        replayed(logprobs=1, max_tokens=11),
    )

    for answer in answers:
        assert answer.choice.logprobs is not None
        assert len(answer.choice.logprobs) == len(answer.choice.token_ids)
        pairs = zip(answer.choice.token_ids, answer.choice.logprobs, strict=True)
        assert all(token in entry for token, entry in pairs)


def test_log_probabilities_of_the_prompt_are_those_of_the_prompt_alone(ask_chat: Ask) -> None:
    [answer] = ask_chat(replayed(prompt_logprobs=1))

    assert answer.choice.text == FULL_TEXT
    assert_prompt_logprobs(answer)


def assert_prompt_logprobs(answer: Answer) -> None:
    found = answer.prompt_logprobs
    assert found is not None
    # Nothing predicts the first token.
    assert len(found) == len(answer.prompt_ids)
    assert found[0] is None
    with torch.inference_mode():
        logits_TV = reference_model()(torch.tensor([answer.prompt_ids])).logits[0]
    rows = logits_TV[:-1].log_softmax(-1)
    for token, entry, row in zip(answer.prompt_ids[1:], found[1:], rows, strict=True):
        assert entry is not None
        assert abs(entry[token][0] - float(row[token])) < FLOAT_NOISE
