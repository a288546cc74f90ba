"""Results that the paper reports: APAR (arXiv 2401.06761), tables 1 to 4 and 7 to 16, section 2.1.

A-7B and A-13B are its APAR models, O-7B and O-13B the original models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MEAN = "Mean"
MEAN_ACCELERATED = "Mean(>1%)"

LISTED_ANSWERS, LISTED_CHATS = 0.32, 0.58
"""Shares of ShareGPT's answers, and of its chats, with an ordered or unordered list."""

PaperRows = Mapping[str, tuple[float, ...]]
"""Values of each category, under the paper's names."""

PaperTables = Mapping[tuple[str, str], PaperRows]
"""Rows of each benchmark and model."""

_VICUNA = (
    *("Coding", "CS", "CF", "Fermi", "Generic", "Knowledge", "Math", "Roleplay", "Writing"),
    *(MEAN, MEAN_ACCELERATED),
)
_MT = (
    *("Coding", "Extraction", "Humanities", "Math", "Reasoning", "Roleplay", "STEM", "Writing"),
    *(MEAN, MEAN_ACCELERATED),
)


def _rows(names: tuple[str, ...], *columns: str) -> PaperRows:
    """Return the rows of a table; each column is a string of numbers in the order of the names."""
    numbers = [[float(value) for value in column.split()] for column in columns]
    return dict(zip(names, zip(*numbers, strict=True), strict=True))


THREADS: PaperTables = {
    ("vicuna-bench", "A-7B"): _rows(
        _VICUNA[:-1],
        "1.0 6.0 4.1 5.3 7.7 6.8 1.0 4.5 5.4 5.1",
        "0.0 1.0 0.9 0.9 1.0 1.0 0.0 0.8 0.9 0.81",
    ),
    ("vicuna-bench", "A-13B"): _rows(
        _VICUNA[:-1],
        "1.0 6.5 5.4 5.5 7.7 5.6 1.0 5.1 4.6 5.2",
        "0.0 1.0 1.0 0.9 1.0 1.0 0.0 1.0 0.7 0.82",
    ),
    ("mt-bench", "A-7B"): _rows(
        _MT[:-1],
        "1.0 1.0 5.0 1.1 2.0 4.1 3.4 3.7 2.7",
        "0.0 0.0 0.7 0.1 0.3 0.8 0.6 0.6 0.37",
    ),
    ("mt-bench", "A-13B"): _rows(
        _MT[:-1],
        "1.0 1.3 6.1 1.0 2.5 4.0 3.6 3.4 2.9",
        "0.0 0.1 0.8 0.0 0.6 0.7 0.6 0.6 0.41",
    ),
}
"""Tables 7 and 8: threads per answer, and share of answers with at least two."""

CACHED_TOKENS: PaperTables = {
    ("vicuna-bench", "A-7B"): _rows(
        _VICUNA,
        "378.0 296.6 245.6 365.3 251.5 345.0 210.7 292.5 325.6 306.2 303.2",
        "378.0 417.7 312.4 496.8 388.8 489.9 210.7 364.1 450.4 406.0 417.2",
    ),
    ("vicuna-bench", "A-13B"): _rows(
        _VICUNA,
        "370.0 287.6 276.9 401.0 260.7 313.2 203.3 254.3 353.5 308.4 306.7",
        "370.0 416.9 383.0 529.7 389.2 419.7 203.3 346.5 449.8 406.9 419.3",
    ),
    ("mt-bench", "A-7B"): _rows(
        _MT,
        "744.8 567.2 647.0 408.5 314.9 461.2 574.2 513.0 529.6 502.1",
        "744.8 567.2 757.3 410.4 335.4 533.6 641.7 587.6 573.3 571.1",
    ),
    ("mt-bench", "A-13B"): _rows(
        _MT,
        "589.6 640.3 676.1 451.9 318.2 484.6 591.1 496.4 530.3 513.3",
        "589.6 641.7 822.5 451.9 344.8 548.5 677.5 559.6 579.1 590.6",
    ),
}
"""Tables 9 to 12 (last rows: table 1): maximum cached tokens, APAR and flattened."""

ATTENDED_TOKENS: PaperTables = {
    ("vicuna-bench", "A-7B"): _rows(
        _VICUNA,
        "221.6 152.0 142.0 214.6 126.3 154.7 139.7 166.8 189.1 170.3 166.2",
        "221.6 244.6 185.3 309.6 222.2 290.3 139.7 229.0 270.0 251.7 256.4",
    ),
    ("vicuna-bench", "A-13B"): _rows(
        _VICUNA,
        "222.0 151.3 144.6 204.9 125.3 158.6 137.3 150.3 209.0 170.5 166.6",
        "222.0 248.7 224.2 325.7 221.8 248.8 137.3 217.1 271.8 251.4 255.9",
    ),
    ("mt-bench", "A-7B"): _rows(
        _MT,
        "577.4 570.8 456.5 616.0 286.7 404.3 413.0 437.9 477.0 417.5",
        "577.4 570.8 556.0 616.9 322.0 477.7 473.8 533.1 528.3 496.5",
    ),
    ("mt-bench", "A-13B"): _rows(
        _MT,
        "449.9 767.8 507.0 601.3 314.3 404.8 445.3 360.8 482.3 428.0",
        "449.9 769.2 636.0 601.3 350.1 464.9 521.1 442.7 539.6 514.2",
    ),
}
"""Tables 13 to 16 (last rows: table 2): attended tokens, APAR and flattened."""

SCORES: Mapping[str, PaperRows] = {
    "mt-bench": _rows(
        _MT[:-1],
        "2.60 4.90 9.45 2.70 4.85 6.35 7.92 7.90 5.83",
        "2.60 5.75 9.40 2.00 5.40 7.25 7.15 7.15 5.92",
        "3.70 5.35 9.45 2.60 5.95 7.67 7.67 8.40 6.35",
        "3.70 4.85 9.55 2.65 5.85 7.58 7.80 7.88 6.24",
    ),
    "vicuna-bench": _rows(
        _VICUNA[:-1],
        "3.86 9.40 8.05 6.80 9.45 9.40 1.67 8.80 9.50 8.08",
        "3.29 9.50 8.00 6.90 9.50 9.30 2.00 8.80 9.00 7.99",
        "6.14 9.50 8.65 7.35 9.30 9.60 1.67 8.90 9.50 8.45",
        "3.71 9.60 9.00 6.60 9.50 9.35 4.67 8.75 9.00 8.29",
    ),
}
"""Tables 3 and 4: scores by GPT-4 for O-7B, A-7B, O-13B and A-13B."""

SCORED_MODELS = ("O-7B", "A-7B", "O-13B", "A-13B")

_LABELS = {"common-sense": "CS", "counterfactual": "CF", "stem": "STEM"}


def category_label(category: str) -> str:
    """Return the paper's name of a category; other names are capitalised."""
    return _LABELS.get(category, category[:1].upper() + category[1:])


def paper_model(label: str) -> str | None:
    """Return the paper's APAR model of the size that a model or file name contains, or None."""
    size = re.search(r"(?<![\d.])(7|13)b(?![a-z])", label.lower())
    return f"A-{size.group(1)}B" if size else None
