"""Answers in which a line break or a full stop may mean something else than in prose."""

from __future__ import annotations

import re

# The order is that of the report: the first that is found names the reason.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "code block",
        re.compile(
            r"```|~~~|^(?:    |\t)*(?:def \w+\(|class \w+[:({]|import \w+$|#include\b|#!/|"
            r"(?:public|private|static) \w+ \w+|return [^.\n]*;$|\w[^\n]*[;{]$)",
            re.MULTILINE,
        ),
    ),
    ("url", re.compile(r"https?://|\bwww\.\w|\bftp://|\[[^\]\n]+\]\([^)\s]+\)", re.IGNORECASE)),
    (
        "table",
        re.compile(r"^[ \t]*\|[^\n]*\|[ \t\r]*$|^[ \t]*[^|\n]+\|[ \t]*:?-{2,}", re.MULTILINE),
    ),
    (
        "html",
        re.compile(
            r"<!--|<!DOCTYPE|</[a-z][\w-]*[ ]*>|<[a-z][\w-]*(?:[ ]+[\w-]+=[^<>\n]{0,200})?[ ]*/?>",
            re.IGNORECASE,
        ),
    ),
    (
        "mathematics",
        re.compile(
            r"\\\(|\\\[(?![A-Z][a-z])|\\(?:frac|sqrt|sum|int|times|cdot|begin|text|left|right|alpha|beta|pi)\b|\$\$|"
            # $x$ in one line, but not "$5 and $6".
            r"\$(?![\d\s])[^$\n]{1,80}(?<!\s)\$|"
            r"[√∑∫∏≤≥≠≈∞∂∇×÷²³]|"  # noqa: RUF001
            r"[\w)][ \t]*\^[ \t]*[\w({-]|"
            r"[\w)\]%][ \t]*=[ \t]*[-+(\[{$]{0,3}[\w]|"
            r"\d[ \t]*[+*][ \t]*[\d(]|\d[ \t]+/[ \t]+[\d(]"
        ),
    ),
)


def ambiguity(answer: str) -> str | None:
    """Return what makes the answer ambiguous ("code block", "url", ...), or None."""
    for name, pattern in _PATTERNS:
        if pattern.search(answer):
            return name
    return None
