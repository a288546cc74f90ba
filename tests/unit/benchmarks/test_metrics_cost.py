"""What is measured beside a reader of metrics is measured with one."""

import time

import httpx
import pytest

from benchmarks.metrics_cost import read_every
from tests.fakes.metrics_page import busy_page, served


def test_a_reading_that_fails_is_an_error_of_the_measurement() -> None:
    with served(busy_page().text()) as server:
        with read_every(server.url, 0.01):
            time.sleep(0.1)
        server.status = 500
        with pytest.raises(httpx.HTTPStatusError), read_every(server.url, 0.01):
            time.sleep(0.1)


def test_what_has_no_metrics_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(httpx, "get", lambda page, **_: read.append(page))

    with read_every(None, 0.01):
        time.sleep(0.05)

    assert read == []
