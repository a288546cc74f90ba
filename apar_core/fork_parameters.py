"""Parameters with which the engine forks one request.

The API process decides whether and how a request may fork, and writes the decision into the
request's `SamplingParams.extra_args`. Scheduler, logits processor and output processor read it from
there, so they share no state, and forked and ordinary requests mix freely.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from apar_core.tree.thread_names import ThreadPath

NO_TOKEN = -1
"""Fork and child token of a format without such tokens."""
EXTRA_ARG = "apar"
"""Key of the parameters in `SamplingParams.extra_args`."""
HOLD_ARG = "apar_hold"
"""Key of `SamplingParams.extra_args`: see `may_be_held`."""
_TUPLES = ("seed_ids", "banned_ids", "end_ids", "thread_path", "replacement_ids", "call_ids")


@dataclass(frozen=True, slots=True)
class ForkParameters:
    """Control tokens of the checkpoint, and limits on the threads of one request.

    What a fork does depends on the checkpoint's format: `formats/parallel_format.py`.

    fork_id: token after which a thread forks.
    seed_ids: tokens forced at a child's start.
    banned_ids: tokens that only the engine writes, such as APAR's child token.
    enabled: False if the checkpoint has control tokens but this request may not use them; the
        engine then never samples one.
    max_threads: threads alive at once; a further fork waits.
    max_forks: forks of the request in total; a further fork opens no thread, the parent goes on,
        and the finish reason is "length".
    end_ids: tokens that end a thread.
    separated: insert line breaks between paragraphs whose text lacks them.
    thread_path: path of the thread that carries these parameters.
    blocks: the format as JSON if threads wait for the children that they open; there is no fork
        token then, and no fixed seed (`formats/blocks.py`).
    num_generated: tokens that the thread has generated in earlier engine requests, before a join.
    key, key_max_threads: API key of the request, and how many threads all requests of that key may
        have alive in one engine before forks wait; None for no limit.
    deadline_at_s: Unix time at which the answer must end; an early one lets the request's forks
        start before those of others (`ThreadGroup.order`). None without one.
    cut_tokens: 1 if a child does not inherit the fork token, else 0.
    children_fork: whether a child may fork.
    replacement_ids: tokens that stand in the text in place of a fork token.
    call_ids: tokens with which a tool call begins; a thread that has generated one forks no more.
    """

    fork_id: int
    seed_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]
    enabled: bool
    max_threads: int
    max_forks: int
    end_ids: tuple[int, ...]
    separated: bool = False
    thread_path: ThreadPath = ()
    key: str | None = None
    key_max_threads: int | None = None
    cut_tokens: int = 0
    children_fork: bool = True
    replacement_ids: tuple[int, ...] = ()
    call_ids: tuple[int, ...] = ()
    blocks: str | None = None
    num_generated: int = 0
    deadline_at_s: float | None = None

    def to_extra_arg(self) -> dict[str, Any]:
        """Return the parameters as plain values for msgpack."""
        # `asdict` would copy each tuple, in every request.
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> ForkParameters | None:
        """Return a request's parameters; None if the checkpoint has no control tokens."""
        values = extra_args.get(EXTRA_ARG) if extra_args else None
        if values is None:
            return None
        # msgpack makes lists of tuples.
        return cls(**values | {name: tuple(values[name]) for name in _TUPLES})

    @property
    def control_ids(self) -> tuple[int, ...]:
        """Tokens that are not text when a thread generates them."""
        return (self.fork_id, *self.banned_ids)

    @property
    def may_fork(self) -> bool:
        """Whether the thread that carries these parameters may fork."""
        return self.enabled and (self.children_fork or not self.thread_path)

    def is_control(self, token_id: int) -> bool:
        """Return whether a token is the fork token or one that only the engine writes."""
        return token_id == self.fork_id or token_id in self.banned_ids

    def num_inherited(self, fork_index: int) -> int:
        """Return how many tokens a child inherits; `fork_index` is the fork token's position."""
        return fork_index + 1 - self.cut_tokens

    def num_read(self, fork_index: int) -> int:
        """Return how many tokens a child has read before its first own token."""
        return self.num_inherited(fork_index) + len(self.seed_ids)

    def ended_itself(self, token_ids: Sequence[int], *, stopped: bool) -> bool:
        """Return whether a thread with these last tokens ended with an end token of the model.

        `stopped` is whether vLLM's finish reason is "stop". A stop token of the client also gives
        that reason, but ends the whole request.
        """
        return stopped and bool(token_ids) and token_ids[-1] in self.end_ids

    def num_text(self, token_ids: Sequence[int], *, stopped: bool) -> int:
        """Return how many of a thread's last tokens are text, not control or end tokens."""
        num_control = sum(map(self.is_control, token_ids))
        return len(token_ids) - num_control - self.ended_itself(token_ids, stopped=stopped)


_NAMES = tuple(field.name for field in fields(ForkParameters))


def may_be_held(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether the engine core may send a request's tokens of several steps together.

    The API process decides this for each request (`engine/input_processor.py`).
    """
    return bool(extra_args and extra_args.get(HOLD_ARG))


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """Terms that the server grants to a request; no client can set them past the gateway.

    `key`, `key_max_threads` and `deadline_at_s` are as in `ForkParameters`. `priority` is vLLM's:
    lower goes first; it counts only with a key.
    """

    key: str | None
    key_max_threads: int | None = None
    priority: int = 0
    deadline_at_s: float | None = None


def child_seed(parent_seed: int | None, ordinal: int) -> int | None:
    """Return the seed of a thread's `ordinal`-th child; None for an unseeded request."""
    return derived_seed(parent_seed, f"~{ordinal}")


def derived_seed(seed: int | None, purpose: str) -> int | None:
    """Return a seed that depends only on another seed and a purpose."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}{purpose}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
