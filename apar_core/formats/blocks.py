"""Blocks of threads for which their parent waits: when one opens, what is read, what is joined.

A block opens where a thread completes the format's trigger and has outlines. Its children read what
the format prescribes. When all of them have ended, the parent continues after the joined text.
Where a parent joins, a block is one child: its parent continues beside it, and waits where it has
written a join of it (`OpenForks`).
Scheduler and API process apply these rules to the same tokens, so they agree without messages.
What a thread has generated is always taken by its token ids, never tokenized again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from apar_core.errors import CheckpointError
from apar_core.formats.control_tokens import Tokenizer
from apar_core.formats.parallel_format import (
    Branch,
    ParallelFormat,
    before_join,
    branches,
    header_of,
    joined_text,
)
from apar_core.formats.resolved_format import resolve

JOIN_WINDOW_TOKENS = 1024
"""Most tokens of a fork or a join where a parent joins: so many are read at each trigger."""


@dataclass(frozen=True, slots=True)
class BlockChild:
    """A child of a block.

    seed: tokens forced after what the child inherits.
    header: tokens before its text in the joined text.
    """

    seed: tuple[int, ...]
    header: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenBlock:
    """The children that a thread has opened, in the order of the join.

    num_inherited: how many of the thread's tokens since its last join the children inherit; None if
        they inherit nothing, not even the prompt.
    """

    branches: tuple[Branch, ...]
    children: tuple[BlockChild, ...]
    num_inherited: int | None


@dataclass(frozen=True, slots=True)
class JoinPoint:
    """A thread waits for one child that it has forked before.

    ordinal: which of its children. block: that child alone.
    """

    ordinal: int
    block: OpenBlock


@dataclass(frozen=True, slots=True)
class JoinedText:
    """Tokens after which a waiting parent continues.

    num_kept: how many of its tokens since its last join stay before them.
    continues: whether it continues at all, or its answer ends here.
    """

    num_kept: int
    token_ids: tuple[int, ...]
    continues: bool


class BlockRules:
    """Rules of one format with the tokens of one checkpoint.

    work_factor: how many times its `max_tokens` a request may generate.
    marker_ids: tokens at which a block may open or a child may end; no other token needs a check.
    end_ids: those of them that end a child.
    shows_children: whether the children's texts are a part of the joined text, each between a
        header and `close_ids`, with `suffix_ids` after the last.
    joins_later: whether a thread continues beside its children until it joins one of them.
    """

    work_factor = 1

    def __init__(self, definition: ParallelFormat, tokenizer: Tokenizer) -> None:
        """Raises CheckpointError if the tokenizer lacks a token of the format."""
        resolved = resolve(definition, tokenizer)
        join = definition.join
        if join is None:
            raise CheckpointError(f"format {definition.name!r} has no waiting parent")
        if resolved.trigger_id is None and definition.cut == "before":
            raise CheckpointError(
                f"format {definition.name!r}: cut 'before' needs a trigger that is one token, not "
                f"{definition.trigger!r}"
            )
        self.definition: ParallelFormat = definition
        self._resolved = resolved
        self.end_ids = frozenset(resolved.end_ids)
        self.joins_later = join.pattern is not None
        # A fork may end within a token.
        self._trigger_id = None if self.joins_later else resolved.trigger_id
        self._trigger_ids = (
            _completing_ids(definition.trigger, tokenizer)
            if self._trigger_id is None
            else frozenset({self._trigger_id})
        )
        self.marker_ids = self._trigger_ids | self.end_ids
        self.nests = definition.children_fork
        self.shows_children = join.without_result is None and join.replaces is None
        if self.nests and not self.shows_children:
            raise CheckpointError(
                f"format {definition.name!r}: children may fork only where their text is joined "
                "as it is"
            )
        self.close_ids = resolved.encode(join.close) if self.shows_children else ()
        self.suffix_ids = resolved.encode(join.suffix) if self.shows_children else ()

    def ends_child(self, token_id: int) -> bool:
        """Return whether a token ends a child and is the last of its text."""
        return token_id in self.end_ids

    def is_closed(self, text: Sequence[int]) -> bool:
        """Return whether a child's text ends with one of the texts that end a child."""
        return not self.end_ids or (bool(text) and text[-1] in self.end_ids)

    def triggers(self, generated: Sequence[int]) -> bool:
        """Return whether the last token completes the trigger.

        `generated` are a thread's tokens since its last join.
        """
        if not generated or generated[-1] not in self._trigger_ids:
            return False
        if self._trigger_id is not None:
            return True
        # A token has at least one character, except those that are parts of one.
        tail = list(generated[-2 * len(self.definition.trigger) :])
        before, text = self._resolved.decode(tail[:-1]), self._resolved.decode(tail)
        end = text.rfind(self.definition.trigger) + len(self.definition.trigger)
        return self.definition.trigger in text and end > len(before)

    def open(
        self, generated: Sequence[int], prompt: Callable[[], Sequence[int]]
    ) -> OpenBlock | None:
        """Return the block that opens after a thread's tokens since its last join.

        None if they do not end with the trigger, or name no child: the thread then continues as if
        there was no trigger. `prompt` returns the client's prompt.
        """
        if not self.triggers(generated):
            return None
        definition, resolved = self.definition, self._resolved
        needs_prompt = definition.outlines is not None and definition.outlines.messages is not None
        opened = branches(
            definition,
            resolved.outline_text(generated),
            resolved.decode(prompt()) if needs_prompt else "",
        )
        return self._block(opened, len(generated) - (definition.cut == "before"))

    def fork(self, generated: Sequence[int]) -> OpenBlock | None:
        """Return the child that a thread forks with the last of its tokens since its last join."""
        assert self.definition.outlines is not None
        found = self._completed(self.definition.outlines.pattern, generated)
        if found is None:
            return None
        # Null characters mark what only looks like a marker: `ResolvedFormat.outline_text`.
        values = {name: text.replace("\0", "") for name, text in found.groupdict("").items()}
        return self._block((Branch(**values),), len(generated))

    def joined_number(self, generated: Sequence[int]) -> str | None:
        """Return the number of the child that a thread joins with the last of its tokens."""
        assert self.definition.join is not None
        found = self._completed(self.definition.join.pattern, generated)
        return None if found is None else found["number"]

    def _completed(self, pattern: str | None, generated: Sequence[int]) -> re.Match[str] | None:
        """Return the match of a pattern that ends within the last of a thread's tokens."""
        if pattern is None or not generated or generated[-1] not in self._trigger_ids:
            return None
        tail = generated[-JOIN_WINDOW_TOKENS:]
        text = self._resolved.outline_text(tail)
        num_before = len(self._resolved.outline_text(tail[:-1]))
        matches = re.finditer(pattern, text)
        return next((match for match in matches if match.end() > num_before), None)

    def _block(self, opened: Sequence[Branch], num_inherited: int) -> OpenBlock | None:
        """Return a block of these children; None if there is none, or one that cannot begin."""
        definition, resolved = self.definition, self._resolved
        if not opened:
            return None
        headers = self._headers(opened)
        children = tuple(
            BlockChild(resolved.seed_of(branch), header)
            for branch, header in zip(opened, headers, strict=True)
        )
        if definition.cut == "nothing":
            # An engine request needs a token to begin with.
            return (
                OpenBlock(tuple(opened), children, None) if all(c.seed for c in children) else None
            )
        return OpenBlock(tuple(opened), children, num_inherited)

    def joined(
        self, block: OpenBlock, generated: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> JoinedText:
        """Return the joined text of children that have generated `texts`.

        The texts include the tokens that ended children, and blocks joined inside them, but no end
        token of the model. `generated` are the parent's tokens since its last join.
        """
        if not self.shows_children:
            return self._joined_results(block, generated, texts)
        token_ids: list[int] = []
        for child, text in zip(block.children, texts, strict=True):
            token_ids += (*child.header, *text, *self.closing(text))
        continues = self._continues(texts)
        token_ids += self.suffix_ids if continues else ()
        return JoinedText(len(generated), tuple(token_ids), continues)

    def num_kept(self, generated: Sequence[int]) -> int:
        """Return how many of a parent's tokens since its last join stay before a joined text."""
        if self.definition.join is None or self.definition.join.replaces is None:
            return len(generated)
        decode = self._resolved.decode
        return _num_tokens_within(
            generated, before_join(self.definition, decode(generated)), decode
        )

    def closing(self, text: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens to add to a child's text that nothing has closed."""
        return () if self.is_closed(text) else self.close_ids

    def _continues(self, texts: Sequence[Sequence[int]]) -> bool:
        join = self.definition.join
        if join is None or join.unclosed == "continue":
            return True
        return all(map(self.is_closed, texts))

    def _headers(self, opened: Sequence[Branch]) -> list[tuple[int, ...]]:
        """Return the format's own tokens before each child's text."""
        if not self.shows_children:
            return [()] * len(opened)
        join = self.definition.join
        assert join is not None
        prefix = self._resolved.encode(join.prefix)
        headers: list[tuple[int, ...]] = []
        for branch in opened:
            is_first = not headers and join.first_header is not None
            template = (join.first_header or "") if is_first else join.header
            headers.append(prefix + self._resolved.fill(template, branch))
            prefix = ()
        return headers

    def _joined_results(
        self, block: OpenBlock, generated: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> JoinedText:
        """Join results that are computed from the children's texts."""
        resolved, join = self._resolved, self.definition.join
        assert join is not None
        kept = before_join(self.definition, resolved.decode(generated))
        decoded = [resolved.decode(text) for text in texts]
        num_kept = self.num_kept(generated)
        rest = kept[len(resolved.decode(generated[:num_kept])) :]
        pieces = [resolved.encode_written(rest), resolved.encode(join.prefix)]
        for index, (branch, text) in enumerate(zip(block.branches, decoded, strict=True)):
            header, result = header_of(join, index, branch, text)
            pieces.append(resolved.fill(header, branch, result=result))
            if join.without_result is None:
                closing = () if self.is_closed(texts[index]) else resolved.encode(join.close)
                pieces += [tuple(texts[index]), closing]
        continues = self._continues(texts)
        pieces.append(resolved.encode(join.suffix) if continues else ())
        if join.without_result is None:
            joined = tuple(token_id for piece in pieces for token_id in piece)
        else:
            text = rest + joined_text(self.definition, block.branches, decoded)
            joined = resolved.as_one_text(pieces, text)
        return JoinedText(num_kept, joined, continues)


class OpenForks:
    """Children that a thread has forked and not joined, where a parent joins.

    Scheduler and API process each have one for a thread, and give it the same tokens.

    num_children: forks so far. marker_ids: tokens that need to be read.
    """

    def __init__(self, rules: BlockRules) -> None:
        self._rules = rules
        self._by_number: dict[str, JoinPoint] = {}
        self.num_children = 0
        self.marker_ids = rules.marker_ids

    def read(self, generated: Sequence[int]) -> OpenBlock | JoinPoint | None:
        """Return what the last of a thread's tokens since its last join completes.

        A fork with the number of an open one, and a join without one, are text: None.
        """
        block = self._rules.fork(generated)
        if block is not None:
            number = block.branches[0].number
            if number in self._by_number:
                return None
            alone = replace(block, num_inherited=None)
            self._by_number[number] = JoinPoint(self.num_children, alone)
            self.num_children += 1
            return block
        joined = self._rules.joined_number(generated)
        return None if joined is None else self._by_number.pop(joined, None)


def split_at_blocks(
    rules: BlockRules,
    token_ids: Sequence[int],
    prompt: Callable[[], Sequence[int]],
    *,
    has_ended: bool,
    num_children: int,
) -> Iterator[tuple[int, OpenBlock]]:
    """Yield, for each block that a thread has opened, the number of its tokens up to there.

    `token_ids` is everything that it has generated, without joined text. A token with which a
    thread ends opens no block. If the thread has ended, and its last token completes the trigger,
    `num_children` tells: it is the number of its children that are known.
    """
    start = num_opened = 0
    for index, token_id in enumerate(token_ids):
        if token_id not in rules.marker_ids:
            continue
        block = rules.open(token_ids[start : index + 1], prompt)
        if block is None:
            continue
        if has_ended and index == len(token_ids) - 1 and num_opened >= num_children:
            return
        start = index + 1
        num_opened += len(block.children)
        yield start, block


def split_at_forks(
    forks: OpenForks,
    token_ids: Sequence[int],
    *,
    has_ended: bool,
    stopped: bool,
    num_children: int,
) -> Iterator[tuple[int, OpenBlock | JoinPoint]]:
    """Yield, for each fork and join of a thread, the number of its tokens up to there.

    Arguments are as in `split_at_blocks`. A last token that forks tells nothing either, and one
    that is a stop token of the client joins nothing.
    """
    start = 0
    for index, token_id in enumerate(token_ids):
        if token_id not in forks.marker_ids:
            continue
        event = forks.read(token_ids[start : index + 1])
        if event is None:
            continue
        if has_ended and index == len(token_ids) - 1:
            is_fork = isinstance(event, OpenBlock)
            if forks.num_children > num_children if is_fork else stopped:
                return
        if isinstance(event, JoinPoint):
            start = index + 1
        yield index + 1, event


def _completing_ids(trigger: str, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens whose text can complete a trigger of several tokens."""
    ids: set[int] = set()
    for token_id in tokenizer.get_vocab().values():
        text = str(tokenizer.decode([token_id]))
        if trigger[-1] in text and (
            trigger in text or any(trigger.endswith(text[:end]) for end in range(1, len(text) + 1))
        ):
            ids.add(token_id)
    return frozenset(ids)


def _num_tokens_within(
    token_ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]
) -> int:
    """Return how many of the first tokens spell a part of a text that begins with them."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(decode(token_ids[:middle])):
            low = middle
        else:
            high = middle - 1
    return low
