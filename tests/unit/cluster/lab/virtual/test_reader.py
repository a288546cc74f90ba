from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from apar_core.tree import ROOT_THREAD, ParagraphTree, child_thread
from apar_core.tree.reader_times import ReaderTimes
from apar_core.tree.restore import TreeStream
from apar_core.tree.thread_names import replay_key
from cluster.lab.virtual.reader import ScriptReader

FORK, END = 1, 2


@st.composite
def scripts(draw: st.DrawFn) -> dict[str, list[int]]:
    """Threads of an answer by replay key: text, fork tokens, and an end token, two levels deep."""
    found: dict[str, list[int]] = {}

    def add(key: str, depth: int) -> None:
        num_forks = draw(st.integers(0, 3)) if depth < 2 else 0
        script: list[int] = []
        for _ in range(num_forks):
            script += [9] * draw(st.integers(0, 3)) + [FORK]
        found[key] = [*script, *[9] * draw(st.integers(0, 4)), END]
        for ordinal in range(num_forks):
            add(f"{key}.{ordinal}" if key else str(ordinal), depth + 1)

    add("", 0)
    return found


@given(scripts(), st.data())
def test_text_is_seen_when_the_ordered_stream_has_it(
    written: dict[str, list[int]], data: st.DataObject
) -> None:
    """In each step some of the open threads generate a token, in any order."""
    reader = ScriptReader("r", written, fork_id=FORK, end_id=END)
    tree: ParagraphTree[int] = ParagraphTree()
    stream = TreeStream(tree)
    generated: dict[str, int] = defaultdict(int)
    open_threads = [ROOT_THREAD]
    num_children: dict[object, int] = defaultdict(int)
    seen = ReaderTimes()
    silences_s: list[float] = []
    now_s = 0.0
    while open_threads:
        now_s += 1.0
        for thread in data.draw(
            st.lists(st.sampled_from(open_threads), min_size=1, max_size=4, unique=True)
        ):
            name = "~".join(["r", *filter(None, replay_key(thread).split("."))])
            token = written[replay_key(thread)][generated[name]]
            generated[name] += 1
            if token == END:
                tree.finish(thread)
                open_threads.remove(thread)
            elif token == FORK:
                child = child_thread(thread, num_children[thread])
                num_children[thread] += 1
                tree.fork(thread, child)
                open_threads.append(child)
            else:
                tree.append(thread, [token])
        reader.advance(generated, now_s)
        silence_s = seen.add(len(stream.take()), now_s)
        silences_s += [] if silence_s is None else [silence_s]

    assert reader.times == seen
    assert reader.silence_s(1.0) == max(silences_s, default=0.0)
    assert reader.silence_s(0.0) == min(silences_s, default=0.0)


def test_a_fork_token_of_a_request_that_does_not_fork_is_text() -> None:
    reader = ScriptReader("r", {"": [9, FORK, 9, END]}, fork_id=None, end_id=END)
    for number in range(1, 5):
        reader.advance({"r": number}, float(number))

    assert (reader.times.first_s, reader.times.last_s) == (1.0, 3.0)
    assert reader.times.certain_s == 2.0
    assert reader.silence_s(1.0) == 1.0
