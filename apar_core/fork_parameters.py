"""What the engine needs to know of one request in order to fork it.

The API process decides, once, whether and how a request may fork, and writes it into the request's
`SamplingParams.extra_args`; the scheduler, the logits processor and the output processor all read
it from there. So no process-wide state has to agree, and forked and ordinary requests mix freely.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from apar_core.tree.thread_names import ThreadPath

EXTRA_ARG = "apar"
"""Key under which the parameters travel in `SamplingParams.extra_args`."""


@dataclass(frozen=True, slots=True)
class ForkParameters:
    """Control tokens of the checkpoint and the limits on the threads of one request.

    `enabled` false means that the checkpoint has control tokens but this request may not use
    them: the engine then never samples one. `max_threads` counts threads alive at once; a fork
    beyond it waits. `max_forks` counts all forks of a request; beyond it no thread is opened and
    the answer ends with finish reason "length". `end_ids` are the tokens that end a thread.
    `separated` asks for line breaks between paragraphs whose text lacks them. `thread_path` is the
    place of a thread: the fork ordinals from the root thread, whose path is empty, down to it.
    `key` names the API key that asks; all its requests together have at most `key_max_threads`
    threads alive in one engine, as far as forking adds to them, where that is not None.
    """

    fork_id: int
    child_id: int
    enabled: bool
    max_threads: int
    max_forks: int
    end_ids: tuple[int, ...]
    separated: bool = False
    thread_path: ThreadPath = ()
    key: str | None = None
    key_max_threads: int | None = None

    def to_extra_arg(self) -> dict[str, Any]:
        """The parameters as plain values, fit for msgpack."""
        return asdict(self)

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> ForkParameters | None:
        """The parameters of a request, or None where the checkpoint has no control tokens."""
        values = extra_args.get(EXTRA_ARG) if extra_args else None
        if values is None:
            return None
        return cls(
            **{
                **values,
                "end_ids": tuple(values["end_ids"]),
                "thread_path": tuple(values["thread_path"]),
            }
        )


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """What a server grants the API key of a request; no client can set any of it.

    `key` and `key_max_threads` are those of `ForkParameters`; `priority` is vLLM's: lower goes
    first.
    """

    key: str
    key_max_threads: int | None = None
    priority: int = 0


def child_seed(parent_seed: int | None, ordinal: int) -> int | None:
    """Seed of a child's random numbers: its own, and the same in every run of a seeded request."""
    if parent_seed is None:
        return None
    digest = hashlib.blake2b(f"{parent_seed}~{ordinal}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
