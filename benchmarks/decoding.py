"""Forked and sequential decoding of the same tokens in one engine, and the cost of a fork."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.replay import replay_args
from apar_core.engine.thread_outputs import TextToken
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.restore import restore
from apar_core.tree.threads import thread_scripts
from cluster.cli.terminal import print_table
from cluster.lab.experiments.fork_cost import fork_cost_table, fork_costs
from cluster.lab.experiments.program import Submission

BATCH_SIZES = (1, 32)
MAX_TOKENS = 600


@dataclass(frozen=True)
class ForkedAnswer:
    """Prompt and generated tokens of a forked answer; `threads` maps thread paths to tokens.

    `text` is the restored answer with its end token, as a single thread would generate it.
    """

    prompt_ids: tuple[int, ...]
    threads: Mapping[str, list[int]]
    text: list[int]


@dataclass(frozen=True)
class Measured:
    """Engine steps, wall time and text tokens of all answers.

    `cpu_s` is the CPU time of this process, which runs the engine: on a shared machine it says more
    than the wall time.
    """

    steps: int
    wall_s: float
    cpu_s: float
    text_tokens: int


@dataclass(frozen=True)
class Comparison:
    """Forked and sequential decoding at one batch size, medians over the repeats.

    `wall_ratios` and `cpu_ratios` are those of each repeat, smallest first.
    """

    batch_size: int
    num_answers: int
    forked: Measured
    sequential: Measured
    wall_ratios: tuple[float, ...]
    cpu_ratios: tuple[float, ...]

    @property
    def step_ratio(self) -> float:
        """Sequential steps divided by forked steps."""
        return self.sequential.steps / self.forked.steps

    @property
    def wall_ratio(self) -> float:
        """Sequential time divided by forked time."""
        return self.sequential.wall_s / self.forked.wall_s

    @property
    def cpu_ratio(self) -> float:
        """Sequential CPU time divided by forked CPU time."""
        return self.sequential.cpu_s / self.forked.cpu_s


def answers_to(
    engine: OfflineEngine, questions: Sequence[str], max_tokens: int, number: int
) -> list[ForkedAnswer]:
    """Generate greedy answers to questions; repeat those that fork and end by themselves."""
    prompts = [tuple(engine.chat_prompt(each)["prompt_token_ids"]) for each in questions]
    forked = _forked_of(engine, prompts, max_tokens)
    if not forked:
        raise SystemExit(f"none of {len(prompts)} answers forks within {max_tokens} tokens")
    return list(islice(cycle(forked), number))


def forked_answers(engine: OfflineEngine, number: int) -> list[ForkedAnswer]:
    """Generate greedy answers that fork."""
    examples = Corpus(seed=7, held_out=True).examples(6 * number)
    chats = [
        [turn.as_dict() for turn in example.messages]
        for example in examples
        if example.answer.first_child is not None and not example.raw_prompt
    ]
    prompts = [
        tuple(
            engine.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
        )
        for chat in chats
    ]
    forked = _forked_of(engine, prompts, MAX_TOKENS)
    if len(forked) < number:
        raise SystemExit(
            f"only {len(forked)} of {len(prompts)} answers fork, but {number} are needed"
        )
    return forked[:number]


def _forked_of(
    engine: OfflineEngine, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> list[ForkedAnswer]:
    """Answer prompts; return the answers that fork and end by themselves."""
    answers = engine.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        {"temperature": 0.0, "max_tokens": max_tokens},
    )
    return [
        _forked_answer(engine, prompt, answer.record.trees[0])
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer.finish_reason == "stop" and answer.record and answer.record.statistics.forks
    ]


def compare(
    engine: OfflineEngine, answers: Sequence[ForkedAnswer], *, batch_size: int, repeats: int
) -> Comparison:
    """Generate all answers both ways, in turn within each repeat."""
    forked: list[Measured] = []
    sequential: list[Measured] = []
    for as_threads in (True, False):
        # Warm-up: the first steps of a kind take longer.
        _run(engine, answers[:2], batch_size, as_threads=as_threads)
    for number in track(range(repeats), description=f"batch {batch_size}", transient=True):
        # A minute in which the machine is slow hits both alike.
        for as_threads in (True, False) if number % 2 == 0 else (False, True):
            measured = _run(engine, answers, batch_size, as_threads=as_threads)
            (forked if as_threads else sequential).append(measured)
    pairs = list(zip(forked, sequential, strict=True))
    return Comparison(
        batch_size,
        len(answers),
        _median(forked),
        _median(sequential),
        wall_ratios=tuple(sorted(other.wall_s / one.wall_s for one, other in pairs)),
        cpu_ratios=tuple(sorted(other.cpu_s / one.cpu_s for one, other in pairs)),
    )


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(title="The same answers, forked and sequential (one engine, interleaved)")
    for name in ("batch", "answers", "tokens", "steps", "steps seq.", "fewer steps",
                 "seconds", "seconds seq.", "faster", "from", "to",
                 "less CPU time", "faster / fewer steps"):  # fmt: skip
        table.add_column(name, justify="right")
    for each in comparisons:
        table.add_row(
            str(each.batch_size),
            str(each.num_answers),
            str(each.forked.text_tokens),
            str(each.forked.steps),
            str(each.sequential.steps),
            f"{each.step_ratio:.2f}x",
            f"{each.forked.wall_s:.2f}",
            f"{each.sequential.wall_s:.2f}",
            f"{each.wall_ratio:.2f}x",
            f"{each.wall_ratios[0]:.2f}x",
            f"{each.wall_ratios[-1]:.2f}x",
            f"{each.cpu_ratio:.2f}x",
            f"{each.wall_ratio / each.step_ratio:.2f}",
        )
    return table


def run(
    engine: OfflineEngine,
    console: Console,
    *,
    repeats: int,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    questions: Sequence[str] = (),
    max_tokens: int = MAX_TOKENS,
) -> dict[str, Any]:
    """Print the comparison at each batch size, and the cost of a fork; return plain values.

    Answers are those to the questions, by default to the embedded model's own.
    """
    number = max(batch_sizes)
    answers = (
        answers_to(engine, questions, max_tokens, number)
        if questions
        else forked_answers(engine, number)
    )
    comparisons: list[Comparison] = []
    for size in batch_sizes:
        # Batch size 1 takes long, so use fewer answers.
        asked = answers[: 12 if size == 1 else max(size, max(BATCH_SIZES))]
        comparisons.append(compare(engine, asked, batch_size=size, repeats=repeats))
        console.print(comparison_table(comparisons[-1:]))
    return {
        "decoding": [
            {
                **asdict(each),
                "step_ratio": each.step_ratio,
                "wall_ratio": each.wall_ratio,
                "cpu_ratio": each.cpu_ratio,
            }
            for each in comparisons
        ],
        "fork_cost": _fork_cost(engine, console, answers),
    }


def _fork_cost(
    engine: OfflineEngine, console: Console, answers: Sequence[ForkedAnswer]
) -> dict[str, Any]:
    """Print tokens computed and blocks copied per fork (`apar experiment fork-cost` has traces)."""
    prompts, sampling = replays(answers, as_threads=True)
    submissions = [
        Submission("answer", prompt["prompt_token_ids"], arguments)
        for prompt, arguments in zip(prompts, sampling, strict=True)
    ]
    costs = fork_costs(engine, submissions)
    print_table(fork_cost_table(costs, engine.scheduler.block_size))
    return {way: asdict(counters) for way, counters in costs.items()}


@contextmanager
def counted_steps(engine: OfflineEngine) -> Iterator[list[int]]:
    """Count the forward passes of an engine within the context."""
    scheduler, steps = engine.scheduler, [0]
    original = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        steps[0] += output.total_num_scheduled_tokens > 0
        return output

    scheduler.schedule = schedule
    try:
        yield steps
    finally:
        scheduler.schedule = original


def replays(
    answers: Sequence[ForkedAnswer], *, as_threads: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return prompts and sampling arguments that make an engine generate the answers."""
    prompts = [{"prompt_token_ids": list(answer.prompt_ids)} for answer in answers]
    sampling = [
        {
            "temperature": 0.0,
            "max_tokens": MAX_TOKENS,
            "extra_args": {
                **replay_args(answer.threads if as_threads else {"": answer.text}),
                "apar_enabled": as_threads,
            },
        }
        for answer in answers
    ]
    return prompts, sampling


def _run(
    engine: OfflineEngine, answers: Sequence[ForkedAnswer], batch_size: int, *, as_threads: bool
) -> Measured:
    prompts, sampling = replays(answers, as_threads=as_threads)
    engine.scheduler.reset_prefix_cache()
    text_tokens = 0
    with counted_steps(engine) as steps:
        start, start_cpu = time.perf_counter(), time.process_time()
        for first in range(0, len(prompts), batch_size):
            last = first + batch_size
            for answer, given in zip(
                engine.generate(prompts[first:last], sampling[first:last]),
                answers[first:last],
                strict=True,
            ):
                # The tokens of an unforked answer include its end token.
                generated = [t for t in answer.token_ids if t != given.text[-1]]
                if generated != given.text[:-1]:
                    raise RuntimeError(f"{answer.text!r} is not the requested answer")
                text_tokens += len(generated)
        wall_s = time.perf_counter() - start
        cpu_s = time.process_time() - start_cpu
    return Measured(steps[0], wall_s, cpu_s, text_tokens)


def _median(measured: Sequence[Measured]) -> Measured:
    return Measured(
        steps=measured[0].steps,
        wall_s=statistics.median(each.wall_s for each in measured),
        cpu_s=statistics.median(each.cpu_s for each in measured),
        text_tokens=measured[0].text_tokens,
    )


def _forked_answer(
    engine: OfflineEngine, prompt_ids: tuple[int, ...], tree: ParagraphTree[TextToken]
) -> ForkedAnswer:
    control = engine.control_tokens
    if control is None:
        raise SystemExit("the checkpoint has no control tokens, so there is nothing to compare")
    fork = TextToken(control.fork_id, None)
    end = TextToken(engine.tokenizer.eos_token_id, None)
    threads = {
        key: [token.token_id for token in generated]
        for key, generated in thread_scripts(tree, fork, end).items()
    }
    text_ids = [token.token_id for token in restore(tree)]
    return ForkedAnswer(prompt_ids, threads, [*text_ids, end.token_id])
