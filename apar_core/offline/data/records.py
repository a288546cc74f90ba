"""Records of training data: answers as paragraph trees, and the chats that they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from apar_core.errors import TreeError
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, child_thread


@dataclass(frozen=True, slots=True)
class ParagraphRecord:
    """Paragraph, with its detail (`first_child`) and the next paragraph of its thread.

    A paragraph with a `first_child` ends with a fork; its `next_sibling` continues the same thread.
    Texts include their whitespace: the whole answer is the concatenation of root, first child and
    next sibling, recursively. Source: APAR (arXiv 2401.06761), section 2.2.
    """

    text: str
    first_child: ParagraphRecord | None = None
    next_sibling: ParagraphRecord | None = None

    def __post_init__(self) -> None:
        if self.next_sibling is not None and self.first_child is None:
            raise TreeError("a paragraph without a fork has a next sibling: join the two")
        if self.first_child is not None and not self.text:
            raise TreeError("a paragraph that forks is empty: two forks would be adjacent")
        if self.first_child is not None and not self.first_child.text:
            raise TreeError(f"the detail of {self.text!r} is empty")


def thread_paragraphs(first: ParagraphRecord) -> Iterator[ParagraphRecord]:
    """Yield the paragraphs of one thread: the first one and its siblings."""
    paragraph: ParagraphRecord | None = first
    while paragraph is not None:
        yield paragraph
        paragraph = paragraph.next_sibling


def flat_text(answer: ParagraphRecord) -> str:
    """Return the text of the answer, without its forks."""
    parts: list[str] = []
    for paragraph in thread_paragraphs(answer):
        parts.append(paragraph.text)
        if paragraph.first_child is not None:
            parts.append(flat_text(paragraph.first_child))
    return "".join(parts)


def token_tree(answer: ParagraphRecord, encode: Callable[[str], list[int]]) -> ParagraphTree[int]:
    """Return the answer as a finished tree of token ids, each paragraph encoded by itself.

    No token spans a fork, because a fork separates the two texts for the model too.
    """
    tree: ParagraphTree[int] = ParagraphTree()
    _add_thread(tree, ROOT_THREAD, answer, encode)
    return tree


def _add_thread(
    tree: ParagraphTree[int],
    thread: ThreadId,
    first: ParagraphRecord,
    encode: Callable[[str], list[int]],
) -> None:
    details: list[tuple[ThreadId, ParagraphRecord]] = []
    for paragraph in thread_paragraphs(first):
        tree.append(thread, encode(paragraph.text))
        if paragraph.first_child is not None:
            child = child_thread(thread, len(details))
            tree.fork(thread, child)
            details.append((child, paragraph.first_child))
    tree.finish(thread)
    for child, detail in details:
        _add_thread(tree, child, detail, encode)


def count_forks(answer: ParagraphRecord) -> int:
    """Return the number of forks in all threads of the answer."""
    return sum(
        1 + count_forks(paragraph.first_child)
        for paragraph in thread_paragraphs(answer)
        if paragraph.first_child is not None
    )


def chain(paragraphs: Sequence[tuple[str, ParagraphRecord]], closing: str = "") -> ParagraphRecord:
    """Return a thread of paragraphs (text, detail), each with a fork, and an optional closing.

    Raises TreeError if `paragraphs` is empty.
    """
    if not paragraphs:
        raise TreeError("a chain needs at least one paragraph")
    last = ParagraphRecord(closing) if closing else None
    for text, detail in reversed(paragraphs):
        last = ParagraphRecord(text, first_child=detail, next_sibling=last)
    return last if last is not None else ParagraphRecord(closing)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """Message of a chat, as plain text.

    `is_trained` is False for an answer of a source file with `weight: 0`: later answers read it.
    """

    role: str
    content: str
    is_trained: bool = True

    def as_dict(self) -> dict[str, str]:
        """Return the message as chat templates expect it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class ExampleRecord:
    """Prompt and the answer to learn.

    With `raw_prompt`, the last message is a plain completion prompt without roles. `example_id`
    names the source of an example read from a file.
    """

    kind: str
    messages: tuple[ChatMessage, ...]
    answer: ParagraphRecord
    raw_prompt: bool = False
    example_id: str | None = None
