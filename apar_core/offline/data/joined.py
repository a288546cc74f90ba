"""Answers whose threads are joined before the parent goes on, in ThreadWeaver's grammar.

The parent writes `<Parallel>` and an outline of each thread. Thread i begins with its seed,
`<Thread>` and its number, and ends with `</Thread>`. Threads read what came before `</Outlines>`,
not each other. When all have ended, the parent continues after their joined texts.

Source: ThreadWeaver (arXiv 2512.07843) and its clients, threadweaver_sft/src/simple_eval.py and the
branching agent loop of threadweaver_rl. There, a block neither lies in a thread nor needs a
conclusion. Outlines and threads are numbered from 1, and each thread ends with a line break.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from apar_core.errors import TreeError
from apar_core.formats.parallel_format import Branch, branches
from apar_core.formats.shipped_formats import THREADWEAVER
from apar_core.offline.data.records import ParagraphRecord, flat_text, thread_paragraphs
from apar_core.offline.data.structure import split_thought

FORMAT = THREADWEAVER
assert FORMAT.join is not None
_JOIN = FORMAT.join
MARKERS = (*FORMAT.tokens, "<Conclusion>", "</Conclusion>")
OUTLINES_START = "<Outlines>"
(THREAD_END,) = FORMAT.child_end

AFTER_THREADS = _JOIN.suffix
"""Text that the parent reads after the last thread, before it writes again."""

# The number or bullet of a heading, in front of which there may be marks of Markdown.
_LIST_MARKER = re.compile(
    r"(?:#{1,6}\s+)?(?:(?P<open>[*_]{0,3})(?:\d+[.)]|[-*•])|[*_]{1,3}\d+[.)][*_]{1,3})\s+"
)
_SMALLEST_BLOCK = 2


@dataclass(frozen=True, slots=True)
class JoinedAnswer:
    """Answer as its generations: `parent[k]`, then block k of `blocks`, then `parent[k + 1]`.

    `blocks[k][i]` is what thread i + 1 of block k writes after its seed, `</Thread>` included.
    Every part of the parent but the last ends with `</Outlines>`. Raises TreeError if the numbers
    of parts do not fit.
    """

    parent: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.parent) != len(self.blocks) + 1:
            raise TreeError(f"{len(self.parent)} parent texts around {len(self.blocks)} blocks")

    @property
    def num_threads(self) -> int:
        """Number of threads without the parent."""
        return sum(map(len, self.blocks))

    @property
    def text(self) -> str:
        """The whole text with its markers, as the project's own client assembles it."""
        parts = [self.parent[0]]
        for threads, following in zip(self.blocks, self.parent[1:], strict=True):
            for index, text in enumerate(threads):
                parts += [thread_header(str(index + 1), first=index == 0), text]
            parts += [AFTER_THREADS, following]
        return "".join(parts)


def thread_header(number: str, *, first: bool) -> str:
    """Return what stands before a thread's text; the first one's equals every thread's seed."""
    return Branch(number).fill(FORMAT.child_seed if first else _JOIN.header)


def outline_numbers(parent_text: str) -> list[str]:
    """Return the numbers of the outlines in the last block of outlines, each once."""
    return [branch.number for branch in branches(FORMAT, parent_text)]


def joined_answer(answer: ParagraphRecord) -> JoinedAnswer:
    """Return an answer that forks as one that joins.

    What a paragraph forks after is the thread's outline, and its detail the thread. A paragraph
    whose detail forks again is written by the parent, and its detail is a block, since blocks do
    not nest. The text after the last fork is the block's conclusion. A single detail needs no
    block.
    """
    writer = _Writer()
    writer.write(answer)
    return JoinedAnswer((*writer.parent, writer.text), tuple(writer.blocks))


@dataclass
class _Writer:
    parent: list[str] = field(default_factory=list)
    blocks: list[tuple[str, ...]] = field(default_factory=list)
    text: str = ""

    def write(self, first: ParagraphRecord) -> None:
        forks = list(_forks(first))
        if len(forks) < _SMALLEST_BLOCK:
            self.text += flat_text(first)
        elif any(detail.first_child is not None for _, detail in forks):
            for text, detail in forks:
                self.text += text
                self.write(detail)
            self.text += _closing(first)
        else:
            self._write_block(forks, _closing(first).strip())

    def _write_block(self, forks: list[tuple[str, ParagraphRecord]], closing: str) -> None:
        introduction, heading = _introduction(forks[0][0])
        # Text between two details belongs to the second one's thread.
        roots = [("", heading), *(_last_line(text.strip()) for text, _ in forks[1:])]
        headings = [_heading(text) for _, text in roots]
        outlines = "".join(
            f"<Outline>{number}: {text.replace('**', '').rstrip(':')}</Outline>\n"
            for number, text in enumerate(headings, start=1)
        )
        opening = f"{introduction}<Parallel>\n{OUTLINES_START}\n{outlines}{FORMAT.trigger}"
        self.parent.append(self.text + opening)
        self.blocks.append(
            tuple(
                f" {lead}{heading}{flat_text(detail)}\n{THREAD_END}"
                for (lead, _), heading, (_, detail) in zip(roots, headings, forks, strict=True)
            )
        )
        conclusion = f"<Conclusion>\n{closing}\n</Conclusion>\n" if closing else ""
        self.text = f"{conclusion}</Parallel>"


def _introduction(text: str) -> tuple[str, str]:
    """Return what comes before a block's first heading, and the heading.

    A thought and the blank before an answer are written before the block.
    """
    thought, rest = split_thought(text)
    before, heading = _last_line(rest)
    blank = "" if before else heading[: len(heading) - len(heading.lstrip())]
    return f"{thought}{before}{blank}", heading


def _last_line(text: str) -> tuple[str, str]:
    before, line_break, last = text.rpartition("\n")
    return before + line_break, last


def _heading(text: str) -> str:
    """Return a heading without the number or bullet of its point."""
    heading = text.strip()
    marker = _LIST_MARKER.match(heading)
    return heading if marker is None else (marker["open"] or "") + heading[marker.end() :]


def _forks(first: ParagraphRecord) -> Iterator[tuple[str, ParagraphRecord]]:
    for paragraph in thread_paragraphs(first):
        if paragraph.first_child is not None:
            yield paragraph.text, paragraph.first_child


def _closing(first: ParagraphRecord) -> str:
    last = list(thread_paragraphs(first))[-1]
    return last.text if last.first_child is None else ""


@dataclass(frozen=True, slots=True)
class JoinedBlock:
    """Tokens of a block's threads, and what the parent reads after the first of them.

    Thread i reads `seeds[i]` and writes `texts[i]`. `rest` are the other threads with their
    headers, and the text after the last of them.
    """

    seeds: tuple[list[int], ...]
    texts: tuple[list[int], ...]
    rest: list[int]

    @property
    def joined(self) -> list[int]:
        """The text that the parent reads before it continues."""
        return [*self.seeds[0], *self.texts[0], *self.rest]


@dataclass(frozen=True, slots=True)
class JoinedTokens:
    """A `JoinedAnswer` as tokens: the parent writes `parent[k]` before block k."""

    parent: tuple[list[int], ...]
    blocks: tuple[JoinedBlock, ...]

    @property
    def flat(self) -> list[int]:
        """The whole text."""
        token_ids = list(self.parent[0])
        for block, following in zip(self.blocks, self.parent[1:], strict=True):
            token_ids += [*block.joined, *following]
        return token_ids


EncodeText = Callable[[str], list[int]]


def joined_tokens(
    answer: JoinedAnswer, encode: EncodeText, encode_forced: EncodeText | None = None
) -> JoinedTokens:
    """Return the answer as tokens; each text that is generated or forced is encoded by itself.

    `encode_forced` encodes what the engine forces, by default as the rest.
    """
    return JoinedTokens(
        tuple(encode(text) for text in answer.parent),
        tuple(_joined_block(threads, encode, encode_forced or encode) for threads in answer.blocks),
    )


def _joined_block(
    threads: Sequence[str], encode: EncodeText, encode_forced: EncodeText
) -> JoinedBlock:
    numbers = [str(index + 1) for index in range(len(threads))]
    texts = tuple(encode(text) for text in threads)
    rest: list[int] = []
    for number, text in list(zip(numbers, texts, strict=True))[1:]:
        rest += [*encode_forced(thread_header(number, first=False)), *text]
    seeds = tuple(encode_forced(thread_header(number, first=True)) for number in numbers)
    return JoinedBlock(seeds, texts, [*rest, *encode_forced(AFTER_THREADS)])
