"""Threads of an answer during decoding: forks, limits, and cached tokens."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from apar_core.fork_parameters import child_seed
from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.decoders.interface import DecodedThread, DecodeLimits, TokenChoice
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, child_thread, replay_key


@dataclass(eq=False, slots=True)
class Thread:
    """Thread; `num_before` counts the tokens on its path before its own.

    `num_shared` is the number of its parent's tokens that it reads. `forced` are replayed tokens.
    """

    thread_id: ThreadId
    parent: Thread | None
    ordinal: int
    num_shared: int
    num_before: int
    forced: Sequence[int] | None
    seed: int | None
    draws: random.Random
    uniforms: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_children: int = 0
    alive: bool = True
    ended: bool = False

    @property
    def path_length(self) -> int:
        """Length of the thread's sequence so far."""
        return self.num_before + len(self.token_ids)

    def uniform(self, num_ahead: int) -> float:
        """Return the random number in [0, 1) for the token `num_ahead` places after the next.

        A token always gets the same number, so speculation samples like decoding one by one.
        """
        place = len(self.token_ids) + num_ahead
        while len(self.uniforms) <= place:
            self.uniforms.append(self.draws.random())
        return self.uniforms[place]


class ThreadFamily:
    """All threads of an answer; assigns chosen tokens and applies the limits."""

    def __init__(
        self,
        num_prompt_tokens: int,
        tokens: TreeTokens | None,
        end_ids: frozenset[int],
        choice: TokenChoice,
        limits: DecodeLimits,
        max_positions: int,
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._tokens = tokens
        self._end_ids = end_ids
        self._choice = choice
        self._limits = limits
        self._max_positions = max_positions
        self._num_live = 0
        self._num_forks = 0
        self._num_text = 0
        self.closed = False
        self.threads: list[Thread] = []
        self.waiting: deque[Thread] = deque()
        self.tree: ParagraphTree[int] = ParagraphTree()
        self.root = self._add(None, choice.seed)

    def add_token(self, thread: Thread, token_id: int) -> Thread | None:
        """Append a token to a live thread; return the child that it opens, if any.

        The child is alive, or in `waiting` until the number of threads permits it.
        """
        if token_id in self._end_ids:
            self._finish(thread, ended=True)
            return None
        thread.token_ids.append(token_id)
        child = None
        if self._tokens is not None and token_id == self._tokens.fork_id:
            child = self._fork(thread)
        else:
            self.tree.append(thread.thread_id, [token_id])
            self._num_text += 1
        forced_out = thread.forced is not None and len(thread.token_ids) >= len(thread.forced)
        if forced_out or thread.path_length >= self._max_positions:
            self._finish(thread, ended=False)
        if self._num_text >= self._limits.max_tokens:
            self.close()
        return child

    def close(self) -> None:
        """Cut off all threads."""
        self.closed = True
        self.waiting.clear()
        for thread in self.threads:
            if not thread.ended and thread.thread_id in self.tree.threads:
                self._finish(thread, ended=False)

    def start_waiting(self) -> Thread | None:
        """Start and return the next waiting thread, if the limit permits."""
        if not self.waiting or self._num_live >= self._limits.max_threads:
            return None
        thread = self.waiting.popleft()
        thread.alive = True
        self._num_live += 1
        return thread

    def cached_tokens(self, readers: Sequence[Thread]) -> int:
        """Return the tokens on the paths of these and the waiting threads, shared ones once."""
        held: dict[Thread, int] = {}
        for reader in readers:
            held[reader] = len(reader.token_ids) + (reader.parent is not None)
        for reader in (*readers, *self.waiting):
            thread = reader
            while thread.parent is not None:
                above = thread.parent
                num_read = thread.num_shared + (above.parent is not None)
                held[above] = max(held.get(above, 0), num_read)
                thread = above
        return self.num_prompt_tokens + sum(held.values())

    def decoded_threads(self) -> tuple[DecodedThread, ...]:
        """Return all threads, parents before their children."""
        return tuple(
            DecodedThread(
                thread.thread_id,
                thread.parent.thread_id if thread.parent else None,
                thread.ordinal,
                tuple(thread.token_ids),
                thread.ended,
            )
            for thread in self.threads
        )

    def _fork(self, parent: Thread) -> Thread | None:
        child = self._add(parent, child_seed(parent.seed, parent.num_children))
        self.tree.fork(parent.thread_id, child.thread_id)
        parent.num_children += 1
        full = self._num_forks >= self._limits.max_forks
        no_token = child.forced is not None and not child.forced
        # A child needs room for its child token and at least one token of its own.
        if self.closed or full or no_token or child.num_before >= self._max_positions:
            self._finish(child, ended=False)
            return None
        self._num_forks += 1
        # `_add` has already counted the child.
        if self._num_live > self._limits.max_threads:
            self._num_live -= 1
            child.alive = False
            self.waiting.append(child)
        return child

    def _add(self, parent: Thread | None, seed: int | None) -> Thread:
        if parent is None:
            thread_id, ordinal, shared, before = ROOT_THREAD, 0, 0, self.num_prompt_tokens
        else:
            ordinal = parent.num_children
            thread_id = child_thread(parent.thread_id, ordinal)
            shared, before = len(parent.token_ids), parent.path_length + 1
        replay = self._choice.tokens_of_thread
        forced = None if replay is None else replay.get(replay_key(thread_id), ())
        draws = random.Random(seed)
        thread = Thread(thread_id, parent, ordinal, shared, before, forced, seed, draws)
        self.threads.append(thread)
        self._num_live += 1
        return thread

    def _finish(self, thread: Thread, *, ended: bool) -> None:
        if self.tree.threads[thread.thread_id].finished:
            return
        self.tree.finish(thread.thread_id, ended=ended)
        thread.ended = ended
        self._num_live -= thread.alive
        thread.alive = False
