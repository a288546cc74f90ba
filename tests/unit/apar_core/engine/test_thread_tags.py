"""Tagged streams of the output processor, with vLLM's detokenizer and scripted threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreOutput, FinishReason

from apar_core.engine.block_threads import BlockThreads
from apar_core.engine.thread_tags import ThreadTags
from apar_core.fork_parameters import ForkParameters
from apar_core.formats.blocks import BlockRules
from apar_core.tree.thread_names import ThreadId
from tests.fakes.block_scripts import (
    FORMATS,
    RESULTS,
    Script,
    block_parameters,
    block_scripts,
    tokens,
)
from tests.fakes.block_scripts import TOKENIZER as CHARACTERS
from tests.fakes.examples import num_examples
from tests.fakes.tagged_client import (
    BYTES,
    END,
    FORK,
    PAD,
    PARAMETERS,
    TaggedClient,
    ids,
    outputs_of,
)
from tests.fakes.tagged_streams import TaggedReader
from tests.unit.apar_core.tree.scripts import Event, interleavings

EVENTS = interleavings(max_events=25)


def write(
    thread: str, text: str = "", *, fork: bool = False, end: bool = False, cut: bool = False
) -> EngineCoreOutput:
    reason = FinishReason.STOP if end else FinishReason.LENGTH if cut else None
    return EngineCoreOutput(
        thread, [*ids(text), *[FORK] * fork, *[END] * end], finish_reason=reason
    )


@settings(max_examples=num_examples(30))
@given(EVENTS, st.data())
def test_the_text_rebuilt_from_the_updates_is_the_ordered_text(
    events: list[Event], data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.sampled_from(BYTES), min_size=1, max_size=20))
    client = TaggedClient(
        stop=data.draw(st.sampled_from([None, ["a"], ["ba", "\ufffd"], ["é"]])),
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        parameters=replace(
            PARAMETERS,
            separated=data.draw(st.booleans()),
            replacement_ids=data.draw(st.sampled_from([(), tuple(ids("-")), (PAD,)])),
        ),
    )
    steps = data.draw(st.lists(st.booleans(), min_size=len(events), max_size=len(events)))

    step: list[EngineCoreOutput] = []
    for output, ends in zip(outputs_of(events, tokens), steps, strict=True):
        step.append(output)
        if ends:
            client.step(*step)
            step.clear()
    client.step(*step)

    assert client.reader.text() == client.text
    assert all(thread["state"] == "ended" for thread in client.reader.threads[0].values())
    assert not client.processor.has_unfinished_requests()


def test_a_paragraph_behind_an_open_one_is_shown_at_once() -> None:
    client = TaggedClient()
    client.step(write("r", "1.", fork=True))
    updates = client.step(write("r", " 2."), write("r~0", " a"))

    assert client.text == "1. a"
    assert [(each["id"], each["text"], each["state"]) for each in updates] == [
        ("root", " 2.", "writing"),
        ("root.0", " a", "writing"),
    ]
    assert [each["tokens"] for each in updates] == [len(ids(" 2.")), len(ids(" a"))]


async def test_updates_are_announced_although_no_text_became_certain() -> None:
    client = TaggedClient()
    tags = client.follower.tags
    assert tags is not None
    client.step(write("r", "1.", fork=True))
    await tags.due()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(tags.due(), 0.01)
    num_chunks = client.num_chunks

    client.step(write("r", " 2."))

    await tags.due()
    assert (client.num_chunks, client.text) == (num_chunks, "1.")


def test_states_from_the_fork_to_the_end() -> None:
    client = TaggedClient()
    (root, child) = client.step(write("r", "é1", fork=True))
    assert (root["parent"], root["position"], root["state"]) == (None, None, "writing")
    assert (child["parent"], child["position"], child["state"]) == ("root", 2, "waiting")

    (child,) = client.step(write("r~0", "a"))
    assert (child["text"], child["state"], "parent" in child) == ("a", "writing", False)

    root, child = client.step(write("r", end=True), write("r~0", cut=True))
    assert (root["state"], root["finish_reason"], root["tokens"]) == ("ended", "stop", 1)
    assert (child["state"], child["finish_reason"], child["tokens"]) == ("ended", "length", 0)
    assert client.step() == []


def test_text_behind_a_stop_string_is_removed_by_edits() -> None:
    client = TaggedClient(stop=["X"])
    client.step(write("r", "1.", fork=True))
    client.step(write("r", " 2."), write("r~0", " a"))

    client.step(write("r~0", "bXc"))

    assert client.text == "1. ab"
    threads = client.reader.threads[0]
    assert {name: thread["finish_reason"] for name, thread in threads.items()} == {
        "root": "cut",
        "root.0": "cut",
    }
    assert threads["root"]["text"] == "1. 2."
    assert client.reader.text() == "1. ab"


def test_a_character_split_between_two_threads_is_whole_in_the_ordered_text() -> None:
    first, *rest = ids("日")
    client = TaggedClient()
    client.step(EngineCoreOutput("r", [*ids("1"), first, FORK]))
    client.step(EngineCoreOutput("r~0", [*rest, END], finish_reason=FinishReason.STOP))
    client.step(write("r", "2", end=True))

    assert client.text == client.reader.text() == "1日2"
    assert [thread["text"] for thread in client.reader.threads[0].values()] == ["12", "日"]
    assert [thread["edits"] for thread in client.reader.threads[0].values()] == [{}, {}]


def test_inserted_line_breaks_are_edits() -> None:
    client = TaggedClient(parameters=replace(PARAMETERS, separated=True))
    client.step(
        write("r", "1.", fork=True), write("r~0", "a", end=True), write("r", "2.", end=True)
    )

    assert client.text == client.reader.text() == "1.\na\n\n2."
    assert client.reader.threads[0]["root"]["text"] == "1.2."


@pytest.mark.parametrize(
    ("parameters", "stop"),
    [(None, None), (None, ["b"]), (replace(PARAMETERS, enabled=False), None)],
)
def test_a_request_that_does_not_fork_has_one_thread(
    parameters: ForkParameters | None, stop: list[str] | None
) -> None:
    client = TaggedClient(parameters=parameters, stop=stop)
    (root,) = client.step(write("r", "a日"))
    assert (root["id"], root["text"], root["state"]) == ("root", "a日", "writing")

    client.step(write("r", "bc", end=True))

    assert client.text == client.reader.text() == ("a日" if stop else "a日bc")
    assert client.reader.threads[0]["root"]["state"] == "ended"
    assert not client.processor.has_unfinished_requests()


def test_without_the_request_field_nothing_is_read_and_no_chunk_added() -> None:
    client = TaggedClient(tagged=False)
    client.step(write("r", "1.", fork=True))
    num_chunks = client.num_chunks

    client.step(write("r", " 2."))

    assert (client.num_chunks, client.text) == (num_chunks, "1.")
    assert client.processor._tagged == {}


# ---- threads that wait for their children -------------------------------------------------------


class CharacterDecoder:
    """Detokenizer of the tokenizer of characters."""

    def __init__(self, context: list[int]) -> None:
        self._text = ""

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> None:
        self._text += CHARACTERS.decode(new_token_ids)

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        text, self._text = self._text, ""
        return text


def waits_for_another(threads: BlockThreads, name: str) -> bool:
    records = threads.tree.threads
    record = records[ThreadId("root" + name[1:].replace("~", "."))]
    if not record.waits:
        return False
    block = record.blocks[-1]
    children = record.children[block.first_child :][: block.num_children]
    return any(not records[child].finished for child in children)


def play(threads: BlockThreads, script: Script) -> Iterator[None]:
    """Let every thread that can write a token do so in each step; yield after each step."""
    left = {"r": list(script[""])}
    while left:
        for name in list(left):
            if waits_for_another(threads, name):
                continue
            token_ids, left[name] = left[name][:1], left[name][1:]
            reason = None if left[name] else FinishReason.STOP
            children = threads.feed(EngineCoreOutput(name, token_ids, finish_reason=reason))
            left |= {child: list(script[child[2:].replace("~", ".")]) for child in children}
            if reason is not None:
                del left[name]
        yield


@settings(max_examples=10)
@pytest.mark.parametrize("name", sorted(FORMATS))
@given(st.data())
def test_threads_that_wait_are_rebuilt_and_say_so(name: str, data: st.DataObject) -> None:
    check_that_wait(name, data.draw(block_scripts(FORMATS[name])), steps_per_chunk=1)


@pytest.mark.parametrize("steps_per_chunk", [1, 20, 30, 40, 1000])
def test_a_child_may_be_joined_before_its_parent_is_shown(steps_per_chunk: int) -> None:
    script = {
        "": tokens("<FORK-1>north</FORK-1><JOIN-1>One.", ends=True),
        "0": tokens("It is far.<RETURN>Oslo</RETURN>", ends=True),
    }
    check_that_wait(RESULTS.name, script, steps_per_chunk=steps_per_chunk)


def check_that_wait(name: str, script: Script, *, steps_per_chunk: int) -> None:
    """Check what a client sees of threads of which some wait for others."""
    parameters = block_parameters(FORMATS[name])
    assert parameters.blocks is not None
    rules = BlockRules(FORMATS[name], CHARACTERS)
    threads = BlockThreads("r", parameters, rules, [])
    tags = ThreadTags(0, threads.tree, [], CharacterDecoder)
    threads.tag(tags)
    reader, ordered = TaggedReader(in_order=FORMATS[name].parent == "waits"), ""

    for number, _ in enumerate(play(threads, script), start=1):
        if number % steps_per_chunk > 0 and not threads.tree.finished:
            continue
        for output in threads.take():
            for token_id in output.new_token_ids:
                tags.note(CHARACTERS.decode([token_id]))
                ordered += CHARACTERS.decode([token_id])
        reader.read({"time_ms": 0, "updates": tags.take()})
        known = reader.threads[0]
        for parent, each in known.items():
            live = [
                child
                for child in known.values()
                if child["parent"] == parent and child["state"] != "ended"
            ]
            assert each["state"] == "waiting" or not (live and each["tokens"])
    tags.end(ordered)
    reader.read({"time_ms": 0, "updates": tags.take()})

    assert reader.text() == ordered
    assert not any(each["edits"] for each in reader.threads[0].values())
    assert {each["state"] for each in reader.threads[0].values()} == {"ended"}
