"""What the threads of a list generate, and what a reader and each thread must see of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.fakes.block_scripts import END, tokens

FIRST_DETAIL = "the very first detail of them all"


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
    first_number = draw(st.sampled_from([1, 1, 4])) + 1
    opening = draw(letters) + "\n\n"
    first = opening + style.item(first_number - 1, draw(letters))
    first += style.detail.format(words=FIRST_DETAIL) + style.separator
    root = first + style.item(first_number, draw(letters))
    case = ListCase({}, root)
    case.contexts["", 0] = prompt
    generated = tokens(root)
    # Items after the second one that have a head; how many of them the root begins, and whether
    # it then begins one more, whose head fails.
    num_heads = draw(st.integers(0, 5))
    num_begun = draw(st.integers(0, num_heads))
    begins_failed = num_begun == num_heads and draw(st.booleans())
    path, heads, detail_context = "", "", [*prompt, *generated]
    for index in range(num_heads + 1):
        number = first_number + index
        marker = style.marker.format(number=number + 1)
        words = style.detail.format(words=draw(letters))
        words += draw(st.sampled_from(["", "\n   - nested", "\n   1. a: b"]))
        any_marker = style.marker.format(number=draw(st.integers(1, 99)))
        after = draw(st.sampled_from([f"{style.separator}{any_marker} ", "", "\n\no"]))
        case.script[f"{path}0"] = tokens(words + after, ends=not after)
        case.contexts[f"{path}0", 0] = detail_context
        case.contexts[f"{path}1", 0] = [
            *prompt, *tokens(root + heads + style.separator + marker)
        ]  # fmt: skip
        is_text = index <= num_begun
        if is_text:
            case.text += words
            case.contexts["", len(generated)] = [*prompt, *tokens(case.text)]
        if index < num_heads:
            head = style.head.format(word=draw(letters))
            case.script[f"{path}1"] = tokens(head)
            detail_context = [*prompt, *tokens(first + marker + head)]
            heads += style.separator + marker + head
        else:
            case.script[f"{path}1"] = tokens(draw(st.sampled_from(["", " z"])), ends=True)
        if is_text and index < num_begun:
            generated += tokens(f"{style.separator}{marker} ")
            case.text += style.separator + marker + head
        path += "1."
    if begins_failed:
        probe = f"{style.separator}{marker} "
        generated += tokens(probe)
        case.text += probe
        case.contexts["", len(generated)] = [*prompt, *tokens(case.text)]
    rest = draw(st.text("abcdefgh ", max_size=8))
    if not begins_failed and rest:
        rest = draw(st.sampled_from(["\n", "\n\n", " ", ""])) + "y" + rest
    case.script[""] = [*generated, *tokens(rest), END]
    case.text += rest
    return case
