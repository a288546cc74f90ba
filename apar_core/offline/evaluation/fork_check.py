"""Checks on held-out prompts that the embedded model forks where it should and nowhere else.

`python -m apar_core.offline.evaluation.fork_check` prints a table. It exits with 1 if a bound is
missed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from apar_core.formats.control_tokens import TreeTokens
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import count_forks, flat_text
from apar_core.offline.data.tiny_corpus.combinations import FORKING_KINDS, KINDS
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.decoders.decoded_answer import DecodedThread, restored_ids
from apar_core.offline.evaluation.thread_decoding import DecodeAnswers, TransformersThreadDecoder
from apar_core.offline.training.example_encoder import prompt_token_ids
from apar_core.offline.training.vocabulary import tree_tokens

_COLUMNS = (
    "fork?",
    "asked",
    "forked",
    "same forks",
    "same text",
    "threads",
    "cut off",
    "stray",
)


class ForkCheckSettings(BaseModel):
    """Size and bounds of the check."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_prompts: PositiveInt = 400
    seed: NonNegativeInt = Field(0, description="The training seed, whose split is held out.")
    stream: str = Field("", description="Names the sample that is drawn of the held-out prompts.")
    min_forking_share: float = Field(0.95, description="Of the prompts whose answer should fork.")
    max_wrong_fork_share: float = Field(0.01, description="Of the prompts whose answer must not.")


@dataclass(frozen=True, slots=True)
class CheckPrompt:
    """A held-out prompt and what is expected of its answer."""

    kind: str
    token_ids: list[int]
    num_forks: int
    text: str


@dataclass(frozen=True, slots=True)
class AnswerVerdict:
    """What was seen in one answer.

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
    """The verdicts on all prompts."""

    verdicts: list[AnswerVerdict]

    @property
    def forking_share(self) -> float:
        """Share of the answers that should fork and did."""
        wanted = [verdict for verdict in self.verdicts if verdict.should_fork]
        return sum(verdict.forked for verdict in wanted) / max(1, len(wanted))

    @property
    def wrong_fork_share(self) -> float:
        """Share of the answers that should not fork and did."""
        plain = [verdict for verdict in self.verdicts if not verdict.should_fork]
        return sum(verdict.forked for verdict in plain) / max(1, len(plain))

    def failures(self, settings: ForkCheckSettings) -> list[str]:
        """Return one sentence for each bound that is missed."""
        unended = sum(verdict.num_unended for verdict in self.verdicts)
        mistakes = sum(verdict.control_mistakes for verdict in self.verdicts)
        found = []
        if self.forking_share < settings.min_forking_share:
            found.append(f"forks where it should on only {self.forking_share:.1%}")
        if self.wrong_fork_share > settings.max_wrong_fork_share:
            found.append(f"forks where it should not on {self.wrong_fork_share:.1%}")
        if unended:
            found.append(f"{unended} threads did not end by themselves")
        if mistakes:
            found.append(f"{mistakes} control tokens stand where none may stand")
        return found


def held_out_prompts(
    settings: ForkCheckSettings, tokenizer: PreTrainedTokenizerFast
) -> list[CheckPrompt]:
    """Return prompts of combinations that training with the same seed did not see."""
    corpus = Corpus(settings.seed, held_out=True, stream=settings.stream)
    return [
        CheckPrompt(
            example.kind,
            prompt_token_ids(example, tokenizer),
            count_forks(example.answer),
            flat_text(example.answer),
        )
        for example in corpus.examples(settings.num_prompts)
    ]


def count_control_mistakes(thread: DecodedThread, tokens: TreeTokens) -> int:
    """Return how many control tokens the thread sampled where none may stand."""
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
    """Compare the threads of one answer with what its prompt asks for."""
    num_forks = sum(thread.token_ids.count(tokens.fork_id) for thread in threads)
    text = tokenizer.decode(restored_ids(threads, tokens.fork_id))
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
    settings: ForkCheckSettings, tokenizer: PreTrainedTokenizerFast, decode: DecodeAnswers
) -> ForkReport:
    """Decode the held-out prompts with `decode` (greedy) and judge every answer."""
    tokens = tree_tokens(tokenizer)
    prompts = held_out_prompts(settings, tokenizer)
    answers = decode([prompt.token_ids for prompt in prompts])
    verdicts = [
        judge(prompt, threads, tokens, tokenizer)
        for prompt, threads in zip(prompts, answers, strict=True)
    ]
    return ForkReport(verdicts)


def report_table(report: ForkReport) -> Table:
    """Return the counts of each kind as a table."""
    table = Table(title="Forks on held-out prompts (greedy)", box=box.SIMPLE, padding=0)
    table.add_column("kind", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    present = Counter(verdict.kind for verdict in report.verdicts)
    for kind in (kind for kind in KINDS if present[kind]):
        rows = [verdict for verdict in report.verdicts if verdict.kind == kind]
        table.add_row(
            kind,
            "yes" if kind in FORKING_KINDS else "no",
            str(len(rows)),
            str(sum(row.forked for row in rows)),
            str(sum(row.same_forks for row in rows)),
            str(sum(row.same_text for row in rows)),
            str(sum(row.num_threads for row in rows)),
            str(sum(row.num_unended for row in rows)),
            str(sum(row.control_mistakes for row in rows)),
        )
    return table


def load_decoder(folder: Path) -> tuple[PreTrainedTokenizerFast, TransformersThreadDecoder]:
    """Return the tokenizer and a float32 decoder of a checkpoint."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = TransformersThreadDecoder(model, tree_tokens(tokenizer), tokenizer.pad_token_id)
    return tokenizer, decoder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check from the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=checkpoint_path())
    parser.add_argument("--prompts", type=int, default=ForkCheckSettings().num_prompts)
    parser.add_argument("--seed", type=int, default=ForkCheckSettings().seed)
    parser.add_argument("--stream", default="", help="another name draws another sample")
    options = parser.parse_args(arguments)
    settings = ForkCheckSettings(
        num_prompts=options.prompts, seed=options.seed, stream=options.stream
    )
    tokenizer, decoder = load_decoder(options.model)
    report = check_forks(settings, tokenizer, decoder)
    console = Console()
    console.print(report_table(report))
    console.print(f"forks where it should: {report.forking_share:.1%}")
    console.print(f"forks where it should not: {report.wrong_fork_share:.1%}")
    failures = report.failures(settings)
    for failure in failures:
        console.print(f"[bold red]failed:[/bold red] {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
