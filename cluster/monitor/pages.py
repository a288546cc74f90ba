"""What a metrics page says: its text, parsed, without what is not ours."""

from __future__ import annotations

import re

import httpx
from prometheus_client.parser import text_string_to_metric_families

from apar_core.errors import AparError
from cluster.monitor.series import SeriesKey, exported_names

_NAMES = exported_names()
_COMMENTED = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*(?:\{.*\})? \S+")
# A histogram's and, without it, a counter's samples have a suffix that their type line has not.
_STEMS = _NAMES | {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in _NAMES}


class PageError(AparError):
    """A page that gives no metrics; the message says why, and not of which page."""


def fetch(client: httpx.Client, url: str) -> str:
    """The text at an address. Raises PageError where nothing answers, or with an error."""
    try:
        answer = client.get(url)
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        reason = error.response.reason_phrase
        raise PageError(f"answered {error.response.status_code} {reason}") from error
    except httpx.TimeoutException as error:
        raise PageError("no answer in time") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PageError(f"no answer ({error})") from error
    return answer.text


def parse_page(url: str, text: str) -> dict[SeriesKey, float]:
    """Our series on a page, none if it has only others.

    Raises PageError for what is no metrics page.
    """
    lines = text.splitlines()
    content = [line for line in lines if line and not line.startswith("#")]
    if not all(_SAMPLE.match(line) for line in content[:20]):
        raise PageError(f"is no metrics page: it says {content[0][:40]!r} ...")
    # Ray and vLLM write thousands of lines beside ours, and parsing is slow.
    ours = "\n".join(line for line in lines if _is_ours(line))
    try:
        families = list(text_string_to_metric_families(f"{ours}\n"))
    except ValueError as error:
        raise PageError(f"is no metrics page: {error}") from error
    return {
        SeriesKey(url, sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def _is_ours(line: str) -> bool:
    commented = _COMMENTED.match(line)
    if commented is not None:
        return commented[1] in _STEMS
    return re.split(r"[{ ]", line, maxsplit=1)[0] in _NAMES
