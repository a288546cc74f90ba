from __future__ import annotations

from apar_core.offline.decoders.interface import (
    DecodedAnswer,
    DecodedThread,
    paragraph_tree,
)
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId

FORK = 3
FIRST, SECOND = ThreadId("root.0"), ThreadId("root.1")
THREADS = (
    DecodedThread(ROOT_THREAD, None, 0, (10, FORK, 11, FORK, 12), ended=True),
    DecodedThread(FIRST, ROOT_THREAD, 0, (20, 21), ended=True),
    DecodedThread(SECOND, ROOT_THREAD, 1, (30,), ended=False),
)


def test_a_childs_text_follows_the_paragraph_that_forked_it() -> None:
    answer = DecodedAnswer(THREADS, (), 5, FORK)

    assert answer.text_ids == [10, 20, 21, 11, 30, 12]


def test_details_of_details_are_restored_in_reading_order() -> None:
    inner = ThreadId("root.0.0")
    threads = (
        DecodedThread(ROOT_THREAD, None, 0, (10, FORK, 11), ended=True),
        DecodedThread(FIRST, ROOT_THREAD, 0, (20, FORK, 21), ended=True),
        DecodedThread(inner, FIRST, 0, (40, 41), ended=True),
    )

    assert DecodedAnswer(threads, (), 5, FORK).text_ids == [10, 20, 40, 41, 21, 11]


def test_the_tree_is_finished_and_knows_which_threads_ended() -> None:
    tree = paragraph_tree(THREADS, FORK)

    assert tree.finished
    assert {thread: record.ended for thread, record in tree.threads.items()} == {
        ROOT_THREAD: True,
        FIRST: True,
        SECOND: False,
    }


def test_an_ordinary_model_has_no_fork_token() -> None:
    answer = DecodedAnswer(
        (DecodedThread(ROOT_THREAD, None, 0, (FORK, 9), ended=True),), (), 5, None
    )

    assert answer.text_ids == [FORK, 9]
    assert len(answer.tree.threads) == 1
