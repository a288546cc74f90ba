"""Service level objectives and alerts on the burn rate of their error budgets.

An objective of 99.9 % leaves a monthly budget of 0.1 % bad requests. An alert fires when a long
window has used up a large part of it and a short window shows that the problem persists. Source:
Google, The Site Reliability Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate Alerts".
"""

from dataclasses import dataclass

from dashboards.prometheus.rule import (
    AlertRule,
    RecordingRule,
    Severity,
    by,
    growth,
    share_above,
    share_of,
)
from dashboards.prometheus.settings import RuleSettings
from deployments.metrics import catalogue

WINDOWS = ("5m", "30m", "1h", "6h", "3d")


@dataclass(frozen=True, slots=True)
class Objective:
    """Definition of bad requests, and the share of requests that may be bad."""

    key: str
    alert: str
    bad: str
    goal: str
    budget: float

    def record(self, window: str) -> str:
        """Name of the record of the share of bad requests in a window."""
        return f"model:apar_{self.key}:ratio_rate{window}"


def objectives(settings: RuleSettings) -> tuple[Objective, ...]:
    """Return the three objectives."""
    share = f"{settings.latency_share:.4g}"
    return (
        Objective(
            "server_errors",
            "AparErrorBudgetBurn",
            "end with a server error",
            f"{settings.availability:.6g} of requests without a server error",
            1 - settings.availability,
        ),
        Objective(
            "slow_first_tokens",
            "AparFirstTokenBudgetBurn",
            f"wait longer than {settings.first_token_s:g} s for their first token",
            f"{share} of requests within {settings.first_token_s:g} s",
            1 - settings.latency_share,
        ),
        Objective(
            "slow_output_tokens",
            "AparOutputTokenBudgetBurn",
            f"take longer than {settings.output_token_s:g} s per token of their critical path",
            f"{share} of requests within {settings.output_token_s:g} s",
            1 - settings.latency_share,
        ),
    )


def recording_rules(settings: RuleSettings) -> list[RecordingRule]:
    """Share of bad requests of every objective, for every window."""
    errors, first, output = objectives(settings)
    rules = []
    for window in WINDOWS:
        slow_first = share_above(
            catalogue.TIME_TO_FIRST_TOKEN, settings.first_token_s, window, ("model",)
        )
        slow_output = share_above(
            catalogue.TIME_PER_CRITICAL_PATH_TOKEN, settings.output_token_s, window, ("model",)
        )
        rules += [
            RecordingRule(
                _requests(window), growth(catalogue.REQUESTS, window, ("model", "outcome"))
            ),
            RecordingRule(
                errors.record(window),
                # Client errors do not count against the service.
                share_of(_requests(window), "server_error", "ok|server_error|cancelled"),
            ),
            RecordingRule(first.record(window), slow_first),
            RecordingRule(output.record(window), slow_output),
        ]
    return rules


def alert_rules(settings: RuleSettings) -> list[AlertRule]:
    """Return a page and a ticket per objective."""
    return [rule for objective in objectives(settings) for rule in _burns(objective, settings)]


def _requests(window: str) -> str:
    return f"model_outcome:apar_requests:increase{window}"


def _burns(objective: Objective, settings: RuleSettings) -> list[AlertRule]:
    fast = f"({_burn(objective, 14.4, '1h', '5m')})\nor ({_burn(objective, 6, '6h', '30m')})"
    slow = _burn(objective, 1, "3d", "6h")
    enough = f"sum {by('model')} ({_requests('1h')}) >= {settings.least_requests}"
    said = f"Requests of {{{{ $labels.model }}}} {objective.bad}"
    value = "{{ $value | humanizePercentage }} of requests in the last"
    return [
        AlertRule(
            f"{objective.alert}Fast",
            Severity.PAGE,
            f"({fast})\nand ({enough})",
            120,
            said,
            f"{value} hours {objective.bad}. The objective is {objective.goal}; at this rate the "
            "monthly error budget is used up within days.",
            objective.key,
        ),
        AlertRule(
            f"{objective.alert}Slow",
            Severity.TICKET,
            f"({slow})\nand ({enough})",
            3600,
            said,
            f"{value} 3 days {objective.bad}. The objective is {objective.goal}; at this rate the "
            "monthly error budget is used up before the month ends.",
            objective.key,
        ),
    ]


def _burn(objective: Objective, factor: float, long: str, short: str) -> str:
    bound = f"{factor * objective.budget:.6g}"
    return f"{objective.record(long)} > {bound} and {objective.record(short)} > {bound}"
