from __future__ import annotations

from typing import Any

from apar_core.fork_parameters import child_seed
from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice
from apar_core.offline.decoders.thread_family import Thread, ThreadFamily

END, FORK, CHILD = 2, 3, 4
NUM_PROMPT_TOKENS = 10


def family(
    choice: TokenChoice | None = None, max_positions: int = 100, **limits: Any
) -> ThreadFamily:
    return ThreadFamily(
        NUM_PROMPT_TOKENS,
        TreeTokens(FORK, CHILD, END),
        frozenset({END}),
        choice or TokenChoice.greedy(),
        DecodeLimits(**limits),
        max_positions,
    )


def fork(threads: ThreadFamily, parent: Thread) -> Thread:
    child = threads.add_token(parent, FORK)
    assert child is not None
    return child


def test_a_fork_opens_a_child_that_reads_its_parent_up_to_the_fork_token() -> None:
    threads = family()
    threads.add_token(threads.root, 9)

    child = fork(threads, threads.root)

    assert (child.thread_id, child.parent, child.ordinal) == ("root.0", threads.root, 0)
    assert child.num_shared == 2
    # The prompt, a text token, the fork token and the child token.
    assert child.num_before == child.path_length == NUM_PROMPT_TOKENS + 3
    assert child.alive
    assert fork(threads, child).thread_id == "root.0.0"
    assert fork(threads, threads.root).thread_id == "root.1"


def test_an_end_token_ends_its_thread_and_is_not_stored() -> None:
    threads = family()
    threads.add_token(threads.root, 9)

    threads.add_token(threads.root, END)

    (root,) = threads.decoded_threads()
    assert (root.token_ids, root.ended) == ((9,), True)
    assert not threads.root.alive


def test_threads_beyond_the_limit_wait_and_start_in_order() -> None:
    threads = family(max_threads=2)
    first, second, third = (fork(threads, threads.root) for _ in range(3))

    assert (first.alive, second.alive, third.alive) == (True, False, False)
    assert threads.start_waiting() is None
    threads.add_token(first, END)
    assert threads.start_waiting() is second
    assert threads.start_waiting() is None
    threads.add_token(threads.root, END)
    assert threads.start_waiting() is third
    assert threads.start_waiting() is None


def test_a_fork_beyond_max_forks_opens_no_thread() -> None:
    threads = family(max_forks=1)
    fork(threads, threads.root)

    assert threads.add_token(threads.root, FORK) is None
    assert [thread.alive for thread in threads.threads] == [True, True, False]


def test_max_tokens_counts_text_only_and_cuts_off_all_threads() -> None:
    threads = family(max_tokens=2, max_threads=2)
    child = fork(threads, threads.root)
    waiting = fork(threads, threads.root)
    threads.add_token(threads.root, 9)
    assert not threads.closed

    threads.add_token(child, 9)

    assert threads.closed
    assert not any(thread.alive or thread.ended for thread in threads.threads)
    assert not threads.waiting
    assert not waiting.alive
    assert threads.tree.finished


def test_a_thread_that_fills_the_context_is_cut_off_and_its_last_fork_opens_nothing() -> None:
    threads = family(max_positions=NUM_PROMPT_TOKENS + 2)
    threads.add_token(threads.root, 9)

    assert threads.add_token(threads.root, FORK) is None
    assert not threads.root.alive
    assert not threads.root.ended


def test_cached_tokens_count_shared_tokens_once() -> None:
    threads = family(max_threads=2)
    threads.add_token(threads.root, 9)
    child = fork(threads, threads.root)
    threads.add_token(threads.root, 9)
    threads.add_token(child, 9)

    # 3 tokens of the root, and the child token and one more of the child.
    assert threads.cached_tokens([threads.root, child]) == NUM_PROMPT_TOKENS + 3 + 2
    # The child alone needs only the prefix of the root that it reads: a text and the fork token.
    assert threads.cached_tokens([child]) == NUM_PROMPT_TOKENS + 2 + 2
    fork(threads, threads.root)
    # A waiting child counts with all that it will read.
    assert threads.cached_tokens([child]) == NUM_PROMPT_TOKENS + 4 + 2


def test_a_child_has_the_same_seed_as_in_the_engine() -> None:
    threads = family(TokenChoice.sampled(1.0, seed=7))

    children = [fork(threads, threads.root) for _ in range(2)]
    grandchild = fork(threads, children[1])

    assert [child.seed for child in children] == [child_seed(7, 0), child_seed(7, 1)]
    assert grandchild.seed == child_seed(child_seed(7, 1), 0)


def test_a_random_number_does_not_depend_on_how_far_ahead_it_is_requested() -> None:
    threads = family(TokenChoice.sampled(1.0, seed=7))
    ahead = [threads.root.uniform(num_ahead) for num_ahead in (2, 0, 1)]

    one_by_one = []
    for _ in range(3):
        one_by_one.append(threads.root.uniform(0))
        threads.add_token(threads.root, 9)

    assert one_by_one == [ahead[1], ahead[2], ahead[0]]
    assert len(set(one_by_one)) == 3


def test_a_replayed_thread_ends_after_its_tokens_and_a_missing_child_is_empty() -> None:
    threads = family(TokenChoice.replay({"": [FORK, FORK, 9], "1": [9, END]}))

    assert threads.add_token(threads.root, FORK) is None
    child = fork(threads, threads.root)
    threads.add_token(threads.root, 9)

    assert child.forced == [9, END]
    assert not threads.root.alive
    assert not threads.root.ended
    assert child.alive
