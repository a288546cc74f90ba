"""Where the metrics of a cluster come from: pages, found by address or by a file, or Prometheus."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx
from prometheus_client.parser import text_string_to_metric_families

from apar_core.errors import AparError
from cluster.monitor.series import SeriesKey, Snapshot, exported_names

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


TIMEOUT_S = 3.0
QUIET_S = 15.0
"""Longer than two readings of a page without a report between them: Ray's come every 10 s."""
_MOST_AT_ONCE = 16


class Source(Protocol):
    """Gives the series of a cluster as they are now.

    One that has not changed for `quiet_s` stands still: nothing is waiting to be told.
    """

    quiet_s: float

    def read(self) -> Snapshot:
        """Raises PageError when nothing of it answers."""


class PagesSource:
    """The metrics pages of one node or several.

    An address is that of a page (`HOST:PORT` will do), or of a service-discovery list, or the path
    of such a list as a file, as Ray writes it; lists are read anew each time, so that nodes come
    and go.
    """

    quiet_s = QUIET_S

    def __init__(self, addresses: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        self.addresses = tuple(addresses)
        self._client = httpx.Client(timeout=timeout_s, trust_env=False)

    def read(self) -> Snapshot:
        """Every page at once; those that fail are named in the snapshot."""
        answered: dict[str, dict[SeriesKey, float]] = {}
        failures: dict[str, str] = {}
        with ThreadPoolExecutor(_MOST_AT_ONCE) as executor:
            found = list(executor.map(self._read_address, self.addresses))
            listed = sorted({url for _, urls in found for url in urls})
            found += executor.map(lambda url: (self._read_page(url), []), listed)
        for (url, result), _ in found:
            if isinstance(result, PageError):
                failures[url] = str(result)
            elif result is not None:
                answered[url] = result
        if not answered:
            raise PageError("; ".join(f"{url} {reason}" for url, reason in failures.items()))
        values = {key: value for page in answered.values() for key, value in page.items()}
        return Snapshot(time.monotonic(), values, frozenset(answered), failures)

    def _read_address(self, address: str) -> tuple[_Answer, list[str]]:
        """What stands at an address: its page's series, or the pages that it lists."""
        if not address.startswith(("http://", "https://")) and _is_path(address):
            try:
                return (address, None), _listed(Path(address).read_text(encoding="utf-8"))
            except OSError as error:
                return (address, PageError(f"cannot be read: {error.strerror}")), []
            except UnicodeDecodeError:
                return (address, PageError("is no service-discovery list: it is no text")), []
            except PageError as error:
                return (address, error), []
        url = page_url(address)
        try:
            text = fetch(self._client, url)
            if text.lstrip().startswith("["):
                return (url, None), _listed(text)
            return (url, parse_page(url, text)), []
        except PageError as error:
            return (url, error), []

    def _read_page(self, url: str) -> _Answer:
        try:
            return url, parse_page(url, fetch(self._client, url))
        except PageError as error:
            return url, error


_Answer = tuple[str, "dict[SeriesKey, float] | PageError | None"]


class PrometheusSource:
    """The same series as a Prometheus server last scraped them, every 30 s at least."""

    quiet_s = 35.0

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._client = httpx.Client(timeout=timeout_s, trust_env=False)

    def read(self) -> Snapshot:
        """One instant query."""
        names = "|".join(sorted(exported_names()))
        try:
            answer = self._client.post(
                f"{self.url}/api/v1/query", data={"query": f'{{__name__=~"{names}"}}'}
            )
            content = answer.json()
            if content["status"] != "success":
                raise PageError(f"{self.url} refused the query: {content.get('error')}")
            values = dict(_sample(each) for each in content["data"]["result"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PageError(f"{self.url} gave no answer ({error})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise PageError(f"{self.url} does not answer as Prometheus does") from error
        return Snapshot(time.monotonic(), values, frozenset(key.page for key in values), {})


def _sample(result: dict[str, Any]) -> tuple[SeriesKey, float]:
    labels = dict(result["metric"])
    name = labels.pop("__name__")
    page = labels.get("instance", "")
    return SeriesKey(page, name, tuple(sorted(labels.items()))), float(result["value"][1])


def page_url(address: str) -> str:
    """The page that an address means: `HOST:PORT` and a bare server mean its `/metrics`."""
    url = address if "://" in address else f"http://{address}"
    return url if "/" in url.partition("://")[2] else f"{url}/metrics"


def _is_path(address: str) -> bool:
    return address.endswith(".json") or Path(address).is_file()


def _listed(text: str) -> list[str]:
    """The pages of a service-discovery list; raises PageError for anything else."""
    try:
        groups = json.loads(text)
        pages = [page_url(target) for group in groups for target in group["targets"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PageError("is no service-discovery list") from error
    if not isinstance(groups, list):
        raise PageError("is no service-discovery list")
    if not pages:
        raise PageError("lists no page")
    return pages
