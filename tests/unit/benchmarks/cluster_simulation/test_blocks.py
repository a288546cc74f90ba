"""Blocks shared at forks and given back early; beginnings of prompts kept while they are free."""

from benchmarks.cluster_simulation.blocks import BlockPool, Segment
from benchmarks.cluster_simulation.prefix_cache import PrefixCache


def started(pool: BlockPool, parent: Segment | None, first: int, num_blocks: int) -> Segment:
    segment = Segment(parent, first)
    pool.start(segment, num_blocks)
    return segment


def test_a_parents_blocks_stay_as_far_as_a_child_reads_them() -> None:
    pool = BlockPool(100)
    parent = started(pool, None, 0, 10)
    child = started(pool, parent, 6, 9)
    assert pool.free == 100 - 10 - 3

    pool.stop(parent, 12 - 2)

    assert pool.free == 100 - 6 - 3
    pool.stop(child, 9)
    assert pool.free == 100


def test_of_several_children_the_one_that_shares_most_decides() -> None:
    pool = BlockPool(100)
    parent = started(pool, None, 0, 10)
    early, late = started(pool, parent, 2, 5), started(pool, parent, 8, 11)
    pool.stop(parent, 10)
    assert pool.free == 100 - 8 - 3 - 3

    pool.stop(late, 11)
    assert pool.free == 100 - 2 - 3

    pool.stop(early, 5)
    assert pool.free == 100


def test_a_thread_that_lets_go_takes_hold_again_of_what_is_left() -> None:
    pool = BlockPool(100)
    parent = started(pool, None, 0, 10)
    sibling = started(pool, parent, 4, 6)
    waiting = Segment(parent, 8)
    pool.let_go(waiting)
    pool.stop(parent, 10)
    # Only what the sibling reads of the parent is left.
    assert pool.free == 100 - 4 - 2

    pool.hold_again(waiting)

    assert (waiting.parent, waiting.first) == (parent, 4)
    assert pool.missing(waiting, 9) == 5
    pool.stop(sibling, 6)
    assert pool.free == 100 - 4


def test_a_thread_whose_ancestors_have_gone_begins_anew() -> None:
    pool = BlockPool(100)
    parent = started(pool, None, 0, 10)
    waiting = Segment(parent, 8)
    pool.let_go(waiting)
    pool.stop(parent, 10)

    pool.hold_again(waiting)

    assert (waiting.parent, waiting.first) == (None, 0)


PIECES = ((1, 35), (2, 64))


def test_a_prompts_whole_blocks_are_found_again_until_others_take_them() -> None:
    pool = BlockPool(10)
    cache = PrefixCache(pool, 16)
    first = started(pool, None, 0, 4)
    cache.add(first, PIECES)
    assert (pool.free, cache.hit_blocks(PIECES)) == (6, (4, 4))

    pool.stop(first, 4)
    assert (pool.free, pool.piece_blocks, cache.hit_blocks(PIECES)) == (10, 0, (4, 0))

    # Seven of ten are taken: of the four that held the prompt three are left, of which the first
    # piece needs two.
    other = started(pool, None, 0, 7)
    assert cache.hit_blocks(PIECES) == (2, 0)
    pool.stop(other, 7)
    assert cache.hit_blocks(PIECES) == (2, 0)


def test_two_requests_hold_their_common_beginning_once() -> None:
    pool = BlockPool(100)
    cache = PrefixCache(pool, 16)
    first = started(pool, None, 0, 4)
    cache.add(first, PIECES)
    second = Segment(None, 0)

    cache.attach(second, PIECES)
    pool.start(second, 6)

    assert pool.free == 100 - 4 - 2
    pool.stop(first, 4)
    assert pool.free == 100 - 4 - 2
    pool.stop(second, 6)
    assert (pool.free, pool.piece_blocks) == (100, 0)
