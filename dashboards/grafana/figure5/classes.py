"""A quantity over another one than time.

Prometheus knows time only, so the samples of the range are put into classes of the other quantity,
as the paper's measurements were. A line of the paper's figure is a model here: serve an original
model beside the forking one to compare them.
"""

from dashboards.grafana.panels import Unit
from dashboards.grafana.promql import WHOLE_RANGE
from dashboards.grafana.tables import Column

# One sample an interval of the plots, however long the range.
SAMPLES = f"{WHOLE_RANGE}:$__interval"


def while_in(value: str, quantity: str, low: float, high: float | None) -> str:
    """Mean of the value, over the times when the quantity was in the class [low, high)."""
    upper = "" if high is None else f" < {high}"
    return mean(f"{value} and ({quantity} >= {low}{upper})")


def classed(value: str, label: str, quantity: str) -> str:
    """The value with a label that says in which class the quantity, one a model, is at the time."""
    return f'count_values by (model) ("{label}", {quantity}) * on (model) group_left () ({value})'


def mean(samples: str) -> str:
    return f"avg_over_time(({samples})[{SAMPLES}])"


def spread(samples: str, unit: Unit, decimals: int | None = None) -> list[Column]:
    """The paper's dots and error bars."""
    return [
        Column("Mean", mean(samples), unit, decimals=decimals),
        Column("25 %", _quantile(0.25, samples), unit, decimals=decimals),
        Column("75 %", _quantile(0.75, samples), unit, decimals=decimals),
    ]


def _quantile(share: float, samples: str) -> str:
    return f"quantile_over_time({share}, ({samples})[{SAMPLES}])"
