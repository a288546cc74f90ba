"""Check on held-out prompts that the embedded model forks where it should and nowhere else.

`python -m apar_core.offline.evaluation.fork_check` prints a table and exits with 1 if a bound is
missed. It decodes with plain transformers, one row per thread, each reading only its own path.
Tests compare the faster decoders with this reference decoder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from apar_core.formats.control_tokens import TreeTokens
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.causal_model import load_causal_model
from apar_core.offline.data.records import ExampleRecord, count_forks, flat_text
from apar_core.offline.data.tiny_corpus.combinations import FORKING_KINDS, KINDS
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.decoders.interface import DecodedThread, paragraph_tree
from apar_core.offline.evaluation.layout import columns
from apar_core.offline.training.example_encoder import prompt_token_ids
from apar_core.offline.training.pretrained import tree_tokens
from apar_core.reporting import ReportTable
from apar_core.tree.restore import restore
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, child_thread

DecodeAnswers = Callable[[Sequence[Sequence[int]]], list[list[DecodedThread]]]
"""Decodes prompts of token ids; returns each answer's threads, parents before their children."""


# Bounds: forked answers, of those where a fork is expected, and of the others.
_MIN_FORKING_SHARE = 0.95
_MAX_WRONG_FORK_SHARE = 0.01


class HeldOutSettings(BaseModel):
    """Sample of held-out prompts: its size, the seed of the training, and the sample's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_prompts: PositiveInt = 400
    seed: NonNegativeInt = 0
    stream: str = ""

    def examples(self) -> list[ExampleRecord]:
        """Return examples that training with the same seed did not see."""
        corpus = Corpus(self.seed, held_out=True, stream=self.stream)
        return list(corpus.examples(self.num_prompts))


def parse_options(
    description: str | None, model: Path, arguments: Sequence[str] | None, **numbers: str
) -> tuple[argparse.Namespace, HeldOutSettings]:
    """Return the options of a check, and its sample; `model` is the default of --model.

    `numbers` has further options that are 0 by default, with their help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, default=model, help="checkpoint folder")
    parser.add_argument("--prompts", type=int, default=400, help="sample size")
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    parser.add_argument(
        "--stream", default="", help="name of the sample; each name gives a different one"
    )
    for name, text in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=0, help=text)
    options = parser.parse_args(arguments)
    return options, HeldOutSettings(
        num_prompts=options.prompts, seed=options.seed, stream=options.stream
    )


def sums_by_kind(
    verdicts: Iterable[tuple[str, Sequence[int]]],
) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return each kind of prompt with its number of answers and the sums of their counts."""
    found: dict[str, list[Sequence[int]]] = {}
    for kind, counts in verdicts:
        found.setdefault(kind, []).append(counts)
    return [
        (kind, len(found[kind]), tuple(map(sum, zip(*found[kind], strict=True))))
        for kind in KINDS
        if kind in found
    ]


def greedy_texts(
    model: Any,
    contexts: Sequence[Sequence[int]],
    *,
    ends: Sequence[int],
    pad_id: int,
    max_tokens: int,
    batch_size: int,
) -> list[list[int]]:
    """Return what the `generate` of transformers appends to each context, up to and with an end."""
    texts: list[list[int]] = [[] for _ in contexts]
    # Rows of similar length need little padding.
    order = sorted(range(len(contexts)), key=lambda index: len(contexts[index]))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        width = max(len(contexts[index]) for index in batch)
        padding = [width - len(contexts[index]) for index in batch]
        rows = [[pad_id] * n + [*contexts[index]] for n, index in zip(padding, batch, strict=True)]
        with torch.inference_mode():
            found = model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in padding]),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=sorted(ends),
                pad_token_id=pad_id,
            )
        for index, row in zip(batch, found[:, width:].tolist(), strict=True):
            length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            texts[index] = row[:length]
    return texts


@dataclass(frozen=True, slots=True)
class CheckPrompt:
    """Held-out prompt with the text and the number of forks of the expected answer."""

    kind: str
    token_ids: list[int]
    num_forks: int
    text: str


@dataclass(frozen=True, slots=True)
class AnswerVerdict:
    """Verdict on one answer.

    `control_mistakes` counts fork tokens right after a fork or child token, and sampled child
    tokens.
    """

    kind: str
    should_fork: bool
    forked: bool
    same_forks: bool
    same_text: bool
    num_threads: int
    num_unended: int
    control_mistakes: int


@dataclass(frozen=True, slots=True)
class ForkReport:
    """Verdicts on all prompts."""

    verdicts: list[AnswerVerdict]

    @property
    def forking_share(self) -> float:
        """Share of forked answers where a fork is expected."""
        wanted = [verdict for verdict in self.verdicts if verdict.should_fork]
        return sum(verdict.forked for verdict in wanted) / max(1, len(wanted))

    @property
    def wrong_fork_share(self) -> float:
        """Share of forked answers where none is expected."""
        plain = [verdict for verdict in self.verdicts if not verdict.should_fork]
        return sum(verdict.forked for verdict in plain) / max(1, len(plain))

    def failures(self) -> list[str]:
        """Return a message for each missed bound."""
        unended = sum(verdict.num_unended for verdict in self.verdicts)
        mistakes = sum(verdict.control_mistakes for verdict in self.verdicts)
        found = []
        if self.forking_share < _MIN_FORKING_SHARE:
            found.append(f"only {self.forking_share:.1%} fork where they should")
        if self.wrong_fork_share > _MAX_WRONG_FORK_SHARE:
            found.append(f"{self.wrong_fork_share:.1%} fork where they should not")
        if unended:
            found.append(f"{unended} threads did not end by themselves")
        if mistakes:
            found.append(f"{mistakes} control tokens are misplaced")
        return found


@dataclass(frozen=True, slots=True)
class _PendingThread:
    answer: int
    thread: ThreadId
    parent: ThreadId | None
    fork_ordinal: int
    prefix: tuple[int, ...]

    def decoded(self, token_ids: tuple[int, ...], *, ended: bool) -> DecodedThread:
        return DecodedThread(self.thread, self.parent, self.fork_ordinal, token_ids, ended)


@dataclass(frozen=True, slots=True)
class TransformersThreadDecoder:
    """Greedy reference decoder that generates threads in waves: roots, their children, and so on.

    `model` needs the `generate` of transformers. No token is banned, so every mistake of the model
    shows. An answer gets at most `max_threads` threads, which stops a bad model from forking
    forever: further threads are returned empty and not ended.
    """

    model: Any
    tokens: TreeTokens
    pad_id: int
    max_thread_tokens: int = 256
    max_threads: int = 64
    batch_size: int = 64

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[list[DecodedThread]]:
        """Return the threads of each prompt's answer."""
        answers: list[list[DecodedThread]] = [[] for _ in prompts]
        wave = [
            _PendingThread(answer, ROOT_THREAD, None, 0, tuple(prompt))
            for answer, prompt in enumerate(prompts)
        ]
        while wave:
            children: list[_PendingThread] = []
            texts = greedy_texts(
                self.model,
                [pending.prefix for pending in wave],
                ends=[self.tokens.end_id],
                pad_id=self.pad_id,
                max_tokens=self.max_thread_tokens,
                batch_size=self.batch_size,
            )
            for pending, text in zip(wave, texts, strict=True):
                ended = text[-1:] == [self.tokens.end_id]
                token_ids = tuple(text[:-1] if ended else text)
                answers[pending.answer].append(pending.decoded(token_ids, ended=ended))
                children.extend(self._children(pending, token_ids))
            wave = self._admit(children, answers)
        return answers

    def _admit(
        self, threads: list[_PendingThread], answers: list[list[DecodedThread]]
    ) -> list[_PendingThread]:
        """Return the threads within the limit; add the others to their answers as empty."""
        room = [self.max_threads - len(threads) for threads in answers]
        wave: list[_PendingThread] = []
        for pending in threads:
            room[pending.answer] -= 1
            if room[pending.answer] >= 0:
                wave.append(pending)
            else:
                answers[pending.answer].append(pending.decoded((), ended=False))
        return wave

    def _children(
        self, pending: _PendingThread, token_ids: tuple[int, ...]
    ) -> list[_PendingThread]:
        forks = [i for i, token_id in enumerate(token_ids) if token_id == self.tokens.fork_id]
        return [
            _PendingThread(
                pending.answer,
                child_thread(pending.thread, ordinal),
                pending.thread,
                ordinal,
                (*pending.prefix, *token_ids[: index + 1], self.tokens.child_id),
            )
            for ordinal, index in enumerate(forks)
        ]


def held_out_prompts(
    settings: HeldOutSettings, tokenizer: PreTrainedTokenizerFast
) -> list[CheckPrompt]:
    """Return prompts that training with the same seed did not see."""
    return [
        CheckPrompt(
            example.kind,
            prompt_token_ids(example, tokenizer),
            count_forks(example.answer),
            flat_text(example.answer),
        )
        for example in settings.examples()
    ]


def count_control_mistakes(thread: DecodedThread, tokens: TreeTokens) -> int:
    """Return the number of misplaced control tokens that the thread sampled."""
    # A child thread starts right after the injected child token.
    before = tokens.child_id if thread.parent is not None else None
    mistakes = 0
    for token_id in thread.token_ids:
        if token_id == tokens.child_id:
            mistakes += 1
        if token_id == tokens.fork_id and before in (tokens.fork_id, tokens.child_id):
            mistakes += 1
        before = token_id
    return mistakes


def judge(
    prompt: CheckPrompt,
    threads: Sequence[DecodedThread],
    tokens: TreeTokens,
    tokenizer: PreTrainedTokenizerFast,
) -> AnswerVerdict:
    """Compare the threads of an answer with what its prompt expects."""
    num_forks = sum(thread.token_ids.count(tokens.fork_id) for thread in threads)
    text = tokenizer.decode(restore(paragraph_tree(threads, tokens.fork_id)))
    return AnswerVerdict(
        kind=prompt.kind,
        should_fork=prompt.num_forks > 0,
        forked=num_forks > 0,
        same_forks=num_forks == prompt.num_forks,
        same_text=text == prompt.text,
        num_threads=len(threads),
        num_unended=sum(not thread.ended for thread in threads),
        control_mistakes=sum(count_control_mistakes(thread, tokens) for thread in threads),
    )


def check_forks(
    settings: HeldOutSettings, tokenizer: PreTrainedTokenizerFast, decode: DecodeAnswers
) -> ForkReport:
    """Decode the held-out prompts greedily with `decode` and judge every answer."""
    tokens = tree_tokens(tokenizer)
    prompts = held_out_prompts(settings, tokenizer)
    answers = decode([prompt.token_ids for prompt in prompts])
    verdicts = [
        judge(prompt, threads, tokens, tokenizer)
        for prompt, threads in zip(prompts, answers, strict=True)
    ]
    return ForkReport(verdicts)


def report_table(report: ForkReport) -> ReportTable:
    """Return the counts of each kind of prompt."""
    counts = (
        (each.kind, (each.forked, each.same_forks, each.same_text, each.num_threads,
                     each.num_unended, each.control_mistakes))
        for each in report.verdicts
    )  # fmt: skip
    return ReportTable(
        "forks",
        "Forks on held-out prompts (greedy)",
        columns(
            "kind | fork? | asked :d | forked :d | same forks :d | same text :d | threads :d | "
            "cut off :d | stray :d"
        ),
        tuple(
            (kind, "yes" if kind in FORKING_KINDS else "no", number, *sums)
            for kind, number, sums in sums_by_kind(counts)
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check from the command line and return the exit code."""
    options, settings = parse_options(__doc__, checkpoint_path(), arguments)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    model: Any = load_causal_model(options.model, dtype=torch.float32).eval()
    decoder = TransformersThreadDecoder(model, tree_tokens(tokenizer), tokenizer.pad_token_id)
    report = check_forks(settings, tokenizer, decoder)
    console = Console()
    console.print(report_table(report).as_markdown(), markup=False, soft_wrap=True)
    console.print(f"forks where it should: {report.forking_share:.1%}")
    console.print(f"forks where it should not: {report.wrong_fork_share:.1%}")
    failures = report.failures()
    for failure in failures:
        console.print(f"[bold red]failed:[/bold red] {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
