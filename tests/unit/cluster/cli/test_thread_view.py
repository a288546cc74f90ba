from collections.abc import Sequence

from rich.console import Console

from apar_core.tree import ROOT_THREAD, ParagraphTree, ThreadId, TreeStatistics
from cluster.cli.thread_view import statistics_line, thread_view


def render(tree: ParagraphTree[str]) -> str:
    def decode(items: Sequence[str]) -> str:
        return " ".join(items)

    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(thread_view(tree, decode))
    return capture.get()


def test_threads_stand_where_they_forked_with_their_tokens_and_steps() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    first, second, nested = ThreadId("first"), ThreadId("second"), ThreadId("nested")
    tree.append(ROOT_THREAD, ["1.", "Tune:"])
    tree.fork(ROOT_THREAD, first)
    tree.append(ROOT_THREAD, ["2.", "Play:"])
    tree.fork(ROOT_THREAD, second)
    tree.append(first, ["By", "ear."])
    tree.fork(first, nested)
    tree.append(nested, ["Or", "[a", "fork]."])
    tree.append(second, ["Daily."])
    tree.finish(ROOT_THREAD)
    tree.finish(first)
    tree.finish(nested, ended=False)

    # first starts after the root's third token, nested after first's third, in step 6.
    assert render(tree).split("\n") == [
        "root  4 tokens, steps 1-7",
        "├── 1. Tune:",
        "├── first  2 tokens, steps 4-7",
        "│   ├── By ear.",
        "│   └── nested  3 tokens, steps 7-9, cut off",
        "│       └── Or [a fork].",
        "├── 2. Play:",
        "└── second  1 tokens, steps 7-7, cut off",
        "    └── Daily.",
        "",
    ]


def test_a_thread_that_never_ran_says_so() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    tree.fork(ROOT_THREAD, ThreadId("late"))

    assert "late  0 tokens, no step, cut off" in render(tree)


def test_savings_are_told_in_percent_of_sequential_decoding() -> None:
    statistics = TreeStatistics(
        threads=3,
        forks=2,
        max_depth=1,
        decode_steps=20,
        sequential_steps=41,
        attended_tokens=75,
        sequential_attended_tokens=100,
        max_cached_tokens=55,
        sequential_max_cached_tokens=50,
        text_tokens=40,
        control_tokens=7,
    )

    assert statistics_line(statistics) == (
        "3 threads, 40 tokens in 20 steps instead of 41; "
        "attended tokens -25 %, most cached tokens +10 %"
    )
