"""A rule of Prometheus, in its own terms."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How soon a human has to look."""

    PAGE = "page"
    """Now, at night too: users are served badly or not at all."""
    TICKET = "ticket"
    """Within working hours."""


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """A query whose result is kept under a name, `labels left:metric:operations`."""

    record: str
    expression: str

    def as_dict(self) -> dict[str, Any]:
        """As it stands in a rule file."""
        return {"record": self.record, "expr": self.expression}


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A query whose results are alerts once they have lasted `hold_s` seconds.

    `summary` and `description` are templates of Prometheus'; a description gives the value.
    `objective` groups alerts over one service level objective.
    """

    name: str
    severity: Severity
    expression: str
    hold_s: float
    summary: str
    description: str
    objective: str | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def as_dict(self, runbook: str, hold_scale: float) -> dict[str, Any]:
        """As it stands in a rule file; `runbook` is the page that has a section for each alert."""
        objective = {} if self.objective is None else {"objective": self.objective}
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": duration(self.hold_s * hold_scale),
            "labels": {"severity": str(self.severity)} | objective | self.labels,
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"{runbook}#{self.name.lower()}",
            },
        }


def duration(seconds: float) -> str:
    """Prometheus' spelling, in milliseconds where whole seconds do not do."""
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    whole = int(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole and whole % length == 0:
            return f"{whole // length}{unit}"
    return f"{whole}s"
