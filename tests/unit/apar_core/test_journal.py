"""What the threads of a request have generated, piece by piece."""

from apar_core.journal import ThreadDelta, merged


def test_journals_merge_by_thread() -> None:
    deltas = [
        ThreadDelta((0,), (5,)),
        ThreadDelta((), (1, 2)),
        ThreadDelta((0,), (6,), 0),
        ThreadDelta((), (3,)),
    ]

    assert merged(deltas) == (ThreadDelta((), (1, 2, 3)), ThreadDelta((0,), (5, 6), 0))
