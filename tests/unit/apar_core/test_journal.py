"""Journals of generated tokens."""

from apar_core.journal import JournalBook, ThreadDelta


def test_journals_merge_by_thread() -> None:
    book = JournalBook()
    book.add(
        [
            ThreadDelta((0,), (5,)),
            ThreadDelta((), (1, 2)),
            ThreadDelta((0,), (6,), 0),
            ThreadDelta((), (3,)),
        ]
    )

    assert book.journal() == (ThreadDelta((), (1, 2, 3)), ThreadDelta((0,), (5, 6), 0))
