"""The names of a thread: how each part of the project writes the forks that lead to it.

A fork's ordinal counts the forks of one thread from 0. The third child of the first child:

| Name | Root thread | That child | Where |
|---|---|---|---|
| path | `()` | `(0, 2)` | journals, request parameters |
| thread id | `root` | `root.0.2` | paragraph trees, traces, printed answers |
| replay key | empty | `0.2` | recorded and replayed answers |
| engine request id | `ID` | `ID~0~2` | vLLM; `ID` is the engine id of the client's request |
"""

from __future__ import annotations

from typing import NewType

ThreadPath = tuple[int, ...]

ThreadId = NewType("ThreadId", str)

ROOT_THREAD = ThreadId("root")


def thread_id(path: ThreadPath) -> ThreadId:
    """Return the thread id of the thread at a path."""
    return ThreadId(".".join([ROOT_THREAD, *map(str, path)]))


def child_thread(parent: ThreadId, ordinal: int) -> ThreadId:
    """Return the thread id of a thread's `ordinal`-th child."""
    return ThreadId(f"{parent}.{ordinal}")


def replay_key(thread: ThreadId) -> str:
    """Return the key of a thread's tokens in a replay."""
    return thread.removeprefix(ROOT_THREAD).removeprefix(".")


def replay_key_of_path(path: ThreadPath) -> str:
    """Return the key of a thread's tokens in a replay."""
    return ".".join(map(str, path))


def child_replay_key(parent_key: str, ordinal: int) -> str:
    """Return the replay key of a thread's `ordinal`-th child."""
    return f"{parent_key}.{ordinal}" if parent_key else str(ordinal)


def child_request_id(parent_request_id: str, ordinal: int) -> str:
    """Return the engine request id of a thread's `ordinal`-th child.

    Scheduler and API process both derive it, so a fork needs no message between them.
    """
    return f"{parent_request_id}~{ordinal}"


def thread_request_id(root_request_id: str, path: ThreadPath) -> str:
    """Return the engine request id of the thread at a path."""
    return "~".join([root_request_id, *map(str, path)])


def thread_path(root_request_id: str, request_id: str) -> ThreadPath:
    """Return the path of the thread with an engine request id."""
    return tuple(int(ordinal) for ordinal in request_id[len(root_request_id) :].split("~")[1:])
