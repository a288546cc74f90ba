"""Validation of formats, outlines, and joined texts as the projects' clients write them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from apar_core.formats.parallel_format import (
    ParallelFormat,
    before_join,
    branches,
    join_parts,
    joined_text,
)
from apar_core.formats.resolved_format import FormatSetting
from apar_core.formats.shipped_formats import APR, PARALLEL_R1, SHIPPED, THREADWEAVER
from tests.fakes.examples import num_examples

SETTING: TypeAdapter[ParallelFormat] = TypeAdapter(FormatSetting)
CONTINUES = {"name": "mine", "trigger": "<FORK>", "parent": "continues"}
WAITS = {
    "name": "mine",
    "trigger": "<Go>",
    "parent": "waits",
    "outlines": {"count": 2},
    "join": {"header": "<Path {number}>", "suffix": "</Go>"},
}
JOINS: dict[str, Any] = {
    "name": "mine",
    "trigger": ">",
    "parent": "joins",
    "outlines": {"pattern": "<F-(?P<number>[0-9])>"},
    "child_seed": "x",
    "join": {"pattern": "<J-(?P<number>[0-9])>", "header": "{number}"},
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_format_is_what_its_own_fields_define(name: str) -> None:
    shipped = SHIPPED[name]

    assert SETTING.validate_python(name) == shipped
    assert SETTING.validate_python(shipped.model_dump(mode="json")) == shipped
    assert shipped.items is not None or shipped.trigger in shipped.markers


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({**CONTINUES, "colour": 1}, "colour"),
        ({**CONTINUES, "items": {}}, "trigger: has no effect with `items`"),
        ({"name": "n", "parent": "continues", "items": {}}, "a thread waits for the items"),
        ({"name": "n", "parent": "waits"}, "trigger: needed, unless a format has `items`"),
        ({"name": "n", "parent": "waits", "items": {"ahead": 0}}, "ahead"),
        ({**CONTINUES, "positions": "shared"}, "only `path` is served"),
        ({**CONTINUES, "join": WAITS["join"]}, "join: has no effect where the parent continues"),
        ({**CONTINUES, "cut": "nothing"}, "cut: `nothing` is possible only where"),
        ({**CONTINUES, "child_seed": "{number}"}, "the field {number} is unknown"),
        ({**CONTINUES, "child_seed": "{"}, "not a template"),
        ({**CONTINUES, "trigger": ""}, "trigger"),
        ({**WAITS, "join": None}, "join: needed where the parent waits"),
        ({**WAITS, "replacement": "x"}, "replacement: has no effect"),
        ({**WAITS, "child_seed": "{number:{number}}"}, "'number' may have no format"),
        ({**WAITS, "child_seed": "{number!r}"}, "'number' may have no format"),
        ({**WAITS, "cut": "nothing"}, "child_seed: needed where a child inherits nothing"),
        ({**WAITS, "child_end": [""]}, "child_end: an empty text"),
        ({**WAITS, "outlines": {}}, "exactly one of"),
        ({**WAITS, "outlines": {"count": 2, "pattern": "(?P<number>.)"}}, "exactly one of"),
        ({**WAITS, "outlines": {"pattern": "("}}, "not a regular expression"),
        ({**WAITS, "outlines": {"pattern": "a"}}, "(?P<number>...)"),
        ({**WAITS, "child_seed": "{topic}"}, "the field {topic} is unknown"),
        ({**WAITS, "join": JOINS["join"]}, "join.pattern: possible only where `parent` is `joins`"),
        ({**JOINS, "join": {"header": ""}}, "join.pattern: needed where `parent` is `joins`"),
        ({**JOINS, "outlines": {"count": 2}}, "outlines: `pattern` alone is needed"),
        ({**JOINS, "join": {**JOINS["join"], "unclosed": "stop"}}, "join: `unclosed: stop`"),
        ({**JOINS, "children_fork": True}, "children_fork, cut: `true` and `before`"),
        ({**JOINS, "join": {**JOINS["join"], "pattern": "a"}}, "(?P<number>...)"),
        ({**JOINS, "join": {**JOINS["join"], "pattern": "(?P<number>(a*)*b)"}}, "join.pattern"),
        (
            {**JOINS, "join": {**JOINS["join"], "result": ["<R>", "</R>"]}},
            "without_result: needed with `result`",
        ),
        (
            {**JOINS, "join": {**JOINS["join"], "without_result": "", "result": ["", "b"]}},
            "result: two texts that are not empty are needed",
        ),
        ({"like": "nobody"}, "unknown format 'nobody'; known: apar,"),
        ({"like": "multiverse"}, "'multiverse' cannot be served: it continues after"),
        ("npr", "'npr' cannot be served"),
    ],
)
def test_impossible_definition_is_refused_with_its_field(changed: object, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        SETTING.validate_python(changed)


def test_format_like_a_shipped_one_keeps_every_other_fact() -> None:
    changed = SETTING.validate_python(
        {"like": "threadweaver", "join": {"suffix": "\n<Conclusion>\n"}}
    )

    assert changed.name == "threadweaver (changed)"
    assert changed.join is not None
    assert THREADWEAVER.join is not None
    assert changed.join.suffix == "\n<Conclusion>\n"
    assert changed.join.header == THREADWEAVER.join.header
    assert changed.outlines == THREADWEAVER.outlines


def threadweaver_client(outlines: str, threads: dict[str, str]) -> str:
    """Assemble as `branching_generate` does, written without the code under test."""
    text = outlines + "\n"
    for number, thread in threads.items():
        text += f"<Thread>\n{number}:" + thread
        if not thread.endswith("</Thread>"):
            text += "</Thread>"
    return text + "\n" if all(t.endswith("</Thread>") for t in threads.values()) else text


NUMBERS = st.lists(
    st.sampled_from(["1", "2", "10", "1.2", "2.1.3"]), min_size=1, max_size=4, unique=True
)


@settings(max_examples=num_examples(40))
@given(data=st.data(), numbers=NUMBERS)
def test_threadweaver_joins_as_its_client_does(data: st.DataObject, numbers: list[str]) -> None:
    words = st.text("abc <>", max_size=5).map(str.strip)
    closed = st.tuples(words, st.sampled_from(["</Thread>", ""])).map("".join)
    threads = {number: data.draw(closed) for number in numbers}
    earlier = "<Outline> 9: old</Outline><Outlines>"
    outlines = "".join(f"<Outline> {number}: topic</Outline>" for number in numbers)
    generated = f"text {earlier}{outlines}</Outlines>"

    opened = branches(THREADWEAVER, generated, "<Outlines><Outline> 7: user</Outline></Outlines>")

    assert [branch.number for branch in opened] == numbers
    joined = joined_text(THREADWEAVER, opened, list(threads.values()))
    assert generated + joined == threadweaver_client(generated, threads)


def test_repeated_outline_opens_one_thread() -> None:
    opened = branches(THREADWEAVER, "<Outlines><Outline>1:a<Outline>2:b<Outline> 1 :c</Outlines>")

    assert [branch.number for branch in opened] == ["1", "2"]


def test_outlines_without_a_number_open_nothing() -> None:
    assert branches(THREADWEAVER, "<Outlines><Outline>a</Outline></Outlines>", "<Outline> 1:") == ()


def test_parallel_r1_joins_two_paths_and_closes_the_one_that_ran_out() -> None:
    opened = branches(PARALLEL_R1, "Hm. <Parallel>")

    joined = joined_text(PARALLEL_R1, opened, ["7 * 6 = 42</Path>", "6 + 6 = "])

    assert joined == "<Path>7 * 6 = 42</Path><Path>6 + 6 = </Path></Parallel>\n<Summary>"


def test_children_keep_their_own_text_as_pieces_of_the_join() -> None:
    opened = branches(PARALLEL_R1, "<Parallel>")

    parts = list(join_parts(PARALLEL_R1, opened, ["one</Path>", "two</Path>"]))

    assert [(part.text, part.child) for part in parts] == [
        ("<Path>", None),
        ("one</Path>", 0),
        ("<Path>", None),
        ("two</Path>", 1),
        ("</Parallel>\n<Summary>", None),
    ]


APR_PROMPT = "Moving to Node #1\nCurrent State: 39:[25, 36, 2], Operations: ['51-49=2']\n"
APR_CALL = (
    "Generated Node #1,0: 39:[11, 2] Operation: 36-25=11\n"
    "Generated Node #1,1: 39:[61, 2] Operation: 36+25=61\n"
    "<Calling Sub Searches>\n"
    "<Start Sub Search 0 at level 1> Moving to Node #1,0\n"
    "<Start Sub Search 1 at level 1> Moving to Node #1,1\n"
    "<Start Sub Search 2 at level 1> Moving to Node #1,7\n"
    "<End Calling Sub Searches>"
)


def test_apr_spawns_with_a_message_and_joins_with_a_result() -> None:
    opened = branches(APR, APR_CALL, APR_PROMPT)

    assert [branch.message for branch in opened] == [
        "Moving to Node #1,0\nCurrent State: 39:[11, 2], Operations: ['51-49=2', '36-25=11']",
        "Moving to Node #1,1\nCurrent State: 39:[61, 2], Operations: ['51-49=2', '36+25=61']",
    ]
    solved = (
        "\n39,39 equal: Goal Reached\nMoving to Node #1,0\nall steps\n39,39 equal: Goal Reached\n"
    )
    joined = joined_text(APR, opened, [solved, "\n22,39 unequal: No Solution\n"])
    assert joined == (
        "<Sub Searches>\n"
        "<Goal Reached in Sub Search 0 at level 1 at Node #1,0>\n"
        "Moving to Node #1,0\nall steps\n39,39 equal: Goal Reached\n"
        "<No Solution in Sub Search 1 at level 1 at Node #1,1>\n"
        "<End Sub Searches>\n"
    )
    assert before_join(APR, APR_CALL) == APR_CALL.partition("<Calling")[0]


def test_a_call_in_a_prompt_spawns_nothing() -> None:
    assert branches(APR, "Hello <End Calling Sub Searches>", APR_PROMPT + APR_CALL) == ()


@given(text=st.text("[]'(),0x_:#1 \n", max_size=60))
def test_apr_reads_any_description_without_an_error(text: str) -> None:
    prompt = f"Moving to Node #1\nCurrent State: 39:[{text}], Operations: [{text}]\n"

    assert len(branches(APR, APR_CALL.replace("1,7", "1"), prompt)) <= 3


@pytest.mark.parametrize(
    "item", ["{{}}", "-" * 50_000 + "1", "0x" + "f" * 5000, "1+" * 20_000 + "1", "(" * 300]
)
def test_a_description_that_python_cannot_evaluate_opens_no_thread(item: str) -> None:
    state = f"39:[{item}], Operations: ['51-49=2', {item}]"
    prompt = f"Moving to Node #1\nCurrent State: {state}\n"

    assert branches(APR, APR_CALL.replace("1,7", "1"), prompt) == ()
