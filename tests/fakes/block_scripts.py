"""Scripts of requests whose threads wait for their children, and what a resubmitting client reads.

Tokens are characters: an ordinary character, or a marker of a format. `Client` knows the formats by
what their own clients do, independently of `apar_core`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from apar_core.fork_parameters import NO_TOKEN, ForkParameters
from apar_core.formats.parallel_format import Join, Outlines, ParallelFormat
from apar_core.formats.shipped_formats import PARALLEL_R1, THREADWEAVER

END = 3
MARKERS = (
    *("<Parallel>", "</Parallel>", "<Outlines>", "</Outlines>", "<Outline>", "</Outline>"),
    *("<Thread>", "</Thread>", "<Path>", "</Path>", "<Summary>", "</Summary>"),
)
_FIRST_MARKER = 20
_FIRST_CHARACTER = 100
_PIECES = re.compile("|".join(map(re.escape, MARKERS)) + "|.", re.DOTALL)

assert THREADWEAVER.join is not None
NESTED = THREADWEAVER.model_copy(
    update={
        "name": "nested",
        "children_fork": True,
        "join": THREADWEAVER.join.model_copy(update={"unclosed": "continue"}),
    }
)
"""ThreadWeaver's grammar, where children fork too, and a child that is cut off is closed."""

_FORKS = Outlines(pattern=r"<FORK-(?P<number>[0-9]+)>(?P<topic>[^<]*)</FORK-[0-9]+>")
_JOINS = r"<JOIN-(?P<number>[0-9]+)>"
RESULTS = ParallelFormat(
    name="results on demand",
    trigger=">",
    child_seed="\n(you are worker {number}: {topic})\n",
    parent="joins",
    outlines=_FORKS,
    join=Join(
        pattern=_JOINS,
        result=("<RETURN>", "</RETURN>"),
        header="\n{number} says: {result}\n",
        without_result="\n{number} says nothing\n",
    ),
)
"""An organizer joins workers in any order, and reads what they return."""
MESSAGES = RESULTS.model_copy(
    update={"name": "messages on demand", "cut": "nothing", "child_seed": "Task {topic}!"}
)
"""The same, with workers that read only their task."""
WHOLE_TEXTS = RESULTS.model_copy(
    update={
        "name": "texts on demand",
        "child_end": ("</Thread>",),
        "join": Join(pattern=_JOINS, header="\n{number}: ", close="</Thread>", suffix="\n"),
    }
)
"""The same, with an organizer that reads the whole text of a worker."""
ON_DEMAND = (RESULTS, MESSAGES, WHOLE_TEXTS)


class CharacterTokenizer:
    """A token for each marker and for each character."""

    def encode(
        self, text: str, *, add_special_tokens: bool = False, split_special_tokens: bool = False
    ) -> list[int]:
        return [
            _FIRST_MARKER + MARKERS.index(piece)
            if piece in MARKERS
            else _FIRST_CHARACTER + ord(piece)
            for piece in (text if split_special_tokens else _PIECES.findall(text))
        ]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(self._text, token_ids))

    def get_vocab(self) -> dict[str, int]:
        texts = [*MARKERS, *map(chr, range(1, 0x2000))]
        return {text: self.encode(text)[0] for text in texts}

    def _text(self, token_id: int) -> str:
        if token_id >= _FIRST_CHARACTER:
            return chr(token_id - _FIRST_CHARACTER)
        if token_id >= _FIRST_MARKER:
            return MARKERS[token_id - _FIRST_MARKER]
        return "?"


TOKENIZER = CharacterTokenizer()
_ANGLES = frozenset(token for text, token in TOKENIZER.get_vocab().items() if ">" in text)


def block_parameters(
    definition: ParallelFormat, *, max_threads: int = 16, max_forks: int = 100
) -> ForkParameters:
    blocks = definition.model_dump_json()
    return ForkParameters(NO_TOKEN, (), (), True, max_threads, max_forks, (END,), blocks=blocks)


Script = Mapping[str, list[int]]


def tokens(text: str, *, ends: bool = False) -> list[int]:
    """Return the tokens of a text, and the end token if the thread ends with it."""
    return [*TOKENIZER.encode(text), *([END] if ends else [])]


@dataclass
class Client:
    """Resubmits requests as the project's own client does; plain completions come from a script.

    contexts: what each completion had as its prompt, in order: (replay key, prompt, generated).
    unjoined: keys of workers that nobody has joined.
    """

    definition: ParallelFormat
    script: Script
    tokenizer: Any = TOKENIZER
    contexts: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    unjoined: set[str] = field(default_factory=set)
    _taken: dict[str, int] = field(default_factory=dict)
    _opened: dict[str, int] = field(default_factory=dict)

    def answer(self, prompt: list[int]) -> list[int]:
        """Return the whole text behind a prompt."""
        if self.definition.parent == "joins":
            return self._organizer(prompt)
        text, _ = self._thread("", prompt)
        return text

    def complete(self, key: str, prompt: list[int], stop_ids: set[int]) -> list[int]:
        """Return what the model generates up to and including a stop token or the end token."""
        script, generated = self.script[key], []
        for token_id in script[self._taken.get(key, 0) :]:
            generated.append(token_id)
            if token_id in stop_ids or token_id == self.end_id:
                break
        self._taken[key] = self._taken.get(key, 0) + len(generated)
        return generated

    @property
    def end_id(self) -> int:
        """The model's end token."""
        return END

    def _tokens(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _organizer(self, prompt: list[int]) -> list[int]:
        """Return the text of an organizer, with that of each worker before what it reads of it."""
        context, shown = list(prompt), list[int]()
        workers: dict[str, tuple[str, list[int]]] = {}
        while True:
            segment: list[int] = []
            found = None
            while found is None:
                piece = self.complete("", [*context, *segment], set(_ANGLES))
                segment += piece
                if piece[-1:] == [self.end_id] or not piece:
                    self.contexts.append(("", context, segment))
                    self.unjoined = {key for key, _ in workers.values()}
                    return [*shown, *(token for token in segment if token != self.end_id)]
                written = self.tokenizer.decode(segment)
                fork = re.search(r"<FORK-([0-9]+)>([^<]*)</FORK-[0-9]+>$", written)
                if fork and fork[1] not in workers:
                    workers[fork[1]] = self._worker(fork[1], fork[2], [*context, *segment])
                join = re.search(r"<JOIN-([0-9]+)>$", written)
                found = join if join and join[1] in workers else None
            self.contexts.append(("", context, segment))
            _, text = workers.pop(found[1])
            read = self._read_of_worker(found[1], text)
            if self.definition.name == "texts on demand":
                shown += [*segment, *read]
            else:
                shown += [*segment, *text, *read]
            context = [*context, *segment, *read]

    def _worker(self, number: str, task: str, context: list[int]) -> tuple[str, list[int]]:
        key = str(self._opened.get("", 0))
        self._opened[""] = int(key) + 1
        if self.definition.name == "messages on demand":
            prompt = self._tokens(f"Task {task}!")
        else:
            prompt = [*context, *self._tokens(f"\n(you are worker {number}: {task})\n")]
        closing = self._tokens("</Thread>")
        ends = set(closing) if self.definition.name == "texts on demand" else set()
        generated = self.complete(key, prompt, ends)
        self.contexts.append((key, prompt, generated))
        return key, [token for token in generated if token != self.end_id]

    def _read_of_worker(self, number: str, text: list[int]) -> list[int]:
        if self.definition.name == "texts on demand":
            closing = self._tokens("</Thread>")
            closed = text[-1:] == closing
            before = self._tokens(f"\n{number}: ")
            return [*before, *text, *([] if closed else closing), *self._tokens("\n")]
        written = self.tokenizer.decode(text)
        if "<RETURN>" not in written:
            return self._tokens(f"\n{number} says nothing\n")
        result = written.split("<RETURN>")[-1].split("</RETURN>")[0]
        return self._tokens(f"\n{number} says: {result}\n")

    def _thread(self, key: str, prompt: list[int]) -> tuple[list[int], bool]:
        """Return a thread's text, without an end token, and whether its own marker ended it."""
        weaves = self.definition.name != "parallel-r1"
        forks = not key or self.definition.children_fork
        child_end = "</Thread>" if weaves else "</Path>"
        trigger = "</Outlines>" if weaves else "<Parallel>"
        stop = (*([trigger] if forks else []), *([child_end] if key else []))
        text: list[int] = []
        # What the thread has generated since its last join.
        segment: list[int] = []
        while True:
            stop_ids = {self._tokens(each)[0] for each in stop}
            generated = self.complete(key, [*prompt, *text], stop_ids)
            self.contexts.append((key, [*prompt, *text], generated))
            last = self.tokenizer.decode(generated[-1:])
            if generated[-1:] == [self.end_id]:
                return [*text, *generated[:-1]], False
            text += generated
            segment += generated
            if key and last == child_end:
                return text, True
            if last != trigger:
                return text, False  # Cut off.
            numbers = list(_numbers(self.tokenizer.decode(segment))) if weaves else ["1", "2"]
            if not numbers:
                continue
            context, segment = [*prompt, *text], []
            all_closed = True
            first = self._opened.get(key, 0)
            self._opened[key] = first + len(numbers)
            for index, number in enumerate(numbers):
                name = f"{key}.{first + index}" if key else str(first + index)
                seed = f"\n<Thread>\n{number}:" if weaves else "<Path>"
                header = seed[1:] if weaves and index else seed
                child, is_closed = self._thread(name, [*context, *self._tokens(seed)])
                text += [*self._tokens(header), *child]
                if not is_closed:
                    text += self._tokens(child_end)
                all_closed &= is_closed
            if self.definition.name == "threadweaver" and not all_closed:
                return text, False
            text += self._tokens("\n" if weaves else "</Parallel>\n<Summary>")


def _numbers(segment: str) -> Iterator[str]:
    outlines = segment.rpartition("<Outlines>")[2]
    return iter(dict.fromkeys(re.findall(r"<Outline>\s*([0-9.]+)\s*:", outlines)))


@st.composite
def block_scripts(draw: st.DrawFn, definition: ParallelFormat) -> Script:
    """Draw what the threads of a request generate, with blocks up to three deep."""
    if definition.parent == "joins":
        return draw(_scripts_on_demand(definition))
    script: dict[str, list[int]] = {}
    weaves = definition.name != "parallel-r1"
    letters = st.text("abcdefgh ", max_size=8)

    def thread(key: str, depth: int) -> None:
        own: list[int] = []
        num_children = 0
        forks = depth == 0 or (definition.children_fork and depth < 3)
        for _ in range(draw(st.integers(0, 3 - depth)) if forks else 0):
            own += tokens(draw(letters))
            if weaves:
                numbers = draw(st.lists(st.sampled_from("1234"), max_size=4))
                outlines = "".join(f"<Outline> {n}: {draw(letters)}</Outline>" for n in numbers)
                own += tokens(f"<Parallel><Outlines>{outlines}</Outlines>")
                opened = len(set(numbers))
            else:
                own += tokens("<Parallel>")
                opened = 2
            for ordinal in range(num_children, num_children + opened):
                thread(f"{key}.{ordinal}" if key else str(ordinal), depth + 1)
            num_children += opened
        own += tokens(draw(letters))
        closes = key and draw(st.integers(0, 7))
        marker = "</Thread>" if weaves else "</Path>"
        script[key] = own + (tokens(marker) if closes else [END])

    thread("", 0)
    return script


@st.composite
def _scripts_on_demand(draw: st.DrawFn, definition: ParallelFormat) -> Script:
    """Draw what an organizer and its workers generate: forks and joins in any order."""
    letters = st.text("abcdefgh> ", max_size=8)
    script: dict[str, list[int]] = {"": []}
    open_numbers: set[str] = set()
    num_workers = 0
    for _ in range(draw(st.integers(0, 7))):
        script[""] += tokens(draw(letters))
        number = draw(st.sampled_from("123"))
        if draw(st.booleans()):
            script[""] += tokens(f"<FORK-{number}>{draw(letters)}</FORK-{number}>")
            if number in open_numbers:
                continue
            open_numbers.add(number)
            text = draw(letters)
            if draw(st.integers(0, 3)):
                text += f"<RETURN>{draw(letters)}" + draw(st.sampled_from(["</RETURN>", ""]))
            closes = draw(st.booleans())
            if closes and definition.child_end:
                script[str(num_workers)] = tokens(text + "</Thread>")
            else:
                script[str(num_workers)] = tokens(text, ends=True)
            num_workers += 1
        else:
            script[""] += tokens(f"<JOIN-{number}>")
            open_numbers.discard(number)
    script[""] += tokens(draw(letters), ends=True)
    return script


FORMATS = {each.name: each for each in (THREADWEAVER, PARALLEL_R1, NESTED, *ON_DEMAND)}
