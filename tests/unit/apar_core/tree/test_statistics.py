from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from apar_core.tree import (
    ROOT_THREAD,
    ParagraphTree,
    ThreadId,
    TreeStatistics,
    thread_spans,
    tree_statistics,
    unforked_statistics,
)
from apar_core.tree.statistics import cached_tokens_by_step
from tests.unit.apar_core.tree.scripts import Event, apply, interleavings

CHILD = ThreadId("child")


def test_an_answer_without_forks_costs_what_sequential_decoding_costs() -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    tree.append(ROOT_THREAD, [1, 2, 3])
    tree.finish(ROOT_THREAD)

    # Prompt of 10. Steps: 3 items and the end token. Attended: 10 + 11 + 12 + 13 = 46. Before the
    # end token 10 + 3 tokens are cached.
    assert tree_statistics(tree, 10) == TreeStatistics(
        threads=1,
        forks=0,
        max_depth=0,
        decode_steps=4,
        sequential_steps=4,
        attended_tokens=46,
        sequential_attended_tokens=46,
        max_cached_tokens=13,
        sequential_max_cached_tokens=13,
        text_tokens=3,
        control_tokens=1,
    )


def test_one_fork_worked_out_by_hand() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    tree.append(ROOT_THREAD, ["a", "b"])
    tree.fork(ROOT_THREAD, CHILD)
    tree.append(ROOT_THREAD, ["c"])
    tree.finish(ROOT_THREAD)
    tree.append(CHILD, ["x", "y", "z"])
    tree.finish(CHILD)

    # Prompt p of 5.   root: a b [F] c E        child, after p a b [F] [C]: x y z E
    # step         1   2   3    4   5   6   7
    # root         a   b   [F]  c   E
    # child                     x   y   z   E           decode_steps = 7
    # attended, root: 5 6 7 8 9 = 35;  child: before x stand p a b [F] [C] = 9: 9 10 11 12 = 42
    # cached before the step's tokens:
    #   step 4: p a b [F] = 8, and [C] = 9;  step 5: those and c, x = 11;
    #   step 6: root is gone and c with it: p a b [F] [C] x y = 11;  step 7: and z = 12
    # Sequentially: a b x y z c E = 7 steps, 5 + 6 + ... + 11 = 56 attended, 5 + 6 cached.
    assert tree_statistics(tree, 5) == TreeStatistics(
        threads=2,
        forks=1,
        max_depth=1,
        decode_steps=7,
        sequential_steps=7,
        attended_tokens=77,
        sequential_attended_tokens=56,
        max_cached_tokens=12,
        sequential_max_cached_tokens=11,
        text_tokens=6,
        control_tokens=4,
    )


def test_two_details_and_a_nested_one_worked_out_by_hand() -> None:
    second, nested = ThreadId("second"), ThreadId("nested")
    tree: ParagraphTree[str] = ParagraphTree()
    tree.append(ROOT_THREAD, ["a"])
    tree.fork(ROOT_THREAD, CHILD)
    tree.append(ROOT_THREAD, ["b"])
    tree.fork(ROOT_THREAD, second)
    tree.finish(ROOT_THREAD)
    tree.append(CHILD, ["u"])
    tree.fork(CHILD, nested)
    tree.append(CHILD, ["v"])
    tree.finish(CHILD)
    tree.append(nested, ["m", "n", "o"])
    tree.finish(nested)
    tree.append(second, ["x", "y"])
    tree.finish(second)

    # Prompt p of 4.
    # step     1   2    3   4    5   6   7   8
    # root     a   [F]  b   [F]  E
    # child             u   [F]  v   E             reads p a [F] [C] = 7
    # nested                     m   n   o   E     reads p a [F] [C] u [F] [C] = 10
    # second                     x   y   E         reads p a [F] b [F] [C] = 9
    # attended: root 4 5 6 7 8 = 30; child 7 8 9 10 = 34; nested 10 11 12 13 = 46;
    #   second 9 10 11 = 30; together 140
    # cached before the step's tokens (p = 4 always; root's own + child's + nested's + second's):
    #   5: root a F b F = 4, child C u F = 3, nested C, second C        = 4 + 4 + 3 + 1 + 1 = 13
    #   6: root still read to its second fork = 4, child C u F v = 4, nested C m, second C x = 16
    #   7: root 4, child gone but read to its fork C u F = 3, nested C m n, second C x y = 17
    #   8: second gone, so root a F = 2, child 3, nested C m n o = 4                     = 13
    # Sequentially: a u m n o v b x y E: 10 steps, 4 + ... + 13 = 85 attended, 4 + 9 cached.
    assert tree_statistics(tree, 4) == TreeStatistics(
        threads=4,
        forks=3,
        max_depth=2,
        decode_steps=8,
        sequential_steps=10,
        attended_tokens=140,
        sequential_attended_tokens=85,
        max_cached_tokens=17,
        sequential_max_cached_tokens=13,
        text_tokens=9,
        control_tokens=10,
    )


def test_a_thread_that_was_cut_has_no_end_token() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    tree.append(ROOT_THREAD, ["a", "b"])
    tree.fork(ROOT_THREAD, CHILD)
    tree.append(CHILD, ["x"])
    tree.finish(ROOT_THREAD)
    tree.finish(CHILD, ended=False)

    # Prompt p of 5; root: a b [F] E; child from step 4: x, then cut.
    # attended: 5 + 6 + 7 + 8, and x after p a b [F] [C] = 9; cached in step 4: p a b [F] [C] = 9.
    # Sequentially a b x and no end token: 5 + 6 + 7; 5 + 2 cached before x.
    statistics = tree_statistics(tree, 5)

    assert statistics.decode_steps == 4
    assert statistics.sequential_steps == 3
    assert statistics.attended_tokens == 35
    assert statistics.sequential_attended_tokens == 18
    assert statistics.max_cached_tokens == 9
    assert statistics.sequential_max_cached_tokens == 7
    assert statistics.control_tokens == 3


def test_an_answer_cut_before_its_first_token_caches_only_the_prompt() -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    tree.finish(ROOT_THREAD, ended=False)

    statistics = tree_statistics(tree, 6)

    assert (statistics.decode_steps, statistics.sequential_steps) == (0, 0)
    assert (statistics.max_cached_tokens, statistics.sequential_max_cached_tokens) == (6, 6)
    assert (statistics.attended_tokens, statistics.control_tokens) == (0, 0)


def test_statistics_of_choices_are_summed_except_steps_and_depth() -> None:
    left = TreeStatistics(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    right = TreeStatistics(10, 20, 1, 40, 3, 60, 70, 80, 90, 100, 110)

    assert left + right == TreeStatistics(11, 22, 3, 40, 5, 66, 77, 88, 99, 110, 121)


@dataclass
class SimulatedThread:
    """Thread of the brute-force simulation: tokens on its path, and tokens to come."""

    path: list[object]
    script: list[tuple[str, ThreadId | None]]


def scripts_of(events: list[Event]) -> dict[ThreadId, list[tuple[str, ThreadId | None]]]:
    scripts: dict[ThreadId, list[tuple[str, ThreadId | None]]] = {ROOT_THREAD: []}
    for event in events:
        script = scripts[event.thread]
        if event.kind == "text":
            script.extend(("text", None) for _ in event.items)
        elif event.kind == "fork":
            script.append(("fork", event.child))
            scripts[event.child] = []
        elif event.kind == "end":
            script.append(("end", None))
    return scripts


def simulate(events: list[Event], num_prompt_tokens: int) -> tuple[int, int, int]:
    """Return (steps, attended, most cached) from the paper's schedule, step by step."""
    scripts = scripts_of(events)
    prompt: list[object] = [("prompt", i) for i in range(num_prompt_tokens)]
    live = [SimulatedThread(prompt, scripts[ROOT_THREAD])]
    steps = attended = 0
    most_cached = num_prompt_tokens
    while live := [thread for thread in live if thread.script]:
        steps += 1
        most_cached = max(most_cached, len({token for thread in live for token in thread.path}))
        children = []
        for thread in live:
            attended += len(thread.path)
            _, child = thread.script[0]
            thread.script = thread.script[1:]
            thread.path = [*thread.path, object()]
            if child is not None:
                children.append(SimulatedThread([*thread.path, object()], scripts[child]))
        live += children
    return steps, attended, most_cached


@given(interleavings(), st.integers(0, 20))
def test_statistics_equal_a_simulation_step_by_step(events: list[Event], prompt: int) -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    for event in events:
        apply(tree, event)

    statistics = tree_statistics(tree, prompt)

    assert (
        statistics.decode_steps,
        statistics.attended_tokens,
        statistics.max_cached_tokens,
    ) == simulate(events, prompt)


def cached_in_each_step(tree: ParagraphTree[int]) -> list[int]:
    """Return the tokens held in each step, computed over all steps instead of the changes."""
    spans = thread_spans(tree)
    num_steps = spans[ROOT_THREAD].subtree_end
    changes = [0] * (num_steps + 2)
    growth_changes = [0] * (num_steps + 2)
    for thread, span in spans.items():
        if span.num_generated == 0:
            continue
        record = tree.threads[thread]
        num_child_tokens = 0 if record.parent is None else 1
        changes[span.start + 1] += num_child_tokens
        growth_changes[span.start + 1] += 1
        growth_changes[span.end] -= 1
        held, step = span.num_generated - 1, span.end + 1
        for child in reversed(record.children):
            reader = spans[child]
            if reader.subtree_end >= step:
                changes[step] += reader.num_shared - held
                held, step = reader.num_shared, reader.subtree_end + 1
        changes[span.subtree_end + 1] -= held + num_child_tokens
    grown = [0, *accumulate(growth_changes)][: num_steps + 2]
    return list(accumulate(change + more for change, more in zip(changes, grown, strict=True)))


@given(interleavings(), st.integers(1, 40), st.integers(0, 20))
def test_the_largest_cache_is_found_at_the_changes(
    events: list[Event], length: int, prompt: int
) -> None:
    """Long paragraphs put the changes far apart."""
    tree: ParagraphTree[int] = ParagraphTree()
    for event in events:
        apply(tree, replace(event, items=event.items * length))

    by_step = cached_in_each_step(tree)

    assert cached_tokens_by_step(tree, thread_spans(tree)) == by_step
    assert tree_statistics(tree, prompt).max_cached_tokens == prompt + max(by_step)


@given(st.integers(0, 200), st.integers(0, 50), st.booleans())
def test_unforked_statistics_equal_those_of_a_tree(
    num_tokens: int, prompt: int, ended: bool
) -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    tree.append(ROOT_THREAD, range(num_tokens))
    tree.finish(ROOT_THREAD, ended=ended)

    assert unforked_statistics(num_tokens, prompt, ended=ended) == tree_statistics(tree, prompt)


@given(interleavings())
def test_a_growing_tree_counts_as_cut_off_now(events: list[Event]) -> None:
    tree: ParagraphTree[int] = ParagraphTree()
    for event in events:
        if event.kind in ("text", "fork"):
            apply(tree, event)
    growing = tree_statistics(tree, 3)

    for thread in tree.threads:
        tree.finish(thread, ended=False)

    assert tree_statistics(tree, 3) == growing
