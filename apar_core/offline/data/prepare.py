"""Data preparation: chats of many files become structured and unstructured training examples.

The paper trains on 16,000 structured and 9,000 unstructured samples, drawn 1:1 (section 3.2).
Files are streamed and results are collected in input order, so the output does not depend on the
number of processes. Memory use is small. With held-out queries, each answer keeps a digest of every
earlier question (about 0.5 kB for a chat of three turns, 2.7 kB for forty).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import signal
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from apar_core.errors import DataError
from apar_core.offline.data.example_file import (
    STRUCTURED_FILE,
    UNSTRUCTURED_FILE,
    example_line,
)
from apar_core.offline.data.records import ChatMessage, ExampleRecord, count_forks
from apar_core.offline.data.sampling import (
    HELD_OUT_FILE,
    HoldOut,
    LineReservoir,
    conversation_of,
    query_sums,
)
from apar_core.offline.data.sources import (
    DAMAGED_ARRAY,
    ItemRefusedError,
    Questions,
    ReadBytes,
    SourceItem,
    chat_of_item,
    load_questions,
    num_leading_answers,
    parse_item,
    read_items,
    source_files,
)
from apar_core.offline.data.structure import StructureRules, extract_tree, has_list, split_thought

REPORT_FILE = "report.json"
MAX_REFUSAL_EXAMPLES = 10
"""Refusals per reason that the report lists with their places."""

_CHUNK_ITEMS = 64
_CHUNK_BYTES = 1 << 20
_CHUNKS_IN_FLIGHT = 3


class PreparationSettings(BaseModel):
    """Sample sizes and extraction rules; 16k and 9k samples as in the paper."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    structured: PositiveInt | None = Field(16_000, description="Sample size; all if None.")
    unstructured: PositiveInt | None = Field(9_000, description="Sample size; all if None.")
    hold_out: NonNegativeInt = Field(0, description="Number of queries held out of training.")
    hold_out_mixed: bool = Field(
        False, description="Hold out the natural mix of queries, not only those that fork."
    )
    seed: NonNegativeInt = 0
    strict: bool = Field(False, description="Stop at the first unusable item.")
    overwrite: bool = Field(False, description="Replace the files of an earlier run.")
    rules: StructureRules = StructureRules()
    questions: tuple[Path, ...] = Field((), description="FastChat question files.")


class Refusal(BaseModel):
    """Item, or one answer of an item, that could not be used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: str
    reason: str
    message: str


class SampleCount(BaseModel):
    """Numbers of examples found, wanted (None: all) and written."""

    model_config = ConfigDict(extra="forbid")

    found: int = 0
    wanted: int | None = None
    written: int = 0


class PreparationReport(BaseModel):
    """Counts of one run."""

    model_config = ConfigDict(extra="forbid")

    inputs: list[str]
    seed: int
    rules: StructureRules
    training_ratio: str = Field(
        "1:1", description="Ratio in which training draws structured and unstructured examples."
    )
    model: str | None = Field(None, description="Model whose context every example fits.")
    context_length: int | None = Field(None, description="Length of that context (tokens).")
    num_items: int = 0
    num_too_long: int = Field(0, description="Answers dropped: longer than the context.")
    num_not_trained: int = Field(0, description="Answers left out: their message has weight 0.")
    num_near_held_out: int = Field(
        0, description="Examples dropped: they share conversation or query with a held-out query."
    )
    num_answers: int = 0
    num_listed_answers: int = Field(
        0, description="Of these, answers with an ordered or unordered list, forked or not."
    )
    num_chats: int = Field(0, description="Items of which an answer became an example.")
    num_listed_chats: int = Field(0, description="Of these, items of which an answer has a list.")
    num_forks: int = 0
    kinds: Counter[str] = Field(default_factory=Counter)
    unstructured_reasons: Counter[str] = Field(default_factory=Counter)
    refusals: Counter[str] = Field(default_factory=Counter)
    refusal_examples: list[Refusal] = Field(default_factory=list)
    structured: SampleCount = Field(default_factory=SampleCount)
    unstructured: SampleCount = Field(default_factory=SampleCount)
    held_out: SampleCount = Field(default_factory=SampleCount)

    def add_refusal(self, refusal: Refusal) -> None:
        """Count a refusal and list it if it is among the first of its reason."""
        self.refusals[refusal.reason] += 1
        if self.refusals[refusal.reason] <= MAX_REFUSAL_EXAMPLES:
            self.refusal_examples.append(refusal)

    def add_answer(self, answer: PreparedAnswer) -> None:
        """Count an answer that became an example."""
        self.num_answers += 1
        self.num_listed_answers += answer.has_list
        self.num_forks += answer.num_forks
        self.kinds[answer.kind] += 1
        if answer.reason is not None:
            self.unstructured_reasons[answer.reason] += 1


class FitExample(Protocol):
    """Fits examples to the context of a model; implemented where tokenizers are known."""

    @property
    def model_name(self) -> str:
        """Folder or hub name."""

    @property
    def context_length(self) -> int:
        """Maximum length of an example (tokens)."""

    def __call__(self, example: ExampleRecord) -> ExampleRecord | None:
        """Return the example, without its oldest turns if too long; None if it cannot fit."""


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """Line of the example file, with what the report counts.

    `conversation`, `queries` and `opens` are as in `SpooledExample`.
    """

    line: bytes
    kind: str
    reason: str | None
    num_forks: int
    has_list: bool
    conversation: str
    queries: frozenset[bytes]
    opens: bool


class LeftOut(Enum):
    """Why a valid answer does not become an example."""

    TOO_LONG = "exceeds the context even with its question alone"
    NOT_TRAINED = "its message has weight 0"


Outcome = PreparedAnswer | Refusal | LeftOut


@dataclass(frozen=True, slots=True)
class ItemPreparation:
    """Converts items to examples; pickled once for each worker process."""

    rules: StructureRules
    questions: Questions
    fit: FitExample | None = None

    def outcomes(self, item: SourceItem) -> Iterator[Outcome]:
        """Yield an example for each answer of the item, with the earlier turns as its messages.

        Answers before the first question are refused individually. An empty answer ends the item.
        """
        try:
            if item.text is None:
                raise ItemRefusedError(DAMAGED_ARRAY, item.failure or "")
            value = parse_item(item.text)
            messages = chat_of_item(value, self.questions)
            conversation = conversation_of(value, item.place)
            num_system = messages[0].role == "system"
            num_leading = num_leading_answers(messages[num_system:])
            for _ in range(num_leading):
                reason = "answer without a question"
                yield Refusal(place=item.place, reason=reason, message=reason)
            del messages[num_system : num_system + num_leading]
            for index, message in enumerate(messages):
                if message.role == "assistant" and not message.is_trained:
                    yield LeftOut.NOT_TRAINED
                elif message.role == "assistant":
                    yield self._prepared(item, conversation, messages[:index], message.content)
        except ItemRefusedError as error:
            yield Refusal(place=item.place, reason=error.reason, message=str(error))

    def _prepared(
        self, item: SourceItem, conversation: str, messages: Sequence[ChatMessage], answer: str
    ) -> PreparedAnswer | LeftOut:
        turn = sum(message.role == "user" for message in messages)
        if not answer.strip():
            raise ItemRefusedError("empty answer", f"turn {turn}")
        if not split_thought(answer).answer.strip():
            raise ItemRefusedError("thought without an answer", f"turn {turn}")
        if not messages[-1].content.strip():
            raise ItemRefusedError("empty question", f"turn {turn}")
        extracted = extract_tree(answer, self.rules)
        path = Path(item.source)
        example = ExampleRecord(
            kind=extracted.kind,
            messages=tuple(messages),
            answer=extracted.tree,
            example_id=f"{path.parent.name}/{path.stem}:{item.number}:{turn}",
        )
        fitted = example if self.fit is None else self.fit(example)
        if fitted is None:
            return LeftOut.TOO_LONG
        return PreparedAnswer(
            example_line(fitted),
            extracted.kind,
            extracted.reason,
            count_forks(extracted.tree),
            has_list(split_thought(answer).answer),
            conversation,
            query_sums(messages),
            opens=turn == 1,
        )


def prepare(
    inputs: Sequence[Path],
    out: Path,
    settings: PreparationSettings,
    num_workers: int = 1,
    on_read: ReadBytes = lambda num_bytes: None,
    fit: FitExample | None = None,
) -> PreparationReport:
    """Write the example files and the report to `out`; return the report.

    Examples are fitted to the context first, then queries are held out, then the rest is sampled.
    So the sample sizes count examples that can be trained on. `out` is filled at the end, all at
    once, and only if an answer could be used. Raises DataError if there is nothing to read, if
    `out` contains files that must not be overwritten, and in strict mode at the first refusal.
    """
    files = source_files(inputs)
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file, not a folder")
    if out.is_dir() and not settings.overwrite and any(out.iterdir()):
        raise DataError(f"{out} is not empty: choose another folder or set --overwrite")
    preparation = ItemPreparation(settings.rules, load_questions(settings.questions), fit)
    report = PreparationReport(
        inputs=[str(path) for path in files],
        seed=settings.seed,
        rules=settings.rules,
        model=None if fit is None else fit.model_name,
        context_length=None if fit is None else fit.context_length,
    )
    items = (item for path in files for item in read_items(path, on_read))
    with _unfinished_folder(out) as folder, contextlib.ExitStack() as spools:
        structured, unstructured = (
            LineReservoir(
                spools.enter_context((folder / f"{name}.spool").open("w+b")),
                capacity,
                f"{settings.seed} {name}",
            )
            for name, capacity in (
                (STRUCTURED_FILE, settings.structured),
                (UNSTRUCTURED_FILE, settings.unstructured),
            )
        )
        hold_out: HoldOut | None = None
        if settings.hold_out:
            spool = spools.enter_context((folder / "all.spool").open("w+b"))
            hold_out = HoldOut(
                spool, settings.hold_out, settings.seed, mixed=settings.hold_out_mixed
            )

        def keep(answer: PreparedAnswer) -> None:
            is_structured = answer.kind != "unstructured"
            if hold_out is None:
                (structured if is_structured else unstructured).offer(answer.line)
                return
            hold_out.add(
                answer.line,
                is_structured=is_structured,
                conversation=answer.conversation,
                queries=answer.queries,
                opens=answer.opens,
            )

        with contextlib.closing(_outcomes(preparation, items, num_workers)) as outcomes:
            for outcome_list in outcomes:
                _collect(outcome_list, report, keep, strict=settings.strict)
        if report.num_answers == 0:
            return report
        if hold_out is not None:
            report.held_out.found = len(hold_out.candidates)
            report.held_out.wanted = settings.hold_out
            report.held_out.written, left = hold_out.draw(folder / HELD_OUT_FILE)
            report.num_near_held_out = report.num_answers - report.held_out.written - len(left)
            for example in left:
                reservoir = structured if example.is_structured else unstructured
                reservoir.offer(hold_out.line(example))
        structured.write(folder / STRUCTURED_FILE)
        unstructured.write(folder / UNSTRUCTURED_FILE)
        for count, sample, wanted in (
            (report.structured, structured, settings.structured),
            (report.unstructured, unstructured, settings.unstructured),
        ):
            count.found, count.wanted, count.written = sample.num_seen, wanted, len(sample)
        (folder / REPORT_FILE).write_text(report.model_dump_json(indent=2) + "\n")
        out.mkdir(parents=True, exist_ok=True)
        # An earlier run's held-out queries may be among this run's examples.
        (out / HELD_OUT_FILE).unlink(missing_ok=True)
        for name in (STRUCTURED_FILE, UNSTRUCTURED_FILE, HELD_OUT_FILE, REPORT_FILE):
            if (folder / name).exists():
                (folder / name).replace(out / name)
    return report


@contextlib.contextmanager
def _unfinished_folder(out: Path) -> Iterator[Path]:
    """Create a temporary folder on the same disk as `out`; delete it at the end."""
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _collect(
    outcomes: Iterable[Outcome],
    report: PreparationReport,
    keep: Callable[[PreparedAnswer], None],
    *,
    strict: bool,
) -> None:
    report.num_items += 1
    answers, listed = report.num_answers, report.num_listed_answers
    for outcome in outcomes:
        if isinstance(outcome, Refusal):
            if strict:
                raise DataError(f"{outcome.place}: {outcome.message}")
            report.add_refusal(outcome)
        elif outcome is LeftOut.TOO_LONG:
            report.num_too_long += 1
        elif outcome is LeftOut.NOT_TRAINED:
            report.num_not_trained += 1
        else:
            report.add_answer(outcome)
            keep(outcome)
    report.num_chats += report.num_answers > answers
    report.num_listed_chats += report.num_listed_answers > listed


def _outcomes(
    preparation: ItemPreparation, items: Iterator[SourceItem], num_workers: int
) -> Generator[list[Outcome], None, None]:
    """Yield the outcomes of each item in input order, with bounded read-ahead."""
    if num_workers == 1:
        for item in items:
            yield list(preparation.outcomes(item))
        return
    # Forked processes would inherit the locks of progress bars.
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(preparation,),
    )
    pending: deque[Future[list[list[Outcome]]]] = deque()
    try:
        for chunk in _chunks(items):
            with _interrupts_held():
                pending.append(pool.submit(_work, chunk))
            if len(pending) > num_workers * _CHUNKS_IN_FLIGHT:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a process of data preparation was killed (out of memory?)") from error
    finally:
        pool.shutdown(cancel_futures=True)


# Set in worker processes only. Sent with each chunk, it would repeat all questions every time.
_worker_preparation: ItemPreparation


def _start_worker(preparation: ItemPreparation) -> None:
    global _worker_preparation
    # Ctrl-C reaches the whole process group: workers ignore it, and the parent shuts them down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker_preparation = preparation


def _work(items: Sequence[SourceItem]) -> list[list[Outcome]]:
    return [list(_worker_preparation.outcomes(item)) for item in items]


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Defer Ctrl-C here and, until their initializer runs, in processes started meanwhile.

    Otherwise an interrupted worker would print a traceback while it is still importing.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _chunks(items: Iterator[SourceItem]) -> Iterator[list[SourceItem]]:
    chunk: list[SourceItem] = []
    num_bytes = 0
    for item in items:
        chunk.append(item)
        num_bytes += len(item.text or b"")
        if len(chunk) >= _CHUNK_ITEMS or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
