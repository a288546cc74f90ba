"""Patterns that could stop the scheduler are refused when they are configured."""

import pytest
from pydantic import ValidationError

from apar_core.formats.parallel_format import Outlines
from apar_core.formats.pattern_check import check_pattern
from apar_core.formats.shipped_formats import SHIPPED


def test_the_patterns_of_the_shipped_formats_are_accepted() -> None:
    outlines = [each.outlines for each in SHIPPED.values() if each.outlines is not None]
    patterns = [each.pattern for each in outlines if each.pattern is not None]

    for pattern in patterns:
        check_pattern(pattern)
    assert patterns


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?P<number>\d+)[.:] (?P<topic>[^\n]*)",
        r"(?P<number>\d+): (?P<topic>.+?)</Outline>",
        r"<p>(?P<number>\w+)(?:-\w+)*</p>",
        r"(?i:item) (?P<number>[0-9]{1,3}|[a-z]), (?P<topic>[^,]*),",
        r"^(?P<number>(?:[0-9]+\.){1,4}) (?P<topic>\S[^\n]*)$",
        r"(?P<number>[0-9]+)(?=: )",
        r"(?P<number>\d+)\.\s*(?P<topic>[^\n]*)",
        r"<O>\s*(?P<number>\d+)\s*:\s*(?P<topic>[^<]+)</O>",
        r"<O>(?P<number>\d+) (?P<topic>(?:(?!</O>).)*)</O>",
    ],
)
def test_ordinary_patterns_are_accepted(pattern: str) -> None:
    Outlines(pattern=pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?P<number>(a+)+)b", "exponential time"),
        (r"(?P<number>(a*)*)b", "exponential time"),
        (r"(?P<number>(?:\w|[0-9]b)+):", "exponential time"),
        (r"(?P<number>(?:\s*\d+\s*)*):", "exponential time"),
        (r"(?P<number>(?:[A-Z]|(?i:[a-z]))+):", "exponential time"),
        (r"(?P<number>(\d+){1,1000}):", "exponential time"),
        (r"(?P<number>(?:[a-z]{0,3}){0,3}):", "exponential time"),
        (r"(?P<number>(?:(?:a?){8}){8}):", "exponential time"),
        (r"(?P<number>(?:a|a)*):", "exponential time"),
        (r"(?=(a+)+b)(?P<number>a)", "exponential time"),
        (r"(?P<number>\s*.*?\s*):", "two repetitions can read"),
        (r"(?P<number>\w*\w*\w*):", "two repetitions can read"),
        (r"(?P<number>[^\n]*),[^;\n]*;", "two repetitions can read"),
        (r"(?P<number>\d+)\.\s*(?P<topic>.*?)\n", "two repetitions can read"),
        (r"(?P<number>\d+)[^\n:]*:", "two repetitions can read"),
        (r"(?P<number>(?:a(?=.*b))*c)", "two repetitions can read"),
        (r"(?P<number>" + "a?" * 30 + "b)", "exponential time"),
        (r"(?P<number>.+)(?P=number)", "back-references are not supported"),
        (r"(?P<number>" + "(?:a{8}b){8}" * 9 + ")", "longer than 500"),
    ],
)
def test_patterns_that_could_take_very_long_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Outlines(pattern=pattern)
