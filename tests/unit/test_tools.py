"""Tests whose programs are missing."""

import pytest

from tests.fakes.tools import needs


@pytest.mark.ci
@pytest.mark.parametrize(("ci", "skips"), [(None, True), ("", True), ("true", False)])
def test_a_missing_program_skips_its_tests_except_in_continuous_integration(
    monkeypatch: pytest.MonkeyPatch, ci: str | None, skips: bool
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    if ci is None:
        monkeypatch.delenv("CI", raising=False)
    else:
        monkeypatch.setenv("CI", ci)

    assert needs("redis-server").args == (skips,)
