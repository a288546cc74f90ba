"""Fixtures of the gateway's tests."""

from collections.abc import Callable

import pytest

Advance = Callable[[float], None]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the store of usage longer than a request would: the machine may be busy."""
    for module in ("key_store", "ledger"):
        monkeypatch.setattr(f"deployments.gateway.{module}.ANSWER_S", 60.0)
    monkeypatch.setattr("deployments.gateway.key_store._REPORT_S", 60.0)


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Advance:
    """Stop the clock of the rate windows at a full minute; call to move it on by seconds."""
    now_s = [6e8]
    monkeypatch.setattr("limits.aio.storage.memory.time.time", lambda: now_s[0])

    def move(seconds: float) -> None:
        now_s[0] += seconds

    return move
