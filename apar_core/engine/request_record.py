"""What is kept of a finished request for whoever asks next: its statistics and its trees."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from apar_core.engine.thread_outputs import TextToken
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.statistics import TreeStatistics


class FinishedThreads(Protocol):
    """All threads of a finished request; the tree of an unforked one is built when asked for."""

    @property
    def tree(self) -> ParagraphTree[TextToken]: ...

    def statistics(self, num_prompt_tokens: int) -> TreeStatistics: ...


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One or more finished trees (`n`, several prompts) that answered one request.

    `trees` is empty unless trees are kept.
    """

    statistics: TreeStatistics
    trees: tuple[ParagraphTree[TextToken], ...]

    def __add__(self, other: RequestRecord) -> RequestRecord:
        return RequestRecord(self.statistics + other.statistics, self.trees + other.trees)


class RequestRecords:
    """Records of the last finished requests, by the request id that the client's side knows.

    Bounded: a record that nobody takes is dropped when `capacity` newer ones have come. Trees hold
    every token of an answer, so they are kept only where `keep_trees` is set.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.keep_trees = False
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(
        self, request_id: str, threads: FinishedThreads, num_prompt_tokens: int
    ) -> TreeStatistics:
        """Keep the record of a finished tree, beside others of the same request."""
        statistics = threads.statistics(num_prompt_tokens)
        record = RequestRecord(statistics, (threads.tree,) if self.keep_trees else ())
        known = self._records.pop(request_id, None)
        self._records[request_id] = record if known is None else known + record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)
        return statistics

    def take(self, request_id: str) -> RequestRecord | None:
        """Remove and return the record of a request; None if there is none.

        A completion with several prompts runs as the requests `ID-0`, `ID-1`, ...: their records
        come as one.
        """
        record = self._records.pop(request_id, None)
        index = 0
        while (part := self._records.pop(f"{request_id}-{index}", None)) is not None:
            record = part if record is None else record + part
            index += 1
        return record
