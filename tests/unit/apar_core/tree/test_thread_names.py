"""Names of threads: paths, thread ids, replay keys and engine request ids."""

from hypothesis import given
from hypothesis import strategies as st

from apar_core.tree.thread_names import (
    ROOT_THREAD,
    ThreadPath,
    child_replay_key,
    child_request_id,
    child_thread,
    replay_key,
    replay_key_of_path,
    thread_id,
    thread_path,
    thread_request_id,
)

PATHS = st.lists(st.integers(0, 300), max_size=5).map(tuple)


def test_the_root_thread_is_named_by_nothing_but_the_request() -> None:
    assert thread_id(()) == ROOT_THREAD == "root"
    assert replay_key_of_path(()) == replay_key(ROOT_THREAD) == ""
    assert thread_request_id("r", ()) == "r"
    assert thread_path("r", "r") == ()


def test_a_child_is_named_by_the_ordinals_of_its_forks() -> None:
    path = (0, 12)

    assert thread_id(path) == "root.0.12"
    assert replay_key_of_path(path) == "0.12"
    assert thread_request_id("r", path) == "r~0~12"
    assert thread_path("r", "r~0~12") == path


@given(PATHS, st.integers(0, 300))
def test_every_name_of_a_child_extends_its_parents(path: ThreadPath, ordinal: int) -> None:
    child = (*path, ordinal)

    assert child_thread(thread_id(path), ordinal) == thread_id(child)
    assert child_replay_key(replay_key_of_path(path), ordinal) == replay_key_of_path(child)
    assert child_request_id(thread_request_id("a~b", path), ordinal) == thread_request_id(
        "a~b", child
    )
    assert replay_key(thread_id(child)) == replay_key_of_path(child)
    assert thread_path("a~b", thread_request_id("a~b", child)) == child
