"""What the threads of a list generate, and what a reader and each thread must see of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hypothesis import strategies as st

from tests.fakes.block_scripts import END, tokens

FIRST_DETAIL = "the very first detail of them all"
Ending = Literal["item", "end", "line"]


@dataclass(frozen=True)
class Style:
    """How a list is written: `marker` with a {number}, `head` with a {word}."""

    marker: str
    head: str
    separator: str
    detail: str = " {words}"

    def item(self, number: int, word: str) -> str:
        return self.marker.format(number=number) + self.head.format(word=word)


STYLES = {
    "colon": Style("{number}.", " {word}:", "\n"),
    "far": Style("{number}.", " {word}:", "\n\n"),
    "bracket": Style("{number})", " **{word}**:", "\n\n"),
    "bold": Style("**{number}.", " {word}:**", "\n"),
    "bullet": Style("-", " **{word}**:", "\n"),
    "heading": Style("### {number}.", " {word}\n", "\n\n", "{words}"),
    "step": Style("Step {number}:", " {word} -", "\n"),
    "lead": Style("{number}.", " **{word}**", "\n\n"),
}


@dataclass
class ListCase:
    """Scripts of all threads, the text of the answer, and what each thread begins with.

    contexts: by replay key and how many tokens the thread has generated before.
    """

    script: dict[str, list[int]]
    text: str
    contexts: dict[tuple[str, int], list[int]] = field(default_factory=dict)


@st.composite
def list_cases(draw: st.DrawFn, prompt: list[int]) -> ListCase:
    """Draw a list in any style, with items of any length after its end."""
    style = STYLES[draw(st.sampled_from(sorted(STYLES)))]
    letters = st.text("abcdefgh ", max_size=12).map(lambda text: f"x{text}x")
    first_number = draw(st.sampled_from([1, 1, 4]))

    def detail(words: str) -> str:
        return style.detail.format(words=words)

    opening = draw(letters) + "\n\n"
    first = opening + style.item(first_number, draw(letters)) + detail(FIRST_DETAIL)
    first += style.separator
    root = first + style.item(first_number + 1, draw(letters))
    case = ListCase({}, root)
    case.contexts["", 0] = prompt
    path, heads, before = "", "", [*prompt, *tokens(root)]
    ended: Ending | None = None
    own_context = before
    num_items = draw(st.integers(1, 6))
    for index in range(num_items):
        number = first_number + 1 + index
        ending: Ending = draw(st.sampled_from(["item", "item", "item", "end", "line"]))
        words = detail(draw(letters)) + draw(st.sampled_from(["", "\n   - nested", "\n   1. a: b"]))
        marker = style.marker.format(number=draw(st.integers(1, 99)))
        after = {"item": f"{style.separator}{marker} ", "end": "", "line": "\n\no"}[ending]
        name = f"{path}0"
        case.script[name] = tokens(words + after) + ([END] if ending == "end" else [])
        case.contexts[name, 0] = own_context
        if ended is None:
            case.text += words
        # The head of the next item.
        next_marker = style.marker.format(number=number + 1)
        head_name = f"{path}1"
        head_context = [*before, *tokens(heads + style.separator + next_marker)]
        case.contexts[head_name, 0] = head_context
        is_last = index == num_items - 1
        if is_last:
            # A head that ends the answer, or that never ends.
            case.script[head_name] = [*tokens(" z"), END] if draw(st.booleans()) else [END]
        else:
            head = style.head.format(word=draw(letters))
            case.script[head_name] = tokens(head)
            own_context = [*prompt, *tokens(first + next_marker + head)]
            heads += style.separator + next_marker + head
        if ended is None and ending != "item":
            ended = ending
        elif ended is None:
            case.text += style.separator + ("" if is_last else next_marker + head)
        path += "1."
    case.script[""] = tokens(root)
    if ended != "end":
        rest = draw(st.text("abcdefgh ", max_size=8))
        case.contexts["", len(tokens(root))] = [*prompt, *tokens(case.text)]
        case.script[""] += [*tokens(rest), END]
        case.text += rest
    return case
