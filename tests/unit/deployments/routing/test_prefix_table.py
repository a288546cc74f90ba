"""Replicas that probably hold a prompt's prefix."""

import numpy as np
import pytest

from deployments.routing.policies import PrefixTable, covered_tokens
from deployments.wire.request import RequestHint

NOTHING_SENT = np.zeros(4)
LARGE_CACHE = np.full(4, 1e6)


def table(max_entries: int = 100) -> PrefixTable:
    prefixes = PrefixTable(max_entries)
    prefixes.resize(4)
    return prefixes


def hint(*hashes: int) -> RequestHint:
    tokens = tuple(100 * (index + 1) for index in range(len(hashes)))
    return RequestHint(tokens[-1], None, hashes, True, tokens)


def test_the_longest_prefix_sent_to_a_replica_counts() -> None:
    prefixes = table()
    prefixes.sent(hint(1), 0, 0.0)
    prefixes.sent(hint(1, 2, 3), 2, 0.0)

    held = prefixes.held_tokens(hint(1, 2, 9, 10), NOTHING_SENT, LARGE_CACHE)

    assert held is not None
    assert held.tolist() == [100, 0, 200, 0]


def test_a_cache_of_unknown_size_holds_everything_sent_to_it() -> None:
    prefixes = table()
    prefixes.sent(hint(1), 2, 0.0)

    held = prefixes.held_tokens(hint(1), NOTHING_SENT, np.full(4, np.inf))

    assert held is not None
    assert held.tolist() == [0, 0, 100, 0]


def test_an_unknown_prefix_is_held_nowhere() -> None:
    prefixes = table()
    prefixes.sent(hint(1, 2), 0, 0.0)

    assert prefixes.held_tokens(hint(3, 4), NOTHING_SENT, LARGE_CACHE) is None


@pytest.mark.parametrize(("sent_since", "still_held"), [(499.0, 100), (501.0, 0)])
def test_a_prefix_is_gone_once_the_cache_was_refilled(sent_since: float, still_held: int) -> None:
    prefixes = table()
    prefixes.sent(hint(1), 1, 1000.0)
    sent = np.array([0.0, 1000.0 + sent_since, 0.0, 0.0])

    held = prefixes.held_tokens(hint(1), sent, np.full(4, 500.0))

    assert held is not None
    assert held[1] == still_held


def test_the_least_recently_used_prefix_is_dropped_first() -> None:
    prefixes = table(max_entries=2)
    for prefix in (1, 2, 1, 3):
        prefixes.sent(hint(prefix), 0, 0.0)

    assert len(prefixes) == 2
    assert prefixes.held_tokens(hint(2), NOTHING_SENT, LARGE_CACHE) is None
    assert prefixes.held_tokens(hint(1), NOTHING_SENT, LARGE_CACHE) is not None
    held = prefixes.held_tokens(hint(3), NOTHING_SENT, LARGE_CACHE)
    assert held is not None
    assert held.tolist() == [100, 0, 0, 0]


def test_the_table_grows_up_to_its_limit() -> None:
    prefixes = table(max_entries=1000)
    for prefix in range(1000):
        prefixes.sent(hint(prefix), prefix % 4, 0.0)

    for prefix in range(1000):
        held = prefixes.held_tokens(hint(prefix), NOTHING_SENT, LARGE_CACHE)
        assert held is not None
        assert held.nonzero()[0].tolist() == [prefix % 4]


def test_prefixes_without_lengths_are_evenly_spaced() -> None:
    assert covered_tokens(RequestHint(300, None, (1, 2, 3))) == (100, 200, 300)
