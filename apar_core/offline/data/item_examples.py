"""The training examples of one source item; runs in the processes of data preparation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from apar_core.offline.data.conversations import (
    ItemRefusedError,
    Questions,
    chat_of_item,
    num_leading_answers,
    parse_item,
)
from apar_core.offline.data.example_file import example_line
from apar_core.offline.data.hold_out import conversation_of, query_sums
from apar_core.offline.data.records import ChatMessage, ExampleRecord, count_forks
from apar_core.offline.data.report import Refusal
from apar_core.offline.data.sources import SourceItem
from apar_core.offline.data.structure import StructureRules, extract_tree
from apar_core.offline.data.thoughts import split_thought


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """An answer as a line of the example file, with what the report counts of it.

    `conversation`, `queries` and `opens` are for `HoldOut`.
    """

    line: bytes
    kind: str
    reason: str | None
    num_forks: int
    conversation: str
    queries: frozenset[bytes]
    opens: bool


@dataclass(frozen=True, slots=True)
class TooLong:
    """An answer that does not fit the context, not even behind its question alone."""


Outcome = PreparedAnswer | Refusal | TooLong


class FitExample(Protocol):
    """Fits examples to the context of a model."""

    @property
    def model_name(self) -> str:
        """Folder or hub name."""

    @property
    def context_length(self) -> int:
        """Tokens of an example."""

    def __call__(self, example: ExampleRecord) -> ExampleRecord | None:
        """Return the example without its oldest turns where it is too long, or None."""


@dataclass(frozen=True, slots=True)
class ItemPreparation:
    """Makes examples of items; passed to each process once."""

    rules: StructureRules
    questions: Questions
    fit: FitExample | None = None

    def outcomes_of_items(self, items: Sequence[SourceItem]) -> list[list[Outcome]]:
        """Return what each item has given, in order."""
        return [list(self.outcomes(item)) for item in items]

    def outcomes(self, item: SourceItem) -> Iterator[Outcome]:
        """Yield an example for each answer of the item, earlier turns as its messages.

        Answers before the first question are refused, each by itself. An empty answer ends the
        item: what follows it was said to nothing.
        """
        try:
            if item.failure is not None:
                raise ItemRefusedError("broken JSON", item.failure)
            value = parse_item(item.value) if isinstance(item.value, bytes) else item.value
            messages = chat_of_item(value, self.questions)
            conversation = conversation_of(value, item.place)
            num_system = messages[0].role == "system"
            num_leading = num_leading_answers(messages[num_system:])
            for _ in range(num_leading):
                reason = "answer without a question"
                yield Refusal(place=item.place, reason=reason, message=reason)
            del messages[num_system : num_system + num_leading]
            for index, message in enumerate(messages):
                if message.role == "assistant":
                    yield self._prepared(item, conversation, messages[:index], message.content)
        except ItemRefusedError as error:
            yield Refusal(place=item.place, reason=error.reason, message=str(error))

    def _prepared(
        self, item: SourceItem, conversation: str, messages: Sequence[ChatMessage], answer: str
    ) -> PreparedAnswer | TooLong:
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
            return TooLong()
        return PreparedAnswer(
            example_line(fitted),
            extracted.kind,
            extracted.reason,
            count_forks(extracted.tree),
            conversation,
            query_sums(messages),
            opens=turn == 1,
        )
