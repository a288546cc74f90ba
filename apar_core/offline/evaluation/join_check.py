"""Check on held-out prompts that a model writes well-formed answers that join.

`python -m apar_core.offline.evaluation.join_check` prints a table and exits with 1 if a bound is
missed. It decodes with plain transformers as ThreadWeaver's own client does: each thread and each
continuation is a new request whose prompt is its whole context.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
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
from apar_core.offline.evaluation.fork_check import (
    HeldOutSettings,
    greedy_texts,
    parse_options,
    sums_by_kind,
)
from apar_core.offline.evaluation.layout import columns
from apar_core.offline.training.example_encoder import prompt_token_ids
from apar_core.reporting import ReportTable

# A block as ThreadWeaver's own check wants it, with the line breaks of its data.
_BLOCK = re.compile(
    r"<Parallel>\n<Outlines>\n(?P<outlines>(?:<Outline>\d+: [^<\n]+</Outline>\n)+)</Outlines>\n"
    r"(?P<threads>(?:<Thread>\n\d+: [^<]+\n</Thread>)+)\n"
    r"(?:<Conclusion>\n[^<]+\n</Conclusion>\n)?</Parallel>"
)
_NUMBER = re.compile(r"(?:<Outline>|<Thread>\n)(\d+):")


# Bounds: well-formed answers, and those with the corpus's blocks and threads, of all answers.
_MIN_WELL_FORMED_SHARE = 0.95
_MIN_SAME_THREADS_SHARE = 0.9


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
        for owner, context in zip(owners, contexts, strict=True):
            owner.prompts.append(context)
        return greedy_texts(
            self.model,
            contexts,
            ends=[self.tokenizer.eos_token_id, self._id(stop)],
            pad_id=self.tokenizer.pad_token_id,
            max_tokens=self.max_tokens,
            batch_size=self.batch_size,
        )

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
    settings: HeldOutSettings, client: ResubmittingClient
) -> tuple[list[JoinVerdict], list[ClientAnswer]]:
    """Answer held-out prompts and judge every answer."""
    examples = settings.examples()
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
    counts = (
        (each.kind, (bool(each.found), each.well_formed, each.found == each.expected,
                     each.same_text, sum(each.found or ())))
        for each in verdicts
    )  # fmt: skip
    return ReportTable(
        "joins",
        "Joins on held-out prompts (greedy)",
        columns(
            "kind | asked :d | with blocks :d | well-formed :d | same threads :d | same text :d | "
            "threads :d"
        ),
        tuple((kind, number, *sums) for kind, number, sums in sums_by_kind(counts)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check from the command line and return the exit code."""
    shown = "number of answers to print"
    options, settings = parse_options(__doc__, checkpoint_path(), arguments, show=shown)
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
    failed = well_formed < _MIN_WELL_FORMED_SHARE or same_threads < _MIN_SAME_THREADS_SHARE
    if failed:
        console.print("[bold red]failed[/bold red]")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
