"""Sub searches of APR, as the scheduler reads them in what a model has generated."""

from __future__ import annotations

import pytest

from apar_core.formats.sub_searches import CALL, sub_searches


# In quadratic time, each of these would take an hour.
@pytest.mark.parametrize("unit", ["<Start Sub Search ", "Generated Node #1:1:["])
def test_repeated_beginnings_take_linear_time(unit: str) -> None:
    assert list(sub_searches(CALL + unit * 200_000, "")) == []
