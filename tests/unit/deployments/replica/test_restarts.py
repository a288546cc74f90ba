"""Replicas that replace lost ones."""

from dataclasses import dataclass, field

from deployments.replica.replica_metrics import NoteStore, ReplicaNote


@dataclass
class FakeNotes(NoteStore):
    """A store of notes, and the actors that are alive."""

    notes: dict[str, str] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)

    def put(self, key: str, text: str) -> None:
        self.notes[key] = text

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.notes if key.startswith(prefix)]

    def get(self, key: str) -> str | None:
        return self.notes.get(key)

    def take(self, key: str) -> bool:
        return self.notes.pop(key, None) is not None

    def is_alive(self, actor: str) -> bool:
        return actor in self.alive


def start(notes: FakeNotes, replica: str, deployment: str = "d") -> tuple[ReplicaNote, bool]:
    actor = f"{deployment}#{replica}"
    notes.alive.add(actor)
    note = ReplicaNote(notes, deployment, replica, actor)
    return note, note.leave()


def test_the_first_replicas_replace_none() -> None:
    notes = FakeNotes()

    assert [start(notes, name)[1] for name in ("a", "b")] == [False, False]


def test_each_lost_replica_has_one_replacement() -> None:
    notes = FakeNotes()
    for name in ("a", "b", "c"):
        start(notes, name)
    notes.alive -= {"d#a", "d#b"}

    assert [start(notes, name)[1] for name in ("e", "f", "g")] == [True, True, False]


def test_orderly_shutdowns_and_other_models_are_not_losses() -> None:
    notes = FakeNotes()
    peaceful, _ = start(notes, "a")
    start(notes, "b", deployment="other")
    peaceful.remove()
    notes.alive.clear()

    assert not start(notes, "c")[1]
