"""Sources of a cluster's metrics: metrics pages, found directly or by discovery, or Prometheus."""

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
# The TYPE line of a histogram or counter may lack the suffix of its samples.
_STEMS = _NAMES | {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in _NAMES}


class PageError(AparError):
    """A page has no metrics; the message gives the reason, not the page."""


def fetch(client: httpx.Client, url: str) -> str:
    """Return the text at a URL. Raises PageError if there is no answer or an error status."""
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
    """Return our series on a page, which may be none.

    Raises PageError if the text is not a metrics page.
    """
    lines = text.splitlines()
    content = [line for line in lines if line and not line.startswith("#")]
    if not all(_SAMPLE.match(line) for line in content[:20]):
        raise PageError(f"is not a metrics page: it starts with {content[0][:40]!r}")
    # Parsing is slow, and vLLM adds a thousand lines.
    ours = "\n".join(line for line in lines if _is_ours(line))
    try:
        families = list(text_string_to_metric_families(f"{ours}\n"))
    except ValueError as error:
        raise PageError(f"is not a metrics page: {error}") from error
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
QUIET_S = 5.0
"""Longer than the interval between two counts of a busy engine, 1 s or a long step."""
_MAX_PARALLEL_READS = 16


class Source(Protocol):
    """Returns the current series of a cluster.

    A counter that has not changed for `quiet_s` is idle, not just waiting for its next report.
    """

    quiet_s: float

    def read(self) -> Snapshot:
        """Return a snapshot. Raises PageError if nothing answers."""


class PagesSource:
    """Metrics pages of one or more nodes.

    An address is the URL of a page (`HOST:PORT` is enough), or the URL or path of a
    service-discovery list as Ray writes it. Lists are read again each time, so nodes may come and
    go.
    """

    quiet_s = QUIET_S

    def __init__(self, addresses: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        self.addresses = tuple(addresses)
        self._client = httpx.Client(timeout=timeout_s, trust_env=False)

    def read(self) -> Snapshot:
        """Read all pages in parallel; the snapshot names pages that fail."""
        answered: dict[str, dict[SeriesKey, float]] = {}
        failures: dict[str, str] = {}
        with ThreadPoolExecutor(_MAX_PARALLEL_READS) as executor:
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

    def _read_address(self, address: str) -> tuple[_Response, list[str]]:
        """Return the series of a page, or the pages of a discovery list."""
        if not address.startswith(("http://", "https://")) and _is_path(address):
            try:
                return (address, None), _listed(Path(address).read_text(encoding="utf-8"))
            except OSError as error:
                return (address, PageError(f"cannot be read: {error.strerror}")), []
            except UnicodeDecodeError:
                return (address, PageError("is not a service-discovery list: not a text file")), []
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

    def _read_page(self, url: str) -> _Response:
        try:
            return url, parse_page(url, fetch(self._client, url))
        except PageError as error:
            return url, error


_Response = tuple[str, "dict[SeriesKey, float] | PageError | None"]


class PrometheusSource:
    """The series as last scraped by a Prometheus server, at least every 30 s."""

    quiet_s = 35.0

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._client = httpx.Client(timeout=timeout_s, trust_env=False)

    def read(self) -> Snapshot:
        """Send one instant query."""
        names = "|".join(sorted(exported_names()))
        try:
            answer = self._client.post(
                f"{self.url}/api/v1/query", data={"query": f'{{__name__=~"{names}"}}'}
            )
            content = answer.json()
            if content["status"] != "success":
                raise PageError(f"{self.url} rejected the query: {content.get('error')}")
            values = dict(_sample(each) for each in content["data"]["result"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PageError(f"{self.url} did not answer ({error})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise PageError(f"{self.url} is not a Prometheus server") from error
        return Snapshot(time.monotonic(), values, frozenset(key.page for key in values), {})


def _sample(result: dict[str, Any]) -> tuple[SeriesKey, float]:
    labels = dict(result["metric"])
    name = labels.pop("__name__")
    page = labels.get("instance", "")
    return SeriesKey(page, name, tuple(sorted(labels.items()))), float(result["value"][1])


def page_url(address: str) -> str:
    """Complete an address to a URL: `HOST:PORT` and a bare server get `/metrics`."""
    url = address if "://" in address else f"http://{address}"
    return url if "/" in url.partition("://")[2] else f"{url}/metrics"


def _is_path(address: str) -> bool:
    return address.endswith(".json") or Path(address).is_file()


def _listed(text: str) -> list[str]:
    """Return the pages of a service-discovery list; raises PageError for anything else."""
    try:
        groups = json.loads(text)
        pages = [page_url(target) for group in groups for target in group["targets"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PageError("is not a service-discovery list") from error
    if not isinstance(groups, list):
        raise PageError("is not a service-discovery list")
    if not pages:
        raise PageError("contains no targets")
    return pages
