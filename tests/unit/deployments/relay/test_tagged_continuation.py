"""Tagged streams that begin at one replica and end at another; both have our output processor."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.journal import JournalBook
from deployments.relay.continuation import ClientStream
from tests.fakes.examples import num_examples
from tests.fakes.tagged_client import BYTES, PARAMETERS, TaggedClient, outputs_of
from tests.fakes.tagged_streams import TaggedReader
from tests.unit.apar_core.tree.scripts import Event, interleavings


class Replica:
    """Makes chunks of what a client of the output processor receives."""

    def __init__(self, client: TaggedClient) -> None:
        self.client = client
        self.client.takes = False
        self._num_sent = 0
        self._ended = False

    def chunk(self) -> bytes:
        """Return a chunk with everything new; none after the last."""
        if self._ended:
            return b""
        text, self._num_sent = self.client.text[self._num_sent :], len(self.client.text)
        finish = self.client.finish_reason
        self._ended = finish is not None
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        assert self.client.follower.tags is not None
        value = {"choices": [choice], "apar": self.client.follower.tags.take()}
        return b"data: " + json.dumps(value).encode() + b"\n\n"


def read(events: bytes) -> tuple[TaggedReader, str, list[str]]:
    """Return what a client has received: threads, ordered text, finish reasons."""
    reader, text, finish = TaggedReader(), "", []
    for event in events.split(b"\n\n")[:-1]:
        chunk: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
        reader.read(chunk["apar"])
        (choice,) = chunk["choices"]
        text += choice["delta"]["content"]
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    return reader, text, finish


@settings(max_examples=num_examples(25))
@given(interleavings(max_events=20), st.data())
def test_a_continued_stream_equals_the_uninterrupted_one(
    events: list[Event], data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.sampled_from(BYTES), min_size=1, max_size=20))
    params: dict[str, Any] = {"stop": data.draw(st.sampled_from([None, ["a"], ["ba", "\ufffd"]]))}
    outputs = outputs_of(events, tokens)
    death = data.draw(st.integers(1, len(outputs)))
    stream, book, received = ClientStream(), JournalBook(), b""

    first = Replica(TaggedClient(parameters=PARAMETERS, **params))
    for output in outputs[:death]:
        first.client.step(output)
        body = first.chunk() if data.draw(st.booleans()) else b""
        # As in a piece: the journal is taken after the text.
        book.add(first.client.follower.take_journal())
        received += stream.forward(body)
    stream.begin_again()
    second = Replica(TaggedClient(book.journal(), parameters=PARAMETERS, **params))
    received += stream.forward(second.chunk())
    for output in outputs_of(events, tokens)[death:]:
        second.client.step(output)
        received += stream.forward(second.chunk())

    whole = TaggedClient(parameters=PARAMETERS, **params)
    for output in outputs_of(events, tokens):
        whole.step(output)
    reader, text, finish = read(received)
    assert (text, finish) == (whole.text, [whole.finish_reason])
    assert reader.text() == text
    assert _final(reader) == _final(whole.reader)


def _final(reader: TaggedReader) -> list[Any]:
    """Return what every thread wrote, in one order."""
    threads = reader.threads[0].items()
    return sorted((name, each["text"], each["tokens"], each["position"]) for name, each in threads)
