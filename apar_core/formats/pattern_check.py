"""Refuses regular expressions that can take very long, before an engine uses them.

Patterns of a format run in the scheduler on what a model writes, and again in the API process. A
time limit would let the two differ, so a pattern is checked once, when it is configured. `re` tries
alternatives one after the other. That takes exponential time if two ways through a loop can read
the same text, and cubic time if two loops can share it: a search begins at every character. The
ways are those of the Glushkov automaton (Weideman et al., "Analyzing Matching Time Behavior of
Backtracking Regular Expression Matchers by Using Ambiguity of NFA", CIAA 2016). The check is
conservative: some harmless patterns are refused too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import combinations, permutations, product
from typing import Any

# Private modules of `re`, the same from Python 3.11 to 3.14.
_compiler: Any = import_module("re._compiler")
_parser: Any = import_module("re._parser")
ops: Any = import_module("re._constants")

# A fixed number of repetitions is written out up to this one; others count as a loop.
_MANY = 8
_MAX_POSITIONS = 500
_MAX_WAYS = 1000
_MAX_STEPS = 200_000
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT)
# Beside ASCII and the pattern's own characters: letters, digits, blanks and signs.
_SAMPLES = [*map(chr, range(128)), *"éßЖ中٣４\u00a0\u2003…😀"]


@dataclass(slots=True)
class _Part:
    """Positions with which a part of a pattern begins and ends; and whether it can be empty."""

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    is_empty: bool = True


class _Automaton:
    """Characters of each position of a pattern, and how often one follows another."""

    def __init__(self, pattern: str) -> None:
        self.characters: list[frozenset[str]] = []
        self.follows: Counter[tuple[int, int]] = Counter()
        own = {chr(max(0, ord(each) + step)) for each in pattern for step in (-1, 0, 1)}
        self._alphabet = sorted({*_SAMPLES, *own})
        parsed = _parser.parse(pattern)
        self._flags = parsed.state.flags
        self._has_conditions = False
        whole = self._sequence(parsed)
        # Behind these, a match can no longer fail.
        self.safe = frozenset(() if self._has_conditions else whole.last)
        # A search begins at every character: a last position reads what stands before the match.
        start = len(self.characters)
        self.characters.append(frozenset(self._alphabet))
        self._follow([start], [start, *whole.first])
        self.after: list[list[int]] = [[] for _ in self.characters]
        for before, behind in self.follows:
            self.after[before].append(behind)
        self.reached = self._all_reached()

    def _sequence(self, parsed: Iterable[tuple[Any, Any]]) -> _Part:
        whole = _Part()
        for operation, argument in parsed:
            whole = self._joined(whole, self._part(operation, argument))
        return whole

    def _part(self, operation: Any, argument: Any) -> _Part:
        if operation is ops.AT:
            self._has_conditions = True
            return _Part()
        if operation in (ops.ASSERT, ops.ASSERT_NOT):
            self._has_conditions = True
            # A way that ends; what follows begins beside it.
            return _Part(self._sequence(argument[1]).first)
        if operation is ops.SUBPATTERN:
            _, added, removed, inner = argument
            outer, self._flags = self._flags, (self._flags | added) & ~removed
            part = self._sequence(inner)
            self._flags = outer
            return part
        if operation is ops.ATOMIC_GROUP:
            return self._sequence(argument)
        if operation is ops.BRANCH:
            parts = [self._sequence(each) for each in argument[1]]
            if sum(part.is_empty for part in parts) > 1:
                raise ValueError("can take exponential time: two alternatives can be empty")
            return _Part(
                [each for part in parts for each in part.first],
                [each for part in parts for each in part.last],
                any(part.is_empty for part in parts),
            )
        if operation in _REPEATS:
            return self._repeated(*argument)
        if operation in (ops.GROUPREF, ops.GROUPREF_EXISTS):
            raise ValueError("back-references are not supported")
        return self._position(operation, argument)

    def _repeated(self, least: int, most: int, body: Any) -> _Part:
        whole = self._sequence(body)
        if whole.is_empty:
            raise ValueError("can take exponential time: what a repetition repeats can be empty")
        if most > 1 and not least == most <= _MANY:
            self._follow(whole.last, whole.first)
        elif most > 1:
            for _ in range(most - 1):
                whole = self._joined(whole, self._sequence(body))
        return _Part(whole.first, whole.last, least == 0)

    def _joined(self, left: _Part, right: _Part) -> _Part:
        self._follow(left.last, right.first)
        return _Part(
            left.first + (right.first if left.is_empty else []),
            right.last + (left.last if right.is_empty else []),
            left.is_empty and right.is_empty,
        )

    def _follow(self, last: list[int], first: list[int]) -> None:
        self.follows.update(product(last, first))

    def _position(self, operation: Any, argument: Any) -> _Part:
        state = _parser.State()
        one = _compiler.compile(_parser.SubPattern(state, [(operation, argument)]), self._flags)
        self.characters.append(frozenset(filter(one.fullmatch, self._alphabet)))
        if len(self.characters) > _MAX_POSITIONS:
            raise ValueError(f"is longer than {_MAX_POSITIONS} characters, repetitions written out")
        position = len(self.characters) - 1
        return _Part([position], [position], False)

    def _all_reached(self) -> list[set[int]]:
        """Return for each position those that can follow it at any distance."""
        positions = range(len(self.characters))
        reached = [set(each) for each in self.after]
        for middle, each in product(positions, positions):
            if middle in reached[each]:
                reached[each] |= reached[middle]
        return reached

    def loops(self) -> Iterator[set[int]]:
        """Yield the sets of positions that lead to each other."""
        seen: set[int] = set()
        for each, reached in enumerate(self.reached):
            if each in reached and each not in seen:
                loop = {other for other in reached if each in self.reached[other]}
                seen |= loop
                yield loop

    def overlap(self, one: int, other: int) -> bool:
        """Return whether two positions can read the same character."""
        return not self.characters[one].isdisjoint(self.characters[other])


def check_pattern(pattern: str) -> None:
    """Raise ValueError for a pattern that can take exponential time, or cubic time and more."""
    automaton = _Automaton(pattern)
    loops = list(automaton.loops())
    for loop in loops:
        if any(automaton.follows[one, other] > 1 for one in loop for other in loop):
            raise ValueError(
                "can take exponential time: a repetition in a repetition reads the same text in "
                "several ways; let each round begin with a character that ends the inner one"
            )
        if any(
            automaton.overlap(one, other)
            for each in loop
            for one, other in combinations(loop.intersection(automaton.after[each]), 2)
        ):
            raise ValueError(
                "can take exponential time: parts of a repetition can read the same text; let "
                "its alternatives begin with different characters"
            )
    _check_ways(automaton, loops)
    _check_degree(automaton, loops)


def _check_ways(automaton: _Automaton, loops: Sequence[set[int]]) -> None:
    """Raise ValueError if many ways without a round of a loop can read the same text."""
    loop_of = {each: loop for loop in loops for each in loop}
    ways: dict[int, int] = {}
    # The positions that follow a position are handled before it, except those of its own loop.
    for each in sorted(
        range(len(automaton.after)), key=lambda each: len(automaton.reached[each] | {each})
    ):
        readers: Counter[str] = Counter()
        for other in set(automaton.after[each]) - loop_of.get(each, set()):
            number = max(ways[inner] for inner in loop_of.get(other, {other}))
            number *= automaton.follows[each, other]
            readers.update(dict.fromkeys(automaton.characters[other], number))
        ways[each] = max(readers.values(), default=1)
        if ways[each] > _MAX_WAYS:
            raise ValueError(
                f"can take exponential time: more than {_MAX_WAYS} ways can read the same text; "
                "let optional parts and alternatives begin with different characters"
            )


def _check_degree(automaton: _Automaton, loops: Sequence[set[int]]) -> None:
    """Raise ValueError for cubic time: two pairs of loops that share text, one after the other.

    The search itself is a loop. Source: Weber and Seidl, "On the degree of ambiguity of finite
    automata" (1991), condition IDA.
    """
    pairs = [
        (one, other)
        for one, other in permutations(loops, 2)
        if not other <= automaton.safe and _can_share(automaton, one, other)
    ]
    for (_, end), (start, _) in product(pairs, pairs):
        if start <= automaton.reached[min(end)]:
            raise ValueError(
                "can take very long: two repetitions can read the same text; exclude from the "
                "first what the second one reads, for example [^\\n:]* instead of .*"
            )


def _can_share(automaton: _Automaton, one_loop: set[int], other_loop: set[int]) -> bool:
    """Return whether a text can be read by the one loop, by the other, and on the way between."""
    after, characters = automaton.after, automaton.characters
    num_steps = 0
    for one, other in product(one_loop, other_loop):
        open_states = [(one, one, other)]
        seen = set(open_states)
        while open_states:
            state = open_states.pop()
            first, middle, second = (after[each] for each in state)
            for step in product(
                one_loop.intersection(first), middle, other_loop.intersection(second)
            ):
                num_steps += 1
                if num_steps > _MAX_STEPS:
                    raise ValueError("is too complex to check; let fewer parts repeat")
                if step in seen or not frozenset.intersection(*(characters[each] for each in step)):
                    continue
                if step == (one, other, other):
                    return True
                seen.add(step)
                open_states.append(step)
    return False
