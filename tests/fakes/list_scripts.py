"""What the threads of a list generate, and what a reader and each thread must see of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.fakes.block_scripts import END, CharacterTokenizer

FIRST_DETAIL = "the very first detail of them all"


class MergingTokenizer(CharacterTokenizer):
    """Has tokens of several characters, as those of real models."""

    MERGES = (".\n\n", ".\n", "\n\n", ":**", " **", "**:", " -", "x:")
    FIRST_ID = 60

    def encode(self, text: str, **options: bool) -> list[int]:
        found: list[int] = []
        while text:
            merge = next((each for each in self.MERGES if text.startswith(each)), None)
            if merge is None:
                found += super().encode(text[0])
            else:
                found.append(self.FIRST_ID + self.MERGES.index(merge))
            text = text[len(merge or text[0]) :]
        return found

    def get_vocab(self) -> dict[str, int]:
        merged = {text: self.FIRST_ID + index for index, text in enumerate(self.MERGES)}
        return super().get_vocab() | merged

    def _text(self, token_id: int) -> str:
        index = token_id - self.FIRST_ID
        return self.MERGES[index] if 0 <= index < len(self.MERGES) else super()._text(token_id)


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
def list_cases(draw: st.DrawFn, prompt: list[int], tokenizer: CharacterTokenizer) -> ListCase:
    """Draw a list in any style, with items of any length after its end."""

    def tokens(text: str, *, ends: bool = False) -> list[int]:
        return [*tokenizer.encode(text), *([END] if ends else [])]

    style = STYLES[draw(st.sampled_from(sorted(STYLES)))]
    letters = st.text("abcdefgh ", max_size=12).map(lambda text: f"x{text}x")
    first_number = draw(st.sampled_from([1, 1, 4])) + 1
    opening = draw(letters) + "\n\n"
    first = opening + style.item(first_number - 1, draw(letters))
    stop = draw(st.sampled_from(["", "."]))
    first += style.detail.format(words=FIRST_DETAIL + stop) + style.separator
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
        words += draw(st.sampled_from(["", ".", "\n   - nested", "\n   1. a: b"]))
        any_marker = style.marker.format(number=draw(st.integers(1, 99)))
        after = draw(st.sampled_from([f"{style.separator}{any_marker} ", "", "\n\no"]))
        case.script[f"{path}0"] = tokens(words + after, ends=not after)
        # The line breaks of a token that is kept as a whole are a part of the detail.
        line_breaks = after[: len(after) - len(after.lstrip("\n"))] if words.endswith(".") else ""
        if not isinstance(tokenizer, MergingTokenizer):
            line_breaks = ""
        separator = style.separator[len(line_breaks) :]
        words += line_breaks
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
            generated += tokens(f"{separator}{marker} ")
            case.text += separator + marker + head
        path += "1."
    if begins_failed:
        probe = f"{separator}{marker} "
        generated += tokens(probe)
        case.text += probe
        case.contexts["", len(generated)] = [*prompt, *tokens(case.text)]
    rest = draw(st.text("abcdefgh ", max_size=8))
    if not begins_failed and rest:
        rest = draw(st.sampled_from(["\n", "\n\n", " ", ""])) + "y" + rest
    case.script[""] = [*generated, *tokens(rest), END]
    case.text += rest
    return case
