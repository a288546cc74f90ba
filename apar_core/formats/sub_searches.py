"""Messages and results of APR's sub searches.

Source: Adaptive Parallel Reasoning (arXiv 2504.15466), repository Parallel-Reasoning/APR,
`tinyrl/rollout/apr_utils.py`. A parent names the nodes of a search tree that children shall
explore. Each child reads a description of its node, computed from what the parent has written of
it, and not the parent's text. A child's result is the solution that it states last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

CALL = "<Calling Sub Searches>"
END_CALL = "<End Calling Sub Searches>"
_GOAL = "Goal Reached"
_STARTED = re.compile(r"<Start Sub Search[^<>\n]*> Moving to Node #(?P<node>[\d,]+)[ \t]*$", re.M)
_VISITED = re.compile(
    r"Moving to Node #(?P<node>[\d,]+)[ \t]*\n"
    r"Current State: ?(?P<target>-?\d+):(?P<numbers>\[[^\]\n]*\]), ?"
    r"Operations: ?(?P<operations>\[[^\]\n]*\])"
)
_CREATED = re.compile(
    r"Generated Node #(?P<node>[\d,]+): ?(?P<target>-?\d+):(?P<numbers>\[[^\[\]\n]*\]) ?"
    r"Operation: ?(?P<operation>[^\n]*)"
)


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_STRING = re.compile(r"'[^'\\]*'|\"[^\"\\]*\"")


@dataclass(frozen=True, slots=True)
class _Node:
    target: str
    numbers: list[str]
    operations: list[str]


@dataclass(frozen=True, slots=True)
class SubSearch:
    """A node that a child shall explore, and the message that tells it so."""

    node: str
    message: str


def sub_searches(generated: str, prompt: str) -> Iterator[SubSearch]:
    """Yield a child for each node that the last call in `generated` names.

    Nodes may be described in `prompt`. A node that was never described opens no child.
    """
    call = generated.rpartition(CALL)[2].partition(END_CALL)[0]
    nodes = _described_nodes(prompt + generated)
    for match in _STARTED.finditer(call):
        node = nodes.get(match["node"])
        if node is None:
            continue
        name = f"#{match['node']}"
        numbers = ", ".join(node.numbers)
        message = (
            f"Moving to Node {name}\n"
            f"Current State: {node.target}:[{numbers}], Operations: {node.operations}"
        )
        yield SubSearch(name, message)


def search_result(trace: str) -> str | None:
    """Return what a child states as its solution; None if it found none.

    `trace` is its message and its text. A search that succeeds says so when it reaches the goal,
    and once more after the solution.
    """
    last = trace.rfind(_GOAL)
    goal = trace.rfind(_GOAL, 0, last) if last >= 0 else -1
    if goal < 0:
        return None
    return trace[goal:].strip()[len(_GOAL) + 1 :]


def _described_nodes(text: str) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    for match in _VISITED.finditer(text):
        numbers = _items(match["numbers"], _NUMBER)
        operations = _items(match["operations"], _STRING)
        if numbers is not None and operations is not None:
            operations = [operation[1:-1] for operation in operations]
            nodes[match["node"]] = _Node(match["target"], numbers, operations)
    for match in _CREATED.finditer(text):
        parent = nodes.get(match["node"].rpartition(",")[0])
        numbers = _items(match["numbers"], _NUMBER)
        if match["node"] in nodes or parent is None or numbers is None:
            continue
        operations = [*parent.operations, match["operation"].strip()]
        nodes[match["node"]] = _Node(match["target"], numbers, operations)
    return nodes


def _items(text: str, kind: re.Pattern[str]) -> list[str] | None:
    """Return the items of a list in brackets; None if one of them is of another kind.

    The text may be a user's, and this runs in the engine: nothing in it is evaluated.
    """
    inner = text[1:-1].strip()
    items = [item.strip() for item in inner.split(",")] if inner else []
    return items if all(map(kind.fullmatch, items)) else None
