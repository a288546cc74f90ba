"""Threads of a forked answer against plain decoding of the same prefix with transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.thread_outputs import TextToken
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ExampleRecord
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.scheduler.core_state import CoreState, core_state
from apar_core.tree.threads import thread_prefix, thread_texts

# A float32 logit differs by about 1e-5 between two ways of adding up the same numbers.
FLOAT_NOISE = 1e-4


@dataclass(frozen=True)
class GeneratedThread:
    """Token ids that a thread continued, and those that it generated, fork and end tokens too."""

    prefix: tuple[int, ...]
    generated: tuple[int, ...]
    is_child: bool


@dataclass(frozen=True)
class Run:
    """What an engine did with a set of prompts."""

    threads: tuple[GeneratedThread, ...]
    preemptions: int
    state_after: CoreState
    num_draft_tokens: int


@dataclass(frozen=True)
class Mismatch:
    """A token that plain decoding would not have chosen; `gap` is the difference of the logits."""

    thread: int
    position: int
    gap: float


def chats(number: int, seed: int = 5) -> list[list[dict[str, str]]]:
    """Chats of all kinds from the embedded model's corpus, each ending with a question."""
    examples: list[ExampleRecord] = list(Corpus(seed=seed).examples(number))
    return [
        [{"role": turn.role, "content": turn.content} for turn in example.messages]
        for example in examples
    ]


def generate_threads(
    engine: OfflineEngine, messages: list[list[dict[str, str]]], max_tokens: int
) -> Run:
    """Answer all chats at once, greedily. Runs in the engine's process."""
    tokenizer, scheduler = engine.tokenizer, engine.scheduler
    control = engine.control_tokens
    assert control is not None
    preemptions, drafts = count_calls(scheduler, "_preempt_request"), count_drafts(scheduler)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in messages
    ]
    answers = engine.generate(
        [{"prompt_token_ids": prompt_ids} for prompt_ids in prompts],
        {"temperature": 0.0, "max_tokens": max_tokens},
    )
    threads: list[GeneratedThread] = []
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert answer.record is not None
        (tree,) = answer.record.trees
        texts = thread_texts(tree)
        for thread, text in texts.items():
            fork, child = TextToken(control.fork_id, None), TextToken(control.child_id, None)
            path = [item.token_id for item in thread_prefix(texts, thread, [], fork, child)]
            end = TextToken(tokenizer.eos_token_id, None)
            generated = [token.token_id for token in text.generated(fork, end)]
            is_child = text.parent is not None
            threads.append(GeneratedThread((*prompt_ids, *path), tuple(generated), is_child))
    return Run(tuple(threads), preemptions[0], core_state(scheduler), drafts[0])


def mismatches(
    threads: Sequence[GeneratedThread], checkpoint: Path | None = None
) -> list[Mismatch]:
    """Return every generated token that plain greedy decoding of its prefix would not choose.

    `checkpoint` None is the embedded model.
    """
    folder = checkpoint_path() if checkpoint is None else checkpoint
    return [
        Mismatch(number, position, gap)
        for number, thread in enumerate(threads)
        for position, gap in enumerate(_gaps(folder, thread.prefix, thread.generated))
        if gap > 0
    ]


@cache  # engines with other settings generate the same threads
def _gaps(
    checkpoint: Path, prefix: tuple[int, ...], generated: tuple[int, ...]
) -> tuple[float, ...]:
    """Return how far each generated token's logit is below the largest one allowed."""
    model, fork_id, child_id = _reference(checkpoint)
    tokens = torch.tensor([*prefix, *generated])
    with torch.no_grad():
        logits_TV = model(tokens[None]).logits[0, len(prefix) - 1 : -1]
    previous = tokens[len(prefix) - 1 : -1]
    logits_TV[:, child_id] = -torch.inf
    logits_TV[(previous == fork_id) | (previous == child_id), fork_id] = -torch.inf
    chosen = logits_TV.gather(1, tokens[len(prefix) :, None])[:, 0]
    return tuple((logits_TV.max(1).values - chosen).tolist())


@cache
def _reference(checkpoint: Path) -> tuple[Any, int, int]:
    """Return transformers' model and the ids of the fork and child tokens."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    vocabulary = AutoTokenizer.from_pretrained(checkpoint).get_vocab()
    return model, vocabulary["[Fork]"], vocabulary["[Child]"]


def count_calls(target: Any, method: str) -> list[int]:
    """Count the calls of a method from now on."""
    calls, original = [0], getattr(target, method)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    setattr(target, method, counted)
    return calls


def count_drafts(scheduler: Any) -> list[int]:
    """Count the draft tokens that were scheduled from now on."""
    drafts, original = [0], scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        drafts[0] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return output

    scheduler.schedule = counted
    return drafts
