"""Filters of generated questions and answers; each rejection has a reason for the report.

They look at form, never at content: what a model asks and refuses is its own. All take time linear
in the text. Those of questions were tuned on 140 questions of SmolLM2-135M.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from heapq import nlargest

from apar_core.offline.data.structure import split_thought

MIN_WORDS = 3
MAX_QUESTION_CHARACTERS = 2000
NEAR_SHARE = 0.7
"""Jaccard similarity of two questions' shingles from which one is a near-duplicate."""

_SHINGLE_WORDS = 3
# A question is compared with the latest ones that share a shingle, so that common ones cost little.
_MAX_COMPARED = 50
_NUM_SIMILAR = 8

_NGRAM_WORDS = 4
_MIN_NGRAMS = 20
_MAX_REPEATED_SHARE = 0.3
_MIN_REPEATED_LINES = 3
_LINE_WORDS = 3

# Chinese and Japanese have no blanks between words.
_CHARACTER_WORDS = r"\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_CHARACTER_WORDS}]|[^\W{_CHARACTER_WORDS}]+")
_BROKEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ue000-\uf8ff\ufffd]")
_MARKER = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|\[/?INST\]|<</?SYS>>|</?s>|"  # noqa: RUF001
    r"<(?:start|end)_of_turn>|</?think>|"
    r"^(?:#{1,4} )?(?:user|human|assistant|system)[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
_CLOSING = "\"'”’»)]}*_`」』）】》"  # noqa: RUF001
_CONTINUED = re.compile(r"[,;.!?)\]}»”…]|\.\.\.")
# People begin so without a capital; other words without one continue a sentence.
_OPENERS = frozenset(
    "what how why when where which who whose can could would should will do does did is are was i "  # noqa: SIM905
    "im my write give tell explain describe list create make suggest summarize translate "
    "please help find show compare hi hello hey".split()
)
_CUT_ENDING = re.compile(
    r"(?:[,(\[{]|[-–—]|\b(?:a|an|the|of|to|and|or|in|on|at|for|with|from|by|as|that|which|is|are|"  # noqa: RUF001
    r"was|were|your|my|our|their|his|her|its|between|about|into|than|because|if|but))\Z",
    re.IGNORECASE,
)
# Words of which an English text has some. Nothing is known about requests in other languages.
_ENGLISH = frozenset(
    "the of and to is are in a an that this it for with on by as at be will was were".split()  # noqa: SIM905
)
_MIN_ENGLISH_WORDS = 3
_ADDRESSING = frozenset(
    "i me my mine we us our you your please need want help looking".split()  # noqa: SIM905
)
_IMPERATIVES = frozenset(
    "write give tell explain describe list create make suggest summarize summarise translate "  # noqa: SIM905
    "find show compare provide generate develop design identify calculate compute convert help "
    "edit classify analyze analyse discuss name outline draft compose prepare plan propose add "
    "solve prove evaluate determine define rank choose imagine consider implement build use fix "
    "extract complete improve correct check answer think select sort count let given rewrite "
    "recommend".split()
)
_SENTENCE = re.compile(r"(?:^|[.!:\n])[^\w\n.!:]*(\w+)")
_PLACEHOLDER = re.compile(
    r"\[(?:your|my|the|insert|name|topic|company|date|city|country|product|subject|specific|"
    r"number|location|industry|field|type)\b[^\[\]\n]{0,40}\](?!\()",
    re.IGNORECASE,
)
_ANSWERING = re.compile(
    r"(?:sure|certainly|of course|absolutely|great question|here (?:is|are)\b|here's|"
    r"i'm sorry|i am sorry|sorry|i apologi[sz]e|as an ai|i'm an ai|i am an ai|"
    r"thank you for|you're welcome|the answer is|that sounds)",
    re.IGNORECASE,
)


def question_fault(text: str, *, is_cut: bool) -> str | None:
    """Return why a sampled text is not a usable question, or None.

    `is_cut` says that it reached the token limit. The text has no whitespace around it.
    """
    words = _WORD.findall(text)
    if not words:
        return "empty"
    if _BROKEN.search(text):
        return "broken characters"
    if _MARKER.search(text):
        return "chat markers"
    if is_cut or len(text) > MAX_QUESTION_CHARACTERS:
        return "too long"
    if len(words) < MIN_WORDS:
        return "too short"
    if _ANSWERING.match(text):
        return "answer in place of a question"
    if _CONTINUED.match(text) or (text[0].islower() and words[0] not in _OPENERS):
        return "begins in the middle"
    if _CUT_ENDING.search(text.rstrip(_CLOSING)):
        return "no ending"
    if _PLACEHOLDER.search(text):
        return "placeholder"
    if _asks_nothing(text, [word.casefold() for word in words]):
        return "asks nothing"
    if is_repetitive(text):
        return "repetition"
    return None


def _asks_nothing(text: str, words: list[str]) -> bool:
    """Return whether an English text neither asks, nor orders, nor speaks of the two who talk."""
    known = set(words)
    if "?" in text or known & _ADDRESSING:
        return False
    if sum(word in _ENGLISH for word in words) < _MIN_ENGLISH_WORDS:
        return False
    firsts = {match[1].casefold() for match in _SENTENCE.finditer(text)}
    return not firsts & (_IMPERATIVES | _OPENERS)


def answer_fault(text: str, *, is_cut: bool) -> str | None:
    """Return why an answer is not usable, or None. Only what follows a thought is looked at."""
    answer = split_thought(text).answer.strip()
    if is_cut:
        return "cut at the token limit"
    if not _WORD.search(answer):
        return "empty"
    if _BROKEN.search(answer):
        return "broken characters"
    if _MARKER.search(answer):
        return "chat markers"
    if is_repetitive(answer):
        return "repetition"
    return None


def is_repetitive(text: str) -> bool:
    """Return whether much of a text repeats earlier parts of it: sequences of words, or lines."""
    words = _words(text)
    num_ngrams = len(words) - _NGRAM_WORDS + 1
    if num_ngrams >= _MIN_NGRAMS:
        ngrams = {tuple(words[at : at + _NGRAM_WORDS]) for at in range(num_ngrams)}
        if 1 - len(ngrams) / num_ngrams > _MAX_REPEATED_SHARE:
            return True
    # Numbers of points are no words of a line.
    lines = [
        tuple(word for word in _words(line) if not word.isdigit()) for line in text.split("\n")
    ]
    lines = [line for line in lines if len(line) >= _LINE_WORDS]
    num_repeated = len(lines) - len(set(lines))
    return num_repeated >= _MIN_REPEATED_LINES and num_repeated > _MAX_REPEATED_SHARE * len(lines)


class SeenQuestions:
    """Finds duplicates and near-duplicates of earlier questions, in nearly linear time."""

    def __init__(self) -> None:
        self._texts: set[tuple[str, ...]] = set()
        self._shingles: list[frozenset[tuple[str, ...]]] = []
        self._latest: defaultdict[tuple[str, ...], deque[int]] = defaultdict(
            lambda: deque(maxlen=_MAX_COMPARED)
        )

    def fault(self, text: str) -> str | None:
        """Return "duplicate" or "near-duplicate"; None for a new question, which is kept.

        Case and punctuation do not count.
        """
        words = tuple(_words(text))
        if words in self._texts:
            return "duplicate"
        starts = range(max(1, len(words) - _SHINGLE_WORDS + 1))
        # In order, so that the result does not depend on the hashes of this process.
        ordered = dict.fromkeys(words[at : at + _SHINGLE_WORDS] for at in starts)
        shingles = frozenset(ordered)
        similar: defaultdict[int, float] = defaultdict(float)
        for shingle in ordered:
            earlier = self._latest.get(shingle, ())
            for number in earlier:
                # A rare shingle says more than one that many questions begin with.
                similar[number] += 1 / len(earlier)
        for number in nlargest(_NUM_SIMILAR, similar, key=similar.__getitem__):
            other = self._shingles[number]
            if len(shingles & other) >= NEAR_SHARE * len(shingles | other):
                return "near-duplicate"
        for shingle in shingles:
            self._latest[shingle].append(len(self._shingles))
        self._texts.add(words)
        self._shingles.append(shingles)
        return None


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]
