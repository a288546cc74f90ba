"""Chats of many files into structured and unstructured training examples.

The paper trains on 16,000 structured and 9,000 unstructured samples, drawn 1:1 (section 3.2).
Files are read as streams and outcomes taken in the order of the items, so the result is the same
with any number of processes. Memory stays small; with held-out queries it holds a digest of every
earlier question for each answer (about 0.5 kB for a chat of three turns, 2.7 kB for forty).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from apar_core.errors import DataError
from apar_core.offline.data.conversations import load_questions
from apar_core.offline.data.example_file import STRUCTURED_FILE, UNSTRUCTURED_FILE
from apar_core.offline.data.hold_out import HELD_OUT_FILE, HoldOut
from apar_core.offline.data.item_examples import (
    FitExample,
    ItemPreparation,
    Outcome,
    PreparedAnswer,
    TooLong,
)
from apar_core.offline.data.report import PreparationReport, Refusal
from apar_core.offline.data.sampling import LineReservoir
from apar_core.offline.data.sources import ReadBytes, SourceItem, read_items, source_files
from apar_core.offline.data.structure import StructureRules

REPORT_FILE = "report.json"
_CHUNK_ITEMS = 64
_CHUNK_BYTES = 1 << 20
_CHUNKS_IN_FLIGHT = 3


class PreparationSettings(BaseModel):
    """How much is kept of what, and by which rules; 16k and 9k as in the paper."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    structured: PositiveInt | None = Field(16_000, description="Sample size; all if None.")
    unstructured: PositiveInt | None = Field(9_000, description="Sample size; all if None.")
    hold_out: NonNegativeInt = Field(0, description="Queries kept out of training.")
    seed: NonNegativeInt = 0
    strict: bool = Field(False, description="Stop at the first item that must be refused.")
    overwrite: bool = Field(False, description="Replace the files of an earlier run.")
    rules: StructureRules = StructureRules()
    questions: tuple[Path, ...] = Field((), description="FastChat questions of answer files.")


def prepare(
    inputs: Sequence[Path],
    out: Path,
    settings: PreparationSettings,
    num_workers: int = 1,
    on_read: ReadBytes = lambda num_bytes: None,
    fit: FitExample | None = None,
) -> PreparationReport:
    """Write the two example files and the report to `out`; return the report.

    Examples are fitted to the context by `fit`, then held-out queries are set apart, then the rest
    is sampled: so the numbers of `settings` are those of examples that can be trained on.
    Nothing is in `out` before all is done. Raises DataError if there is nothing to read, if `out`
    holds files and may not be overwritten, and in strict mode at the first refusal.
    """
    files = source_files(inputs)
    _check_folder(out, settings.overwrite)
    preparation = ItemPreparation(settings.rules, load_questions(settings.questions), fit)
    report = PreparationReport(
        inputs=[str(path) for path in files],
        seed=settings.seed,
        unordered_lists=settings.rules.unordered_lists,
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
            hold_out = HoldOut(spool, settings.hold_out, settings.seed)

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
        if hold_out is not None:
            report.held_out.found = hold_out.num_candidates
            report.held_out.wanted = settings.hold_out
            report.held_out.written, left = hold_out.draw(folder / HELD_OUT_FILE)
            report.num_near_held_out = report.num_answers - report.held_out.written - len(left)
            for example in left:
                reservoir = structured if example.is_structured else unstructured
                reservoir.offer(hold_out.line(example))
        structured.write(folder / STRUCTURED_FILE)
        unstructured.write(folder / UNSTRUCTURED_FILE)
        _complete(report, settings, structured, unstructured)
        (folder / REPORT_FILE).write_text(report.model_dump_json(indent=2) + "\n")
        out.mkdir(parents=True, exist_ok=True)
        # An earlier run's held-out queries may be among the examples of this one.
        (out / HELD_OUT_FILE).unlink(missing_ok=True)
        for name in (STRUCTURED_FILE, UNSTRUCTURED_FILE, HELD_OUT_FILE, REPORT_FILE):
            if (folder / name).exists():
                (folder / name).replace(out / name)
    return report


def _check_folder(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file, not a folder")
    if out.is_dir() and not overwrite and any(out.iterdir()):
        raise DataError(f"{out} is not empty; choose another folder or allow overwriting")


@contextlib.contextmanager
def _unfinished_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out`, on the same disk, that goes away whatever happens."""
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
    for outcome in outcomes:
        if isinstance(outcome, Refusal):
            if strict:
                raise DataError(f"{outcome.place}: {outcome.message}")
            report.add_refusal(outcome)
        elif isinstance(outcome, TooLong):
            report.num_too_long += 1
        else:
            report.add_answer(outcome.kind, outcome.reason, outcome.num_forks)
            keep(outcome)


def _complete(
    report: PreparationReport,
    settings: PreparationSettings,
    structured: LineReservoir,
    unstructured: LineReservoir,
) -> None:
    for count, reservoir, wanted in (
        (report.structured, structured, settings.structured),
        (report.unstructured, unstructured, settings.unstructured),
    ):
        count.found = reservoir.num_seen
        count.wanted = wanted
        count.written = len(reservoir)


def _outcomes(
    preparation: ItemPreparation, items: Iterator[SourceItem], num_workers: int
) -> Generator[list[Outcome], None, None]:
    """Yield what each item gives, in the items' order."""
    if num_workers == 1:
        for item in items:
            yield list(preparation.outcomes(item))
        return
    # Processes that are forked would inherit the locks of progress bars.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start_worker, initargs=(preparation,)
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


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C for later, here and in the processes that are started meanwhile.

    These would die of it with a traceback while they are still importing.
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
        num_bytes += len(item.value) if isinstance(item.value, bytes) else 0
        if len(chunk) >= _CHUNK_ITEMS or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


_work_on: Callable[[Sequence[SourceItem]], list[list[Outcome]]]


def _start_worker(preparation: ItemPreparation) -> None:
    global _work_on
    # Ctrl-C reaches the whole process group; the parent ends the workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _work_on = preparation.outcomes_of_items


def _work(items: Sequence[SourceItem]) -> list[list[Outcome]]:
    return _work_on(items)
