"""Filters of generated questions and answers; each rejection has a reason for the report.

They look at form, never at content: what a model asks and refuses is its own. All take time linear
in the text. Tuned on SmolLM2-135M, whose samples are a quarter fragments.
"""

from __future__ import annotations

import re
from collections import defaultdict
from zlib import crc32

from apar_core.offline.data.structure import split_thought

MIN_WORDS = 3
MAX_QUESTION_CHARACTERS = 2000
NEAR_SHARE = 0.7
"""Jaccard similarity of two questions' shingles from which one is a near-duplicate."""

_SHINGLE_WORDS = 3
# Of the latest questions with a shingle in common, so many are compared.
_MAX_COMPARED = 50

_NGRAM_WORDS = 4
_MIN_NGRAMS = 20
_MAX_REPEATED_SHARE = 0.3
_MIN_REPEATED_LINES = 3

# Chinese and Japanese have no blanks between words.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
_BROKEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ue000-\uf8ff\ufffd]")
_MARKER = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|\[/?INST\]|<</?SYS>>|</?s>|"  # noqa: RUF001
    r"</?(?:start|end)_of_turn>|</?think>|"
    r"^\W{0,4}(?:user|human|assistant|system|ai|bot)\W{0,2}:",
    re.IGNORECASE | re.MULTILINE,
)
