"""Answers whose threads join, written in three ways: by the engine, by a client, in sequence.

The engine: one request; the engine opens the threads, and the parent continues after their texts.
The client: ThreadWeaver's own (arXiv 2512.07843, `branching_generate`), on an unmodified engine
with prefix caching. Each thread and each continuation is a new request, which reaches the engine
one round trip after the requests that it waits for have ended. In sequence: the same text as one
request; `plain` is the recorded answer without outlines and markers, which a model that was never
trained to write threads would give.

Answers are replayed in virtual time, and every method must generate its text token by token.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from apar_core.errors import EvaluationError
from apar_core.offline.data.joined import (
    FORMAT,
    MARKERS,
    THREAD_END,
    JoinedBlock,
    JoinedTokens,
    joined_answer,
    joined_tokens,
)
from apar_core.offline.data.records import ChatMessage, ParagraphRecord, flat_text
from apar_core.offline.data.structure import extract_tree
from apar_core.reporting import Column, Report, ReportTable
from cluster.lab.experiments.parts import PartStore, StartStage
from cluster.lab.experiments.program import Program, Submission, replay_sampling
from cluster.lab.experiments.settings import file_digest
from cluster.loadtest.trace import read_trace

if TYPE_CHECKING:
    from cluster.lab.experiments.driver import Drive
    from cluster.lab.experiments.engine import ExperimentEngine

ENGINE, CLIENT, SEQUENTIAL, PLAIN = "engine", "client", "sequential", "plain"

# Figures of a run settle with so many answers for each request under way.
_ANSWERS_PER_CLIENT = 4
_LEAST_ANSWERS = 32
# Texts whose tokens the engine reads or writes itself; all others only have to be counted.
_STRUCTURE = re.compile(
    "(" + "|".join(map(re.escape, MARKERS)) + r"|(?<=<Outline>)\d+:|(?<=<Thread>\n)\d+:|\n)"
)


class JoinSettings(BaseModel):
    """Load and device of `apar experiment joins`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: Path | None = Field(
        None, description="Recorded answers; absent, those of the embedded model's corpus."
    )
    model: str = "llama-7b"
    gpu: str = "a100-80gb"
    concurrencies: tuple[PositiveInt, ...] = (1, 8, 32, 128)
    round_trips_s: tuple[NonNegativeFloat, ...] = (0.0, 0.01)
    answers: PositiveInt = Field(512, description="Most answers of a run.")
    max_tokens: PositiveInt = 2048
    kv_share: PositiveFloat = Field(0.9, le=1)
    block_size: PositiveInt = 16
    seed: int = 0

    def as_text(self) -> dict[str, str]:
        """Return what all runs of a folder share."""
        points = {"concurrencies", "round_trips_s"}
        values = {k: str(v) for k, v in self.model_dump(mode="json", exclude=points).items()}
        return values | {
            "trace_sha256": "corpus" if self.trace is None else file_digest(self.trace)
        }


@dataclass(frozen=True, slots=True)
class JoinedQuestion:
    """A recorded answer as tokens.

    engine: its joined text with the markers of the engine's format. client: the same with an
    ordinary token for each marker, since this engine treats the markers of any request as its own.
    plain: the recorded answer. All end with the end token.
    """

    answer_id: str
    category: str
    prompt_ids: list[int]
    engine: JoinedTokens
    client: JoinedTokens
    plain: list[int]

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence of any method."""
        return len(self.prompt_ids) + max(len(self.client.flat), len(self.plain))

    @property
    def critical_tokens(self) -> int:
        """Tokens that are generated one after another if the threads of a block run at once."""
        longest = sum(max(map(len, block.texts)) for block in self.client.blocks)
        return sum(map(len, self.client.parent)) + longest


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer as the driver checks it; all methods count the tokens of the recorded text."""

    answer_id: str
    category: str
    flat: list[int]
    text_tokens: int


def _answer(question: JoinedQuestion, flat: list[int]) -> _Answer:
    return _Answer(question.answer_id, question.category, flat, len(question.plain) - 1)


class OneSequence:
    """An answer as one request without threads."""

    def __init__(self, question: JoinedQuestion, flat: list[int]) -> None:
        self.answer = _answer(question, flat)
        self._prompt_ids = question.prompt_ids
        self._given: list[int] = []

    def start(self) -> list[Submission]:
        """Return the only request."""
        return [_scripted("answer", self._prompt_ids, self.answer.flat)]

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """Keep the tokens."""
        self._given.extend(token_ids)
        return []

    def on_end(self, name: str) -> list[Submission]:
        """Return nothing: the answer is complete."""
        return []

    def text_ids(self) -> list[int]:
        """Return what was generated."""
        return self._given


class ResubmittingClient:
    """An answer as ThreadWeaver's client asks for it.

    Each thread of a block is a request after context and seed. When all have ended, the parent
    continues with a request after context and joined text. `round_trip_s` passes between the end
    of a request and the start of the next.
    """

    def __init__(self, question: JoinedQuestion, round_trip_s: float) -> None:
        self.answer = _answer(question, question.client.flat)
        self._tokens = question.client
        self._round_trip_s = round_trip_s
        self._context = list(question.prompt_ids)
        self._given: dict[str, list[int]] = {}
        self._text: list[int] = []
        self._block = 0
        self._running: set[str] = set()

    def start(self) -> list[Submission]:
        """Return the parent's first request."""
        return [self._parent(0.0)]

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """Keep the tokens."""
        self._given[name].extend(token_ids)
        return []

    def on_end(self, name: str) -> list[Submission]:
        """Return the threads after an outline, or the continuation after the last thread."""
        if name not in self._running:
            return self._threads(self._given[name])
        self._running.discard(name)
        if self._running:
            return []
        block = self._tokens.blocks[self._block]
        texts = tuple(self._given[f"{self._block}.{index}"] for index in range(len(block.texts)))
        joined = JoinedBlock(block.seeds, texts, block.rest).joined
        self._text += joined
        self._context += joined
        self._block += 1
        return [self._parent(self._round_trip_s)]

    def _threads(self, written: list[int]) -> list[Submission]:
        self._text += written
        self._context += written
        if self._block == len(self._tokens.blocks):
            return []
        block = self._tokens.blocks[self._block]
        submissions = [
            self._submit(
                f"{self._block}.{index}", [*self._context, *seed], text, self._round_trip_s
            )
            for index, (seed, text) in enumerate(zip(block.seeds, block.texts, strict=True))
        ]
        self._running = {each.name for each in submissions}
        return submissions

    def _parent(self, delay_s: float) -> Submission:
        name = f"parent.{self._block}"
        return self._submit(name, self._context, self._tokens.parent[self._block], delay_s)

    def text_ids(self) -> list[int]:
        """Return the joined text."""
        return self._text

    def _submit(
        self, name: str, prompt_ids: list[int], script: list[int], delay_s: float
    ) -> Submission:
        self._given[name] = []
        return _scripted(name, prompt_ids, script, delay_s)


class EngineJoins:
    """An answer as one request, whose threads the engine opens and joins."""

    def __init__(self, question: JoinedQuestion, _: float) -> None:
        self.answer = _answer(question, question.engine.flat)
        self._question = question
        self._given: list[int] = []

    def start(self) -> list[Submission]:
        """Return the only request, with what each thread generates."""
        tokens = self._question.engine
        scripts = {"": [token for part in tokens.parent for token in part]}
        # Threads are numbered through all blocks.
        for text in (text for block in tokens.blocks for text in block.texts):
            scripts[str(len(scripts) - 1)] = text
        sampling = replay_sampling(scripts, max_tokens=len(tokens.flat) + 1)
        sampling["extra_args"]["apar_enabled"] = True
        return [Submission("answer", self._question.prompt_ids, sampling)]

    def on_tokens(self, name: str, token_ids: Sequence[int]) -> list[Submission]:
        """Keep the tokens."""
        self._given.extend(token_ids)
        return []

    def on_end(self, name: str) -> list[Submission]:
        """Return nothing: the answer is complete."""
        return []

    def text_ids(self) -> list[int]:
        """Return the joined text and its end token."""
        end_id = self.answer.flat[-1]
        return [token_id for token_id in self._given if token_id != end_id] + [end_id]


def _scripted(
    name: str, prompt_ids: Sequence[int], script: Sequence[int], delay_s: float = 0.0
) -> Submission:
    # Ends at its last token and not by its length, which asynchronous scheduling would foresee.
    sampling = replay_sampling({"": script}, max_tokens=len(script) + 1)
    sampling["stop_token_ids"] = [script[-1]]
    sampling["extra_args"]["apar_enabled"] = False
    return Submission(name, list(prompt_ids), sampling, delay_s)


# ---- questions ---------------------------------------------------------------------------------


class MarkedText:
    """Encodes joined texts: structure as the engine's tokenizer does, all else counted as Llama's.

    `marker_ids` are the tokens of the markers.
    """

    def __init__(
        self,
        encode_structure: Callable[[str], list[int]],
        encode_text: Callable[[str], list[int]],
        marker_ids: Mapping[str, int],
    ) -> None:
        self._encode_structure = encode_structure
        self._encode_text = encode_text
        self._marker_ids = marker_ids

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        token_ids: list[int] = []
        for number, piece in enumerate(_STRUCTURE.split(text)):
            if piece in self._marker_ids:
                token_ids.append(self._marker_ids[piece])
            elif piece:
                token_ids += (self._encode_structure if number % 2 else self._encode_text)(piece)
        return token_ids


def load_joined_questions(settings: JoinSettings, tokenizer: Any) -> list[JoinedQuestion]:
    """Return the answers with at least one block, in a random order.

    `tokenizer` is that of the virtual engine. Raises EvaluationError if no answer has a block.
    """
    # Imports transformers, which takes seconds.
    from apar_core.offline.training.train_tiny import ROLES
    from cluster.lab.virtual.text import TEXT_IDS, virtual_text

    text = virtual_text()
    vocabulary = tokenizer.get_vocab()

    def structure(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False)["input_ids"])

    engine = MarkedText(structure, text.encode, {marker: vocabulary[marker] for marker in MARKERS})
    # Their ends stop a request, so no text may have them.
    unused = tokenizer.convert_tokens_to_ids(list(ROLES))
    client = MarkedText(
        structure,
        text.encode,
        {marker: TEXT_IDS[-1] for marker in MARKERS}
        | {FORMAT.trigger: unused[0], THREAD_END: unused[1]},
    )
    end_id = text.tokens.end_id
    questions = []
    for answer_id, category, messages, record in _recorded(settings):
        answer = joined_answer(record)
        if answer.blocks:
            question = JoinedQuestion(
                answer_id,
                category,
                text.encode_chat(messages),
                _ended(joined_tokens(answer, engine), end_id),
                _ended(joined_tokens(answer, client), end_id),
                [*text.encode(flat_text(record)), end_id],
            )
            if question.longest_tokens <= settings.max_tokens:
                questions.append(question)
    if not questions:
        raise EvaluationError(
            f"no recorded answer of at most {settings.max_tokens} tokens has two or more threads"
        )
    random.Random(settings.seed).shuffle(questions)
    return questions[: settings.answers]


Recorded = tuple[str, str, Sequence[ChatMessage], ParagraphRecord]


def _recorded(settings: JoinSettings) -> Iterator[Recorded]:
    if settings.trace is not None:
        for line in read_trace(settings.trace):
            yield line.id, line.category, line.messages, extract_tree(line.response).tree
        return
    from apar_core.offline.data.tiny_corpus.combinations import FORKING_KINDS
    from apar_core.offline.data.tiny_corpus.generator import Corpus

    kinds = tuple((kind, 1) for kind in FORKING_KINDS)
    examples = Corpus(settings.seed, kind_weights=kinds).examples(settings.answers)
    for number, example in enumerate(examples):
        yield str(number), example.kind, example.messages, example.answer


def _ended(tokens: JoinedTokens, end_id: int) -> JoinedTokens:
    *before, last = tokens.parent
    return JoinedTokens((*before, [*last, end_id]), tokens.blocks)


# ---- runs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinRun:
    """Figures of one run.

    text_tokens: tokens of the recorded answers, without outlines and markers.
    computed_tokens: tokens that went through the model, prompts included.
    requests: engine requests and threads.
    latency_s: mean time from a question to its answer. latency_p90_s: its 90th percentile.
    """

    method: str
    concurrency: int
    round_trip_s: float
    answers: int
    text_tokens: int
    duration_s: float
    latency_s: float
    latency_p90_s: float
    computed_tokens: int
    requests: int
    steps: int
    rows: int
    preemptions: int
    peak_kv_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Throughput in text tokens."""
        return self.text_tokens / self.duration_s


MakeProgram = Callable[[JoinedQuestion, float], Program]
METHODS: Mapping[str, MakeProgram] = {
    SEQUENTIAL: lambda question, _: OneSequence(question, question.client.flat),
    PLAIN: lambda question, _: OneSequence(question, question.plain),
    CLIENT: ResubmittingClient,
    ENGINE: EngineJoins,
}


def num_answers(concurrency: int, available: int) -> int:
    """Return the answers of a run; few requests at once would take long with all of them."""
    return min(available, max(_LEAST_ANSWERS, _ANSWERS_PER_CLIENT * concurrency))


def join_run(
    engine: ExperimentEngine,
    questions: Sequence[JoinedQuestion],
    method: str,
    concurrency: int,
    round_trip_s: float,
) -> JoinRun:
    """Answer the questions with `concurrency` of them under way, each followed by the next."""
    from cluster.lab.experiments.driver import RunPlan, drive
    from cluster.lab.experiments.engine import Conditions

    chosen = questions[: num_answers(concurrency, len(questions))]
    plan = RunPlan(
        conditions=Conditions(),
        make=lambda index: METHODS[method](chosen[index], round_trip_s),
        num_questions=len(chosen),
        clients=concurrency,
        is_closed_loop=True,
        has_fillers=False,
    )
    return _figures(drive(engine, plan, sample_s=1e9), method, concurrency, round_trip_s)


def _figures(found: Drive, method: str, concurrency: int, round_trip_s: float) -> JoinRun:
    latencies = sorted(each.latency_s for each in found.served)
    return JoinRun(
        method=method,
        concurrency=concurrency,
        round_trip_s=round_trip_s,
        answers=len(found.served),
        text_tokens=sum(each.text_tokens for each in found.served),
        duration_s=found.duration_s,
        latency_s=statistics.fmean(latencies),
        latency_p90_s=latencies[math.ceil(0.9 * len(latencies)) - 1],
        computed_tokens=found.counts.computed_tokens,
        requests=found.sequences,
        steps=found.counts.steps,
        rows=found.counts.rows,
        preemptions=found.counts.preemptions,
        peak_kv_tokens=found.counts.peak_kv_tokens,
    )


@dataclass
class JoinWorker:
    """Engine and questions of the settings, made when the first run needs them."""

    settings: JoinSettings

    @cached_property
    def engine(self) -> ExperimentEngine:
        """The virtual engine, with the KV cache of the GPU and the embedded model's markers."""
        # Imports vLLM, which takes seconds.
        from apar_core.models.apar_tiny_threadweaver import checkpoint_path
        from apar_core.step_costs.gpus import find_gpu
        from apar_core.step_costs.models import find_model
        from apar_core.step_costs.predict import kv_tokens, step_costs
        from cluster.lab.experiments.engine import ExperimentEngine
        from cluster.lab.virtual.engine import VirtualEngine, VirtualSpec

        settings = self.settings
        model, gpu = find_model(settings.model), find_gpu(settings.gpu)
        room = kv_tokens(model, gpu, block_size=settings.block_size) * settings.kv_share
        engine = VirtualEngine(
            VirtualSpec(
                model.config,
                step_costs(model, gpu, block_size=settings.block_size),
                int(room),
                block_size=settings.block_size,
                max_model_len=2 * settings.max_tokens,
                checkpoint=checkpoint_path(),
            )
        )
        hidden = [engine.tokenizer.eos_token_id, *engine.tokenizer.convert_tokens_to_ids(MARKERS)]
        return ExperimentEngine(engine, hidden)

    @cached_property
    def questions(self) -> list[JoinedQuestion]:
        """The questions of all runs; a run answers the first of them."""
        return load_joined_questions(self.settings, self.engine.engine.tokenizer)

    def close(self) -> None:
        """Shut the engine down, if there is one."""
        if "engine" in vars(self):
            self.engine.shutdown()


# ---- report ------------------------------------------------------------------------------------


def report_joins(settings: JoinSettings, folder: Path, start_stage: StartStage) -> Report:
    """Do the runs that the folder does not have, and report all of them.

    Raises EvaluationError for a trace that cannot be read or has no answer with threads.
    """
    store = PartStore(folder, settings.as_text())
    points = [
        (method, concurrency, round_trip_s)
        for concurrency in settings.concurrencies
        for method in METHODS
        # Only the client waits for round trips.
        for round_trip_s in (settings.round_trips_s if method == CLIENT else (0.0,))
    ]
    done = start_stage("runs", len(points))
    worker = JoinWorker(settings)
    try:
        counts = store.get_or_do("answers", lambda: answer_counts(worker.questions))
        runs = []
        for point in points:
            data = store.get_or_do(
                "{} {} {}".format(*point),
                partial(_run_data, worker, *point),
            )
            runs.append(JoinRun(**data))
            done()
    finally:
        worker.close()
    critical = counts["critical"]
    trace = "the embedded model's corpus" if settings.trace is None else settings.trace.name
    facts = {
        "Engine": f"{settings.model} on {settings.gpu} with {settings.kv_share:g} of its KV cache; "
        "vLLM's scheduler and KV-cache manager, forks and joins are real, and the duration of each "
        "step is modeled",
        "Answers": f"{counts['answers']} of {trace} with two or more threads, as outlines, threads "
        f"and conclusion: {counts['threads']:.1f} threads in {counts['blocks']:.2f} blocks and "
        f"{counts['tokens']:.0f} tokens each, of which {counts['plain']:.0f} without outlines and "
        "markers (counted)",
        "Critical path": f"{critical:.0f} tokens, {counts['tokens'] / critical:.2f}x fewer than "
        f"the same text and {counts['plain'] / critical:.2f}x fewer than the recorded answer "
        "(counted)",
        "Load": "each answer is followed by the next question; every text was compared",
    }
    return Report(
        f"Threads that join, predicted for {settings.gpu}",
        facts,
        [join_table(runs)],
        {},
        {"runs": [asdict(run) for run in runs], "answers": counts},
    )


def _run_data(
    worker: JoinWorker, method: str, concurrency: int, round_trip_s: float
) -> dict[str, Any]:
    return asdict(join_run(worker.engine, worker.questions, method, concurrency, round_trip_s))


def answer_counts(questions: Sequence[JoinedQuestion]) -> dict[str, float]:
    """Return means over the questions: threads, blocks, and tokens of each way to write them."""

    def mean(count: Callable[[JoinedQuestion], int]) -> float:
        return statistics.fmean(map(count, questions))

    return {
        "answers": len(questions),
        "threads": mean(lambda each: sum(len(block.texts) for block in each.client.blocks)),
        "blocks": mean(lambda each: len(each.client.blocks)),
        "tokens": mean(lambda each: len(each.client.flat)),
        "plain": mean(lambda each: len(each.plain)),
        "critical": mean(lambda each: each.critical_tokens),
    }


_TITLES = {
    ENGINE: "engine",
    CLIENT: "resubmitting client, {:g} ms round trip",
    SEQUENTIAL: "sequential, same text",
    PLAIN: "sequential, recorded answer",
}


def join_table(runs: Sequence[JoinRun]) -> ReportTable:
    """Return the figures of all runs; ratios are over the same text in sequence."""
    columns = (
        Column("requests at once", "d"),
        Column("method"),
        Column("text tokens/s", ".0f"),
        Column("throughput x", ".2f"),
        Column("mean latency (s)", ".2f"),
        Column("latency x", ".2f"),
        Column("p90 latency (s)", ".2f"),
        Column("recomputed tokens per answer", ".1f"),
        Column("requests and threads per answer", ".1f"),
        Column("rows per step", ".1f"),
        Column("preemptions", "d"),
    )
    same = {run.concurrency: run for run in runs if run.method == SEQUENTIAL}
    rows = []
    for run in runs:
        base = same[run.concurrency]
        recomputed = (run.computed_tokens - base.computed_tokens) / run.answers
        rows.append(
            (
                run.concurrency,
                _TITLES[run.method].format(1000 * run.round_trip_s),
                run.tokens_per_s,
                run.tokens_per_s / base.tokens_per_s,
                run.latency_s,
                base.latency_s / run.latency_s,
                run.latency_p90_s,
                # Another text, so its tokens cannot be compared.
                None if run.method == PLAIN else recomputed,
                run.requests / run.answers,
                run.rows / run.steps,
                run.preemptions,
            )
        )
    return ReportTable(
        "joins",
        "Threads that join: throughput, latency and recomputed tokens",
        columns,
        tuple(rows),
        note="Text tokens are those of the recorded answers for every method. Recomputed: tokens "
        "that went through the model beyond those of the same text in sequence.",
    )
