"""A format of parallel text as data: how a model marks what may be written at the same time.

Six facts: what triggers a fork; what a child begins with; where the prefix that it inherits is cut;
whether its parent continues or waits; how threads join; which positions tokens have. Scheduler and
output processor know these facts and no format by name. `shipped_formats.py` has the known ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from apar_core.formats.pattern_check import check_pattern
from apar_core.formats.sub_searches import search_result, sub_searches

_FIELDS = ("number", "topic", "message", "node", "result")
# What may be one token in a template: a tag, or a word in brackets, without a field.
_MARKER = re.compile(r"<[^<>{}\n]+>|\[[^\[\]{}\n]+\]")


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _checked_pattern(pattern: str | None, known: set[str]) -> str | None:
    """Return a pattern with the group `number`. Raises ValueError for others, and slow ones."""
    if pattern is None:
        return None
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    if "number" not in groups or not groups.keys() <= known:
        others = "".join(f" and `{name}`" for name in sorted(known - {"number"}))
        raise ValueError(f"needs the group (?P<number>...), and no named group but it{others}")
    check_pattern(pattern)
    return pattern


class Outlines(_Facts):
    """Which children a waiting parent opens: exactly one of the three ways."""

    pattern: str | None = Field(
        None,
        description="Regular expression with the group `number`, and perhaps `topic`: each match "
        "in what the parent has generated since its last join is a child. A repeated number counts "
        "once. Patterns that could take very long are refused.",
    )
    after: str | None = Field(
        None,
        description="Search only after the last occurrence of this text, if there is one.",
    )
    count: PositiveInt | None = Field(
        None, description="A fixed number of children; their numbers are 1, 2, ..."
    )
    messages: Literal["sub-searches"] | None = Field(
        None,
        description="Messages that each child reads instead of its parent's context: "
        "`sub-searches` are those of APR.",
    )

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        return _checked_pattern(pattern, {"number", "topic"})

    @model_validator(mode="after")
    def _check_one_way(self) -> Self:
        ways = [self.pattern, self.count, self.messages]
        if sum(way is not None for way in ways) != 1:
            raise ValueError("exactly one of `pattern`, `count` and `messages` is needed")
        if self.after is not None and self.pattern is None:
            raise ValueError("`after` has no effect without `pattern`")
        return self

    @property
    def fields(self) -> frozenset[str]:
        """Fields of templates that each child has a value for."""
        if self.pattern is not None:
            return frozenset(re.compile(self.pattern).groupindex)
        return frozenset({"number"} if self.count is not None else {"message", "node", "number"})


class Join(_Facts):
    """Join of the children's texts into the waiting parent's text.

    The joined text is `prefix`, then header and text of each child, then `suffix`. A child's text
    includes the text that ended it.
    """

    header: str = Field(description="Template before the text of a child.")
    first_header: str | None = Field(
        None, description="Template before the text of the first child; by default as `header`."
    )
    prefix: str = Field("", description="Text before the first header.")
    suffix: str = Field("", description="Text after the last child, where the parent continues.")
    close: str = Field(
        "", description="Text added to a child that ended without one of the texts of `child_end`."
    )
    unclosed: Literal["continue", "stop"] = Field(
        "continue",
        description="Whether the parent continues if a child needed `close`, or the answer ends.",
    )
    replaces: str | None = Field(
        None,
        description="The joined text replaces the parent's text from the last occurrence of this "
        "one on. By default it is appended.",
    )
    without_result: str | None = Field(
        None, description="Template instead of `header` for a child without a {result}."
    )
    result: tuple[str, str] | None = Field(
        None,
        description="Two texts: what a child has written between the last pair of them is its "
        "{result}. Without the second one, up to the child's end.",
    )
    pattern: str | None = Field(
        None,
        description="Where `parent` is `joins`: regular expression with the group `number`. Where "
        "the parent has written a match, it waits for the child of that number. Patterns that "
        "could take very long are refused.",
    )

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        return _checked_pattern(pattern, {"number"})

    @model_validator(mode="after")
    def _check_result(self) -> Self:
        if self.result is not None and self.without_result is None:
            raise ValueError("without_result: needed with `result`")
        if self.result is not None and not all(self.result):
            raise ValueError(f"result: two texts that are not empty are needed, got {self.result}")
        return self


class ListItems(_Facts):
    """Threads that begin after the heads of a list's items, in ordinary text."""

    ahead: PositiveInt = Field(
        4,
        description="How many items may be written beyond the one that the root thread waits for. "
        "Those after the end of the list, which no thread knows in advance, are cancelled.",
    )


class ParallelFormat(_Facts):
    """A format of parallel text. Source of the facts: `shipped_formats.py`, for each format."""

    name: str = Field(min_length=1, description="Name in configuration, reports and messages.")
    description: str = Field("", description="Where the format is from.")
    trigger: str = Field(
        "",
        description="Text after which the engine forks. One token of the vocabulary where the "
        "parent continues; else a token or any text. Where `parent` is `joins`, the text with "
        "which forks and joins end.",
    )
    items: ListItems | None = Field(
        None,
        description="Fork after the heads of a list's items instead of at a trigger. Only `name`, "
        "`description` and `parent: waits` go with it.",
    )
    child_seed: str = Field(
        "", description="Template of the text that is forced at the start of a child."
    )
    cut: Literal["after", "before", "nothing"] = Field(
        "after",
        description="How much of its parent's sequence a child inherits: up to and including the "
        "trigger, up to before it, or nothing (it then reads its seed alone).",
    )
    parent: Literal["continues", "waits", "joins"] = Field(
        description="Whether the parent continues beside its children, waits for all of them, or "
        "continues and waits for one of them where it asks for its text."
    )
    children_fork: bool = Field(
        False,
        description="Whether a trigger in a child forks. Else it is banned there if the parent "
        "continues, and ordinary text if it waits.",
    )
    outlines: Outlines | None = Field(None, description="The children of a waiting parent.")
    child_end: tuple[str, ...] = Field(
        (), description="Texts that end a child, besides the model's end tokens."
    )
    join: Join | None = Field(None, description="How a waiting parent continues.")
    replacement: str = Field(
        "", description="What stands in the text instead of the trigger where the parent continues."
    )
    positions: Literal["path"] = Field(
        "path", description="Position of a token: the number of tokens before it on its path."
    )
    tokens: tuple[str, ...] = Field(
        (),
        description="Texts that are one token each. A checkpoint with all of them has this format; "
        "without any, the format must be named.",
    )
    reserved: tuple[str, ...] = Field(
        (), description="Further texts that no prompt may contain as tokens."
    )

    @field_validator("positions", mode="before")
    @classmethod
    def _check_positions(cls, positions: Any) -> Any:
        if positions != "path":
            raise ValueError(
                "only `path` is served: shared or reserved positions need a model runner that "
                "numbers tokens itself"
            )
        return positions

    @model_validator(mode="after")
    def _check_parent(self) -> Self:
        if self.items is not None:
            others = self.model_fields_set - {"name", "description", "parent", "items"}
            for name in sorted(others):
                if getattr(self, name) != type(self).model_fields[name].get_default():
                    raise ValueError(f"{name}: has no effect with `items`")
            if self.parent != "waits":
                raise ValueError("parent: a thread waits for the items of its list")
            return self
        if not self.trigger:
            raise ValueError("trigger: needed, unless a format has `items`")
        if self.parent == "continues":
            for name in ("outlines", "join"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: has no effect where the parent continues")
            if self.cut == "nothing":
                raise ValueError("cut: `nothing` is possible only where the parent waits")
            if self.child_end:
                raise ValueError(
                    "child_end: possible only where the parent waits; elsewhere children end with "
                    "the model's end tokens"
                )
        else:
            for name in ("outlines", "join"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name}: needed where the parent waits")
            if self.replacement:
                raise ValueError("replacement: has no effect where the parent waits")
            self._check_join()
        if self.cut == "nothing" and not self.child_seed:
            raise ValueError("child_seed: needed where a child inherits nothing")
        if any(not text for text in self.child_end):
            raise ValueError("child_end: an empty text would end every child at once")
        self._check_templates()
        return self

    def _check_join(self) -> None:
        join, outlines = self.join, self.outlines
        assert join is not None
        assert outlines is not None
        if self.parent == "waits":
            if join.pattern is not None:
                raise ValueError("join.pattern: possible only where `parent` is `joins`")
            return
        if join.pattern is None:
            raise ValueError("join.pattern: needed where `parent` is `joins`")
        if outlines.pattern is None or outlines.after is not None:
            raise ValueError("outlines: `pattern` alone is needed where `parent` is `joins`")
        if join.unclosed != "continue" or join.replaces is not None or join.first_header:
            raise ValueError(
                "join: `unclosed: stop`, `replaces` and `first_header` are not possible where "
                "`parent` is `joins`"
            )
        if self.children_fork or self.cut == "before":
            raise ValueError(
                "children_fork, cut: `true` and `before` are not possible where `parent` is `joins`"
            )

    def _check_templates(self) -> None:
        known = frozenset() if self.outlines is None else self.outlines.fields
        templates = {"child_seed": (self.child_seed, known)}
        if self.join is not None:
            has_result = self.join.without_result is not None
            with_result = known | ({"result"} if has_result else set())
            templates["join.header"] = (self.join.header, with_result)
            templates["join.first_header"] = (self.join.first_header or "", with_result)
            templates["join.without_result"] = (self.join.without_result or "", known)
        for name, (template, fields) in templates.items():
            for field in template_fields(template):
                if field not in fields:
                    raise ValueError(
                        f"{name}: the field {{{field}}} is unknown; known: {sorted(fields)}"
                    )

    @property
    def waits(self) -> bool:
        """Whether threads wait for children, at once or where they ask for their texts."""
        return self.parent != "continues"

    @property
    def tier(self) -> int:
        """1 where the parent continues, 2 where it waits."""
        return 1 if self.parent == "continues" else 2

    @property
    def markers(self) -> frozenset[str]:
        """Texts that only the model or the engine may write as tokens, never a user."""
        if self.items is not None:
            return frozenset()
        join = self.join
        # With a parent that joins, the trigger is only how forks and joins end.
        triggers = {self.trigger} if self.parent != "joins" else set()
        texts = [*triggers, self.child_seed, self.replacement, *self.child_end]
        if join is not None:
            texts += [join.header, join.first_header or "", join.prefix, join.suffix]
            texts += [join.close, join.replaces or "", join.without_result or ""]
            texts += join.result or ()
        found = {marker for text in texts for marker in _MARKER.findall(text)}
        return frozenset({*triggers, *self.tokens, *self.reserved, *self.child_end, *found})


@dataclass(frozen=True, slots=True)
class Branch:
    """A child that a waiting parent opens.

    number: as written in the outline ("1", "1.2"); with a fixed count, "1", "2", ...
    topic: text of the outline, if the pattern has the group.
    message: what the child reads, if it reads no context; node: what the message is about.
    """

    number: str
    topic: str = ""
    message: str = ""
    node: str = ""

    def fill(self, template: str, *, result: str = "") -> str:
        """Return a template with this child's values."""
        values = {field: getattr(self, field, result) for field in _FIELDS}
        return template.format_map(values)


def branches(definition: ParallelFormat, generated: str, prompt: str = "") -> tuple[Branch, ...]:
    """Return the children that a waiting parent opens at a trigger, in the order of the join.

    `generated` is what the parent has written since its last join, up to and including the trigger.
    No outline is ever read from `prompt`; messages may refer to facts in it. An empty tuple: there
    is nothing to open, and the parent continues.
    """
    outlines = definition.outlines
    if outlines is None:
        return ()
    if outlines.count is not None:
        return tuple(Branch(str(number)) for number in range(1, outlines.count + 1))
    if outlines.messages is not None:
        return tuple(
            Branch(str(number), message=search.message, node=search.node)
            for number, search in enumerate(sub_searches(generated, prompt))
        )
    if outlines.pattern is None:
        return ()
    start = -1 if outlines.after is None else generated.rfind(outlines.after)
    found = re.finditer(outlines.pattern, generated[max(start, 0) :])
    by_number: dict[str, Branch] = {}
    for match in found:
        # Null characters mark what only looks like a marker: `ResolvedFormat.outline_text`.
        values = {name: text.replace("\0", "") for name, text in match.groupdict("").items()}
        by_number.setdefault(values["number"], Branch(**values))
    return tuple(by_number.values())


@dataclass(frozen=True, slots=True)
class JoinPart:
    """A piece of a joined text: a text of the format, or what a child has written.

    `child` is the child's index in `branches`, or None for the format's own text.
    """

    text: str
    child: int | None = None


def header_of(join: Join, index: int, branch: Branch, text: str) -> tuple[str, str]:
    """Return the template before a child's text in the joined text, and the child's {result}."""
    header = join.header
    if index == 0 and join.first_header is not None:
        header = join.first_header
    if join.without_result is None:
        return header, ""
    if join.result is None:
        result = search_result(branch.message + text)
    else:
        _, found, behind = text.rpartition(join.result[0])
        result = behind.partition(join.result[1])[0] if found else None
    return (join.without_result, "") if result is None else (header, result)


def join_parts(
    definition: ParallelFormat,
    opened: Sequence[Branch],
    texts: Sequence[str],
) -> Iterator[JoinPart]:
    """Yield the joined text of a waiting parent's children in pieces, without empty ones.

    `texts` are what the children have generated, without their seeds, with the text that ended
    them. A child's text is a piece of its own wherever it stays unchanged, so that its tokens can
    be taken as they are.
    """
    join = definition.join
    if join is None:
        return
    if join.prefix:
        yield JoinPart(join.prefix)
    for index, (branch, text) in enumerate(zip(opened, texts, strict=True)):
        header, result = header_of(join, index, branch, text)
        if filled := branch.fill(header, result=result):
            yield JoinPart(filled)
        if join.without_result is not None:
            continue
        if text:
            yield JoinPart(text, child=index)
        if not is_closed(definition, text) and join.close:
            yield JoinPart(join.close)
    if join.suffix and join_continues(definition, texts):
        yield JoinPart(join.suffix)


def joined_text(definition: ParallelFormat, opened: Sequence[Branch], texts: Sequence[str]) -> str:
    """Return the joined text of a waiting parent's children; arguments as for `join_parts`."""
    return "".join(part.text for part in join_parts(definition, opened, texts))


def is_closed(definition: ParallelFormat, text: str) -> bool:
    """Return whether a child's text ends with one of the texts that end a child."""
    return not definition.child_end or text.endswith(definition.child_end)


def join_continues(definition: ParallelFormat, texts: Sequence[str]) -> bool:
    """Return whether the parent continues after these texts of its children."""
    join = definition.join
    if join is None or join.unclosed == "continue":
        return True
    return all(is_closed(definition, text) for text in texts)


def before_join(definition: ParallelFormat, context: str) -> str:
    """Return the part of the parent's context that stays before the joined text."""
    replaces = None if definition.join is None else definition.join.replaces
    if replaces is None:
        return context
    start = context.rfind(replaces)
    return context if start < 0 else context[:start]


def template_fields(template: str) -> list[str]:
    """Return the names of a template's fields. Raises ValueError if it is none."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"not a template: {error} in {template!r}") from error
    fields = [each for each in parsed if each[1] is not None]
    for _, field, specification, conversion in fields:
        # They would let what a model writes decide how it is formatted.
        if specification or conversion:
            raise ValueError(
                f"not a template: the field {field!r} may have no format in {template!r}"
            )
    return [str(field) for _, field, _, _ in fields]
