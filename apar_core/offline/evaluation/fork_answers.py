"""Answers whose forks are evaluated: where they fork, where the rules would, what they repeat.

A place in a text is the number of its characters before the place, white space left out. So a fork
before a line break and a detail that begins after it have the same place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict

from apar_core.offline.data.records import token_tree
from apar_core.offline.data.structure import AnswerKind, StructureRules, extract_tree
from apar_core.tree.paragraph import ParagraphNode, ParagraphTree

Item = TypeVar("Item")

Source = Literal["model", "base"]


class ForkFacts(NamedTuple):
    """Forks of a text, and its items: the line that ends at each fork, and the detail."""

    places: tuple[int, ...]
    heads: tuple[str, ...]
    details: tuple[str, ...]


class TextRules(NamedTuple):
    """Kind and forks that the rules find in a text."""

    kind: AnswerKind
    forks: ForkFacts


def fork_facts(tree: ParagraphTree[Item], decode: Callable[[Sequence[Item]], str]) -> ForkFacts:
    """Return where a generated answer forks, in reading order."""
    read: list[Item] = []
    places: list[int] = []
    heads: list[str] = []
    details: list[str] = []

    def add_thread(first: ParagraphNode[Item]) -> None:
        node: ParagraphNode[Item] | None = first
        while node is not None:
            read.extend(node.lead)
            read.extend(node.items)
            if node.first_child is not None:
                places.append(_num_visible(decode(read)))
                heads.append(_last_line(decode(node.items)))
                start, ordinal = len(read), len(details)
                details.append("")
                add_thread(node.first_child)
                details[ordinal] = decode(read[start:])
            node = node.next_sibling

    add_thread(tree.root)
    return ForkFacts(tuple(places), tuple(heads), tuple(details))


def text_rules(text: str, rules: StructureRules) -> TextRules:
    """Return where the rules would fork in a text."""
    extracted = extract_tree(text, rules)
    characters = token_tree(extracted.tree, lambda part: [ord(each) for each in part])
    return TextRules(extracted.kind, fork_facts(characters, lambda ids: "".join(map(chr, ids))))


def _num_visible(text: str) -> int:
    return sum(map(len, text.split()))


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


_NUMBER = re.compile(r"[\W_]*\d{1,3}[.)]\s")


def num_repeated(forks: ForkFacts) -> int:
    """Return how many heads and details equal an earlier one of the same answer.

    Compared are their words, without case, punctuation and the number of the point.
    """
    return sum(_num_equal(texts) for texts in (forks.heads, forks.details))


def _num_equal(texts: Sequence[str]) -> int:
    words = [tuple(re.findall(r"\w+", _NUMBER.sub("", text, count=1).casefold())) for text in texts]
    known = [each for each in words if each]
    return len(known) - len(set(known))


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """An answer as an engine gives it.

    token_ids: of the text, without its end token. threads: what each thread has generated, by its
    replay key. misplaced: tokens at which the model's first choice was a control token that the
    engine bans there; None if it was not watched. forks: None if the answer was not allowed to
    fork, or if places mean nothing because its threads wait for their children.
    num_unended: threads that a limit cut off. num_waits: blocks of children.
    """

    text: str
    token_ids: tuple[int, ...]
    threads: dict[str, list[int]]
    finish_reason: str
    statistics: dict[str, int]
    num_unended: int = 0
    misplaced: int | None = None
    forks: ForkFacts | None = None


class ForkAnswer(BaseModel):
    """A stored answer; the terms are those of `GeneratedAnswer`.

    statistics: counts of `TreeStatistics`; empty for a model that cannot fork.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Source
    question_id: str
    category: str
    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    threads: dict[str, list[int]]
    finish_reason: str
    statistics: dict[str, int]
    num_unended: int
    misplaced: int | None
    places: tuple[int, ...] | None = None
    heads: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        generated: GeneratedAnswer,
        source: Source,
        question: tuple[str, str],
        prompt_ids: Sequence[int],
    ) -> ForkAnswer:
        """Return the answer to a question, given by its id and category."""
        known = asdict(generated)
        forks = known.pop("forks")
        return cls(
            source=source,
            question_id=question[0],
            category=question[1],
            prompt_ids=list(prompt_ids),
            **known,
            **({} if forks is None else forks._asdict()),
        )

    @property
    def key(self) -> tuple[Source, str]:
        """Unique key within a run."""
        return self.source, self.question_id

    @property
    def num_threads(self) -> int:
        """Threads, the root thread included."""
        return len(self.threads)

    @property
    def forked(self) -> bool:
        """Whether the answer has more than one thread."""
        return len(self.threads) > 1

    @property
    def is_cut(self) -> bool:
        """Whether a limit on tokens ended it."""
        return self.finish_reason == "length" or self.num_unended > 0

    def items(self, rules: StructureRules) -> ForkFacts:
        """Return the items that were written in parallel; without forks, those of the rules."""
        if self.forked:
            return ForkFacts(self.places or (), self.heads, self.details)
        return text_rules(self.text, rules).forks


@dataclass(slots=True)
class KindCounts:
    """Forks of the answers of one kind.

    places: where the model forks. rule_places: where the rules would. common: in both.
    """

    kind: str
    answers: int = 0
    forked: int = 0
    places: int = 0
    rule_places: int = 0
    common: int = 0

    @property
    def should_fork(self) -> bool:
        """Whether the rules fork answers of this kind."""
        return self.rule_places > 0


def kind_counts(answers: Sequence[ForkAnswer], rules: StructureRules) -> list[KindCounts]:
    """Compare the forks of answers with those of the rules in the same texts, by kind."""
    found: dict[str, KindCounts] = {}
    for answer in answers:
        ruled = text_rules(answer.text, rules)
        places, wanted = set(answer.places or ()), set(ruled.forks.places)
        counts = found.setdefault(ruled.kind, KindCounts(ruled.kind))
        counts.answers += 1
        counts.forked += answer.forked
        counts.places += len(places)
        counts.rule_places += len(wanted)
        counts.common += len(places & wanted)
    return [found[kind] for kind in sorted(found)]
