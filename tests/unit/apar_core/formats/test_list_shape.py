"""Where lists can be written in parallel, in any split of their text into pieces."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.formats.list_shape import (
    DetailEnd,
    DetailReader,
    FoundList,
    ListFinder,
    ListShape,
    Marker,
    NextLine,
    NextLineReader,
)
from tests.fakes.examples import num_examples

DETAIL = "what it is, and why it matters."
many = settings(max_examples=num_examples(200), deadline=None)


def words(text: str) -> list[str]:
    """Split a text roughly as tokenizers do."""
    return re.findall(r" ?[^\W\d]+| ?\d| ?[^\w\s]+|\n+|[ \t]+|.", text, re.DOTALL)


def find(pieces: list[str]) -> tuple[str, FoundList] | None:
    """Return the text at which a list is found."""
    finder = ListFinder()
    for index, piece in enumerate(pieces):
        if (found := finder.feed(piece)) is not None:
            return "".join(pieces[: index + 1]), found
    return None


@pytest.mark.parametrize(
    ("first", "second", "head_end"),
    [
        (f"1. Head: {DETAIL}\n", "2. Next:", ":"),
        (f"1) Head: {DETAIL}\n\n", "2) Next:", ":"),
        (f"Here:\n\n1. **Head**: {DETAIL}\n\n", "2. **Next**:", "**:"),
        (f"Here:\n\n1. **Head:** {DETAIL}\n", "2. **Next:**", ":**"),
        (f"**1. Head:** {DETAIL}\n", "**2. Next:**", ":**"),
        (f"1. **Head** {DETAIL}\n", "2. **Next**", "**"),
        (f"1. **Head** - {DETAIL}\n", "2. **Next** -", " -"),
        (f"1. Head – {DETAIL}\n", "2. Next –", " –"),  # noqa: RUF001
        (f"### 1. Head\n\n{DETAIL}\n\n- a point\n\n", "### 2. Next\n", "\n"),
        (f"**1. Head**\n{DETAIL}\n\n", "**2. Next**\n", "\n"),
        (f"Step 1: Head\n{DETAIL}\n\n", "Step 2: Next\n", "\n"),
        (f"**Step 1: Head**\n{DETAIL}\n\n", "**Step 2: Next**\n", "\n"),
        (f"- **Head**: {DETAIL}\n", "- **Next**:", "**:"),
        (f"* **Head:** {DETAIL}\n", "* **Next:**", ":**"),
        (f"• **Head:** {DETAIL}\n", "• **Next:**", ":**"),
        (f"1. Head: at 10:30, {DETAIL}\n", "2. Next:", ":"),
        (f"1. Head:\n   - {DETAIL}\n   - more\n", "2. Next:", ":"),
        (f"1. 头：{DETAIL}\n", "2. 尾：", "："),  # noqa: RUF001
        (f"4. Head: {DETAIL}\n", "5. Next:", ":"),
        (f"- **a**: no list\n\ntext\n\n1. Head: {DETAIL}\n", "2. Next:", ":"),
    ],
)
@pytest.mark.parametrize("split", [list, words, lambda text: [text]])
def test_the_second_head_opens_a_list(first, second, head_end, split) -> None:  # type: ignore[no-untyped-def]
    text = first + second

    found = find([piece for part in (first, second) for piece in split(part)])

    assert found is not None
    read, opened = found
    assert read == text
    assert opened.shape.head_end == head_end
    number = re.search(r"[0-9]+", second)
    assert opened.number == (int(number[0]) if number else 2)
    pieces = [piece for part in (first, second) for piece in split(part)]
    assert "".join(pieces[: opened.num_before]) + opened.lead == first


@pytest.mark.parametrize(
    "text",
    [
        "The capital is Paris.",
        "1. One\n2. Two\n3. Three\n",
        "1. Preheat the oven, and wait until it is hot.\n2. Mix flour and water: slowly.\n",
        f"1. Head: short\n2. Next: {DETAIL}\n",
        f"- Head: {DETAIL}\n- Next: {DETAIL}\n",
        f"- plain\n- **Next**: {DETAIL}\n",
        f"```\n1. Head: {DETAIL}\n2. Next: {DETAIL}\n```\n",
        f"1. Head: {DETAIL}\n```\ncode\n```\n2. Next: {DETAIL}\n",
        f"> 1. Head: {DETAIL}\n> 2. Next: {DETAIL}\n",
        f"| 1. Head: {DETAIL} |\n| 2. Next: {DETAIL} |\n",
        f"<think>\n1. Head: {DETAIL}\n2. Next: {DETAIL}\n",
        f"1. Head: {DETAIL}\n   1. Sub: {DETAIL}\n   2. Sub: {DETAIL}\n",
        f"1. Head: {DETAIL}\n- **a**: {DETAIL}\n- **b**: {DETAIL}\n",
        f"1. Head: {DETAIL}\n3. Next: {DETAIL}\n",
        f"1. Head: {DETAIL}\n2. Next without an end, which goes on as a sentence.\n",
        f"    1. Head: {DETAIL}\n    2. Next: {DETAIL}\n",
        f"It costs 1.5 million.\n1.5: {DETAIL}\n2.5: {DETAIL}\n",
    ],
)
@pytest.mark.parametrize("split", [list, words])
def test_other_text_opens_nothing(text, split) -> None:  # type: ignore[no-untyped-def]
    assert find(split(text)) is None


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("<seed:think>", "</seed:think>"),
        ("<reasoning>", "</reasoning>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ],
)
@pytest.mark.parametrize("split", [list, words])
def test_a_list_after_a_thought_opens(begins, ends, split) -> None:  # type: ignore[no-untyped-def]
    thought = f"{begins}\n1. A: {DETAIL}\n2. B: {DETAIL}\n"
    text = f"{thought}{ends}\n\n1. Head: {DETAIL}\n2. Next:"

    found = find(split(text))

    assert find(split(thought)) is None
    assert found is not None
    assert found[0] == text


@pytest.mark.parametrize("split", [list, words])
def test_a_list_after_text_about_a_mark_of_thoughts_opens(split) -> None:  # type: ignore[no-untyped-def]
    text = f"Write `<think>` first, as `<thinking>` is read as text.\n1. Head: {DETAIL}\n2. Next:"

    assert find(split(text)) is not None


def test_a_thought_that_the_prompt_has_opened_opens_nothing() -> None:
    finder = ListFinder(in_thought=True)
    text = f"1. A: {DETAIL}\n2. B: {DETAIL}\n</think>\n\nDone."

    assert not any(finder.feed(piece) for piece in words(text))


def read_detail(shape: ListShape, pieces: list[str]) -> tuple[str, DetailEnd | None]:
    """Return a detail's text with what separates it from the next item, and why it ends."""
    reader = DetailReader(shape)
    for piece in pieces:
        if (end := reader.feed(piece)) is not None:
            partial, separator = reader.closing(end)
            kept = "".join(pieces[: reader.num_kept]) + partial
            return kept + (separator if end is DetailEnd.ITEM else ""), end
    return "".join(pieces), None


NUMBERED = ListShape(Marker("", 1, "."), ":", "\n\n")


@pytest.mark.parametrize(
    ("shape", "text", "kept", "end"),
    [
        (NUMBERED, " one.\n\n3. ", " one.\n\n", DetailEnd.ITEM),
        (NUMBERED, " one.\n3. ", " one.\n\n", DetailEnd.ITEM),
        (NUMBERED, " one.\n\n**3. ", " one.\n\n", DetailEnd.ITEM),
        (NUMBERED, " one.\n   - sub\n   1. sub\n- sub\n\n3. ",
         " one.\n   - sub\n   1. sub\n- sub\n\n", DetailEnd.ITEM),
        (NUMBERED, " one.\n\nIn summary, ", " one.", DetailEnd.LIST),
        (NUMBERED, " one.\n## Next s", " one.", DetailEnd.LIST),
        (NUMBERED, " one.\nmore ", " one.", DetailEnd.LIST),
        (NUMBERED, "\nmore\n\n3. ", "\nmore\n\n", DetailEnd.ITEM),
        (NUMBERED, " one.\n```\n3. code\n\nmore\n```\n4. ", " one.\n```\n3. code\n\nmore\n```\n\n",
         DetailEnd.ITEM),
        (NUMBERED, " one.\n\n3", " one.\n\n3", None),
        (NUMBERED, "\n\n3. ", "\n\n", DetailEnd.ITEM),
        (ListShape(Marker("", 1, "."), ":", "\n", has_paragraphs=True), " one.\n\nmore\n\n3. ",
         " one.\n\nmore\n", DetailEnd.ITEM),
        (ListShape(Marker("", 1, "."), ":", "\n", has_lines=True), " one.\nmore\n\nText s",
         " one.\nmore", DetailEnd.LIST),
        (ListShape(Marker("-", None, ""), "**:", "\n"), " one.\n  - sub\n- ", " one.\n  - sub\n",
         DetailEnd.ITEM),
        (ListShape(Marker("-", None, ""), "**:", "\n"), " one.\n1. ", " one.", DetailEnd.LIST),
        (ListShape(Marker("### ", 1, "."), "\n", "\n\n"), "text\n1. sub\n\n- b\n\n### 3. ",
         "text\n1. sub\n\n- b\n\n", DetailEnd.ITEM),
        (ListShape(Marker("Step ", 1, ":"), "\n", "\n\n"), "text\n\nStep 3: ", "text\n\n",
         DetailEnd.ITEM),
    ],
)  # fmt: skip
@pytest.mark.parametrize("split", [list, words])
def test_a_detail_ends_with_its_item(shape, text, kept, end, split) -> None:  # type: ignore[no-untyped-def]
    assert read_detail(shape, split(text)) == (kept, end)


LINES = st.sampled_from(
    ["1. A: ", "2. B:", "3.", "- **x**: ", "### 1. H", "**Step 2: S**", "```", "text", "",
     "   - sub", "> q", "| a |", "12", "Step", f"1. Head: {DETAIL}", f"2. Next: {DETAIL}",
     "<think>", "</think>", "** ", "1.5", "Tip 1: ", "\u2013", " -", ":"]
)  # fmt: skip
TEXTS = st.lists(LINES, max_size=12).map("\n".join)


@st.composite
def two_splits(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    text = draw(TEXTS)
    cuts = [sorted(draw(st.sets(st.integers(0, len(text)), max_size=30))) for _ in range(2)]
    first, second = (
        [text[i:j] for i, j in zip([0, *cut], [*cut, len(text)], strict=True) if i < j]
        for cut in cuts
    )
    return first, second


@many
@given(splits=two_splits())
def test_any_split_shows_the_same_end_of_a_detail(splits: tuple[list[str], list[str]]) -> None:
    for shape in (NUMBERED, ListShape(Marker("", 1, "."), ":", "\n", has_paragraphs=True)):
        (first, end), (second, other_end) = (read_detail(shape, pieces) for pieces in splits)
        assert end == other_end
        # A last piece that is kept may contain white space after the detail.
        assert first.rstrip() == second.rstrip()


@many
@given(text=TEXTS)
def test_characters_and_words_show_the_same_list(text: str) -> None:
    found = [find(split(text)) for split in (list, words)]

    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None and found[1] is not None:
        assert found[0][1].shape == found[1][1].shape
        assert found[0][1].number == found[1][1].number


def test_reading_takes_time_linear_in_the_text() -> None:
    def seconds(number: int) -> float:
        pieces = words(f"1. Head: {DETAIL}\n" + "word 2. **x " * number)
        began = time.process_time()
        find(pieces)
        read_detail(NUMBERED, pieces)
        return time.process_time() - began

    seconds(1000)
    short = min(seconds(1000) for _ in range(3))
    assert seconds(16000) < 16 * 8 * short


def next_line(shape: ListShape, number: int, pieces: list[str], **options: bool) -> NextLine:
    reader = NextLineReader(shape, number, **options)
    state = NextLine.OPEN
    for piece in pieces:
        state = reader.feed(piece)
        if state is not NextLine.OPEN:
            break
    return state


STEPS = ListShape(Marker("**Step ", 1, ":"), "\n", "\n\n")
BULLETS = ListShape(Marker("-", None, ""), "**:", "\n")


@pytest.mark.parametrize(
    ("shape", "text", "state"),
    [
        (NUMBERED, "\n\n3. ", NextLine.ITEM),
        (NUMBERED, " \n3. ", NextLine.ITEM),
        (NUMBERED, "\n\n4. ", NextLine.OTHER),
        (NUMBERED, "\n\n1. ", NextLine.OTHER),
        (NUMBERED, "\n\n**3. ", NextLine.OTHER),
        (NUMBERED, "\n\n3) ", NextLine.OTHER),
        (NUMBERED, "\n\n3.5", NextLine.OTHER),
        (NUMBERED, "\n\nIn summary", NextLine.OTHER),
        (NUMBERED, " It also", NextLine.OTHER),
        (NUMBERED, "more", NextLine.OTHER),
        (NUMBERED, "\n\n3", NextLine.OPEN),
        (STEPS, "\n\n**Step 3: ", NextLine.ITEM),
        (STEPS, "\n\n**Step 4: ", NextLine.OTHER),
        (BULLETS, "\n- ", NextLine.ITEM),
        (BULLETS, "\n* ", NextLine.OTHER),
    ],
)
@pytest.mark.parametrize("split", [list, words])
def test_only_the_next_item_continues_a_list(shape, text, state, split) -> None:  # type: ignore[no-untyped-def]
    assert next_line(shape, 3, split(text)) is state


@pytest.mark.parametrize("text", ["3. ", "\n3. "])
def test_an_item_may_follow_a_text_that_ends_with_a_line_break(text: str) -> None:
    # Many tokenizers have a token for a full stop and the line breaks after it.
    reader = DetailReader(NUMBERED)
    ends = [reader.feed(piece) for piece in (" one", ".\n\n", "3", ".", " **")]

    assert (ends[-1], reader.num_kept, reader.closing(DetailEnd.ITEM)) == (
        DetailEnd.ITEM,
        2,
        ("", ""),
    )
    assert next_line(NUMBERED, 3, list(text), begins_line=True) is NextLine.ITEM
    assert next_line(NUMBERED, 3, list(text)) is (
        NextLine.ITEM if text.startswith("\n") else NextLine.OTHER
    )


def test_a_detail_begins_a_line_where_the_token_of_its_head_ends_one() -> None:
    text = words("```\n3. code\n```\n\n3. ")

    reader = DetailReader(NUMBERED, begins_line=True)
    ends = [reader.feed(piece) for piece in text]

    assert ends[-1] is DetailEnd.ITEM
    assert not any(ends[:-1])


def test_numbers_with_a_leading_zero_are_no_markers() -> None:
    assert find(words(f"01. Head: {DETAIL}\n02. Next: {DETAIL}\n03. ")) is None
