"""Check on held-out prompts that a model writes well-formed answers that join.

`python -m apar_core.offline.evaluation.join_check` prints a table and exits with 1 if a bound is
missed. It decodes with plain transformers as ThreadWeaver's own client does: each thread and each
continuation is a new request whose prompt is its whole context.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from apar_core.models.apar_tiny_threadweaver import checkpoint_path
from apar_core.offline.data.joined import (
    AFTER_THREADS,
    FORMAT,
    MARKERS,
    THREAD_END,
    joined_answer,
    outline_numbers,
    thread_header,
)
from apar_core.offline.data.tiny_corpus.combinations import KINDS
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.training.example_encoder import prompt_token_ids
from apar_core.reporting import Column, ReportTable

# A block as ThreadWeaver's own check wants it, with the line breaks of its data.
_BLOCK = re.compile(
    r"<Parallel>\n<Outlines>\n(?P<outlines>(?:<Outline>\d+: [^<\n]+</Outline>\n)+)</Outlines>\n"
    r"(?P<threads>(?:<Thread>\n\d+: [^<]+\n</Thread>)+)\n"
    r"(?:<Conclusion>\n[^<]+\n</Conclusion>\n)?</Parallel>"
)
_NUMBER = re.compile(r"(?:<Outline>|<Thread>\n)(\d+):")


class JoinCheckSettings(BaseModel):
    """Size and bounds of the check."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_prompts: PositiveInt = 400
    seed: NonNegativeInt = Field(0, description="Training seed, which determines the split.")
    stream: str = Field("", description="Name of the sample of held-out prompts.")
    min_well_formed_share: float = Field(
        0.95, description="Minimum share of well-formed answers, of all answers."
    )
    min_same_threads_share: float = Field(
        0.9, description="Minimum share of answers with the corpus's blocks and threads."
    )


@dataclass
class ClientAnswer:
    """Answer that a client assembles: prompt and text as tokens, and the requests it took.

    `prompts` has the prompt of each request in the order of submission. `ended`: the parent ended
    by itself, and so did all threads.
    """

    prompt_ids: list[int]
    text_ids: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    ended: bool = True

    @property
    def context(self) -> list[int]:
        """The text that the parent reads."""
        return [*self.prompt_ids, *self.text_ids]


@dataclass(frozen=True, slots=True)
class ResubmittingClient:
    """Greedy client of a plain model: at each outline, one request per thread, then the rest.

    `model` needs the `generate` of transformers. A thread or a parent's part gets at most
    `max_tokens` tokens, and an answer at most `max_blocks` blocks.
    """

    model: Any
    tokenizer: PreTrainedTokenizerFast
    max_tokens: int = 384
    max_blocks: int = 8
    batch_size: int = 48

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[ClientAnswer]:
        """Return the answers to prompts of token ids."""
        answers = [ClientAnswer(list(prompt)) for prompt in prompts]
        running = answers
        for _ in range(self.max_blocks + 1):
            parts = self._generate(running, [answer.context for answer in running], FORMAT.trigger)
            waiting = []
            for answer, part in zip(running, parts, strict=True):
                answer.text_ids += part
                numbers = outline_numbers(str(self.tokenizer.decode(part)))
                if part[-1:] == [self._id(FORMAT.trigger)] and numbers:
                    waiting.append((answer, numbers))
                else:
                    answer.ended &= part[-1:] == [self.tokenizer.eos_token_id]
            running = self._join(waiting)
            if not running:
                break
        for answer in running:
            answer.ended = False
        return answers

    def _join(self, waiting: Sequence[tuple[ClientAnswer, list[str]]]) -> list[ClientAnswer]:
        """Generate the threads of each answer's block; return the answers that continue."""
        threads = [(answer, number) for answer, numbers in waiting for number in numbers]
        contexts = [
            [*answer.context, *self._encode(thread_header(number, first=True))]
            for answer, number in threads
        ]
        texts = iter(self._generate([answer for answer, _ in threads], contexts, THREAD_END))
        for answer, numbers in waiting:
            for index, number in enumerate(numbers):
                text = next(texts)
                if text[-1:] != [self._id(THREAD_END)]:
                    # As in ThreadWeaver's client, the thread is closed, and the answer ends here.
                    answer.ended = False
                    end_id = self.tokenizer.eos_token_id
                    text = [*(i for i in text if i != end_id), self._id(THREAD_END)]
                answer.text_ids += [*self._encode(thread_header(number, first=index == 0)), *text]
            if answer.ended:
                answer.text_ids += self._encode(AFTER_THREADS)
        return [answer for answer, _ in waiting if answer.ended]

    def _generate(
        self, owners: Sequence[ClientAnswer], contexts: Sequence[list[int]], stop: str
    ) -> list[list[int]]:
        """Return what follows each context, up to and with the stop or the end token."""
        texts: list[list[int]] = [[] for _ in contexts]
        # Rows of similar length need little padding.
        order = sorted(range(len(contexts)), key=lambda index: len(contexts[index]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            rows = self._generate_batch([contexts[index] for index in batch], stop)
            for index, row in zip(batch, rows, strict=True):
                texts[index] = row
        for owner, context in zip(owners, contexts, strict=True):
            owner.prompts.append(context)
        return texts

    def _generate_batch(self, contexts: Sequence[list[int]], stop: str) -> list[list[int]]:
        width = max(map(len, contexts))
        pad_id, ends = self.tokenizer.pad_token_id, {self.tokenizer.eos_token_id, self._id(stop)}
        padding = [[pad_id] * (width - len(context)) for context in contexts]
        token_ids = [before + context for before, context in zip(padding, contexts, strict=True)]
        with torch.inference_mode():
            rows = self.model.generate(
                torch.tensor(token_ids),
                attention_mask=torch.tensor(
                    [
                        [0] * len(before) + [1] * len(context)
                        for before, context in zip(padding, contexts, strict=True)
                    ]
                ),
                max_new_tokens=self.max_tokens,
                do_sample=False,
                eos_token_id=sorted(ends),
                pad_token_id=pad_id,
            )
        sampled = rows[:, width:].tolist()
        lengths = [
            next((i + 1 for i, t in enumerate(row) if t in ends), len(row)) for row in sampled
        ]
        return [row[:length] for row, length in zip(sampled, lengths, strict=True)]

    def _id(self, marker: str) -> int:
        return int(self.tokenizer.get_vocab()[marker])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def block_sizes(text: str) -> list[int] | None:
    """Return the number of threads of each block of a text; None if it is not well-formed.

    In a well-formed text all markers belong to blocks, and the outlines and the threads of a block
    are numbered from 1.
    """
    sizes = []
    for block in _BLOCK.finditer(text):
        outlines = _NUMBER.findall(block["outlines"])
        threads = _NUMBER.findall(block["threads"])
        if outlines != threads or outlines != [str(i + 1) for i in range(len(outlines))]:
            return None
        sizes.append(len(threads))
    rest = _BLOCK.sub("", text)
    return None if any(marker in rest for marker in MARKERS) else sizes


@dataclass(frozen=True, slots=True)
class JoinVerdict:
    """Verdict on one answer; `expected` and `found` are threads per block."""

    kind: str
    expected: tuple[int, ...]
    found: tuple[int, ...] | None
    ended: bool
    same_text: bool

    @property
    def well_formed(self) -> bool:
        """Whether the answer ended by itself and its blocks are complete."""
        return self.ended and self.found is not None


def check_joins(
    settings: JoinCheckSettings, client: ResubmittingClient
) -> tuple[list[JoinVerdict], list[ClientAnswer]]:
    """Answer held-out prompts and judge every answer."""
    corpus = Corpus(settings.seed, held_out=True, stream=settings.stream)
    examples = list(corpus.examples(settings.num_prompts))
    tokenizer = client.tokenizer
    answers = client([prompt_token_ids(example, tokenizer) for example in examples])
    verdicts = []
    for example, answer in zip(examples, answers, strict=True):
        expected = joined_answer(example.answer)
        text = str(tokenizer.decode([i for i in answer.text_ids if i != tokenizer.eos_token_id]))
        found = block_sizes(text)
        verdicts.append(
            JoinVerdict(
                kind=example.kind,
                expected=tuple(map(len, expected.blocks)),
                found=None if found is None else tuple(found),
                ended=answer.ended,
                same_text=text == expected.text,
            )
        )
    return verdicts, answers


def report_table(verdicts: Sequence[JoinVerdict]) -> ReportTable:
    """Return the counts of each kind of prompt."""
    columns = ("asked", "with blocks", "well-formed", "same threads", "same text", "threads")
    rows = []
    for kind in KINDS:
        of_kind = [verdict for verdict in verdicts if verdict.kind == kind]
        if of_kind:
            rows.append(
                (
                    kind,
                    len(of_kind),
                    sum(bool(verdict.found) for verdict in of_kind),
                    sum(verdict.well_formed for verdict in of_kind),
                    sum(verdict.found == verdict.expected for verdict in of_kind),
                    sum(verdict.same_text for verdict in of_kind),
                    sum(sum(verdict.found or ()) for verdict in of_kind),
                )
            )
    return ReportTable(
        "joins",
        "Joins on held-out prompts (greedy)",
        (Column("kind"), *(Column(title, "d") for title in columns)),
        tuple(rows),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check from the command line and return the exit code."""
    defaults = JoinCheckSettings()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=checkpoint_path(), help="checkpoint folder")
    parser.add_argument("--prompts", type=int, default=defaults.num_prompts, help="sample size")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="training seed")
    parser.add_argument(
        "--stream", default="", help="name of the sample; each name gives a different one"
    )
    parser.add_argument("--show", type=int, default=0, help="number of answers to print")
    options = parser.parse_args(arguments)
    settings = JoinCheckSettings(
        num_prompts=options.prompts, seed=options.seed, stream=options.stream
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    verdicts, answers = check_joins(settings, ResubmittingClient(model, tokenizer))
    console = Console()
    for answer in answers[: options.show]:
        console.print(tokenizer.decode(answer.context), markup=False, soft_wrap=True)
    console.print(report_table(verdicts).as_markdown(), markup=False, soft_wrap=True)
    number = len(verdicts)
    well_formed = sum(verdict.well_formed for verdict in verdicts) / number
    same_threads = sum(verdict.found == verdict.expected for verdict in verdicts) / number
    console.print(f"well-formed and ended: {well_formed:.1%}")
    console.print(f"the corpus's blocks and threads: {same_threads:.1%}")
    failed = (
        well_formed < settings.min_well_formed_share
        or same_threads < settings.min_same_threads_share
    )
    if failed:
        console.print("[bold red]failed[/bold red]")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
