"""Alertmanager's configuration: who is told of which alert, and what is kept back."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from dashboards.prometheus.rule import Severity


class NotifySettings(BaseModel):
    """Receivers of alerts, as webhooks; Alertmanager knows many others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_url: str = Field(
        "http://127.0.0.1:9099/page", description="Gets the alerts that cannot wait."
    )
    ticket_url: str = Field("http://127.0.0.1:9099/ticket", description="Gets all other alerts.")
    group_wait_s: PositiveInt = Field(
        30, description="Seconds to wait for further alerts of a model before the first is sent."
    )
    group_interval_s: PositiveInt = Field(
        300, description="Seconds between notifications of one group of alerts."
    )


def alertmanager_config(settings: NotifySettings) -> dict[str, Any]:
    """`alertmanager.yml`."""
    return {
        "route": {
            "receiver": "ticket",
            "group_by": ["alertname", "model"],
            "group_wait": f"{settings.group_wait_s}s",
            "group_interval": f"{settings.group_interval_s}s",
            "repeat_interval": "12h",
            "routes": [
                {
                    "matchers": [f'severity="{Severity.PAGE}"'],
                    "receiver": "page",
                    "repeat_interval": "1h",
                }
            ],
        },
        "inhibit_rules": _inhibitions(),
        "receivers": [
            {"name": name, "webhook_configs": [{"url": url, "send_resolved": True}]}
            for name, url in (("page", settings.page_url), ("ticket", settings.ticket_url))
        ],
    }


def _inhibitions() -> list[dict[str, Any]]:
    """What is kept back, because an alert that fires already says it."""
    return [
        {
            "source_matchers": ['alertname="AparNoReplica"'],
            "target_matchers": [
                'alertname=~"AparReplicaMissing|AparNothingGenerated|AparQueue.*|Apar.*BudgetBurn.*"'
            ],
            "equal": ["model"],
        },
        {
            "source_matchers": [f'severity="{Severity.PAGE}"', 'objective=~".+"'],
            "target_matchers": [f'severity="{Severity.TICKET}"', 'objective=~".+"'],
            "equal": ["model", "objective"],
        },
    ]
