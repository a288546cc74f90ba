"""Random trees for property tests: the text and forks of each thread, in any interleaving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st

from apar_core.tree import ROOT_THREAD, ParagraphTree, ThreadId


@dataclass(frozen=True)
class Event:
    """Event of a thread: a fork if `child` is set, else text."""

    kind: Literal["text", "fork", "end", "cut"]
    thread: ThreadId
    items: tuple[int, ...] = ()
    child: ThreadId = ROOT_THREAD


def apply(tree: ParagraphTree[int], event: Event) -> None:
    if event.kind == "text":
        tree.append(event.thread, event.items)
    elif event.kind == "fork":
        tree.fork(event.thread, event.child)
    else:
        tree.finish(event.thread, ended=event.kind == "end")


@st.composite
def interleavings(draw: st.DrawFn, max_events: int = 40) -> list[Event]:
    """Draw the events of a request in a possible order; every thread finishes."""
    live = [ROOT_THREAD]
    events: list[Event] = []
    num_items = num_forks = 0
    for _ in range(draw(st.integers(0, max_events))):
        if not live:
            break
        thread = live[draw(st.integers(0, len(live) - 1))]
        kind = draw(st.sampled_from(["text", "text", "text", "fork", "fork", "end", "cut"]))
        if kind == "text":
            count = draw(st.integers(0, 3))
            events.append(Event("text", thread, tuple(range(num_items, num_items + count))))
            num_items += count
        elif kind == "fork":
            num_forks += 1
            child = ThreadId(f"thread-{num_forks}")
            events.append(Event("fork", thread, child=child))
            live.append(child)
        else:
            events.append(Event("end" if kind == "end" else "cut", thread))
            live.remove(thread)
    for thread in draw(st.permutations(live)):
        events.append(Event(draw(st.sampled_from(["end", "cut"])), thread))
    return events


def flat_segments(events: list[Event]) -> list[tuple[list[int], bool]]:
    """Naive definition of the reading order: (items, closed) of each paragraph.

    A flat list into which a fork inserts the child's and then the parent's new paragraph, right
    behind the parent's old one.
    """
    segments: list[tuple[ThreadId, list[int], list[bool]]] = [(ROOT_THREAD, [], [])]
    for event in events:
        index = max(i for i, (owner, _, _) in enumerate(segments) if owner == event.thread)
        _, items, closed = segments[index]
        if event.kind == "text":
            items.extend(event.items)
            continue
        closed.append(True)
        if event.kind == "fork":
            segments[index + 1 : index + 1] = [(event.child, [], []), (event.thread, [], [])]
    return [(items, bool(closed)) for _, items, closed in segments]
