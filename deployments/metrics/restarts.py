"""Whether a replica that starts stands in for one that was lost.

Each replica leaves a note in Ray's key-value store and takes it back when it ends in peace. One
that starts and finds the note of another that is gone takes that note, and is its replacement.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import ray
from ray import serve
from ray.experimental import internal_kv

_NAMESPACE = b"apar"
_PREFIX = "replica/"


class Notes(Protocol):
    """A store of notes that all processes of the cluster share."""

    def put(self, key: str, text: str) -> None:
        """Leave a note."""

    def keys(self, prefix: str) -> list[str]:
        """The keys of the notes there."""

    def get(self, key: str) -> str | None:
        """A note; None if it is gone."""

    def take(self, key: str) -> bool:
        """Remove a note; whether it was there, and nobody else has taken it."""

    def is_alive(self, text: str) -> bool:
        """Whether the actor that a note names is alive."""


@dataclass(frozen=True, slots=True)
class ReplicaNote:
    """The note of one replica of a deployment; `actor` is Ray's name of it."""

    notes: Notes
    deployment: str
    replica: str
    actor: str

    @property
    def _prefix(self) -> str:
        return f"{_PREFIX}{self.deployment}/"

    def leave(self) -> bool:
        """Leave the note; returns whether the replica stands in for a lost one."""
        replaces = any(self._take_if_lost(key) for key in self.notes.keys(self._prefix))
        self.notes.put(self._prefix + self.replica, self.actor)
        return replaces

    def take_back(self) -> None:
        """Remove the note: the replica ends in peace."""
        self.notes.take(self._prefix + self.replica)

    def _take_if_lost(self, key: str) -> bool:
        actor = self.notes.get(key)
        return actor is not None and not self.notes.is_alive(actor) and self.notes.take(key)


class RayNotes:
    """Notes in the key-value store of Ray's head."""

    def __init__(self, actor_namespace: str) -> None:
        self._actor_namespace = actor_namespace

    def put(self, key: str, text: str) -> None:
        """Leave a note."""
        internal_kv._internal_kv_put(key, text, namespace=_NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        """The keys of the notes there."""
        found = internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)
        return [key.decode() for key in found]

    def get(self, key: str) -> str | None:
        """A note; None if it is gone."""
        text = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        return None if text is None else text.decode()

    def take(self, key: str) -> bool:
        """Remove a note; whether it was there, and nobody else has taken it."""
        return bool(internal_kv._internal_kv_del(key, namespace=_NAMESPACE))

    def is_alive(self, text: str) -> bool:
        """Whether an actor of that name is alive."""
        with suppress(ValueError):
            ray.get_actor(text, namespace=self._actor_namespace)
            return True
        return False


def note_of_this_replica() -> ReplicaNote:
    """The note of the Ray Serve replica that this process is."""
    context, actor = serve.get_replica_context(), ray.get_runtime_context()
    return ReplicaNote(
        RayNotes(actor.namespace),
        f"{context.app_name}/{context.deployment}",
        context.replica_id.unique_id,
        actor.get_actor_name() or "",
    )
