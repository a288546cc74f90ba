"""A run as a folder: `run.json`, what was asked for and what came of each repeat, and
`requests.jsonl`, a line for every request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic import ValidationError as Invalid

from apar_core.errors import EvaluationError, validation_summary
from apar_core.json_lines import read_lines
from apar_core.workload.trace import TraceLine, TraceWriter
from cluster.loadtest.client import Answered
from cluster.loadtest.client_watch import ClientFigures
from cluster.loadtest.cluster_watch import SETTLE_S, ClusterFigures
from cluster.loadtest.jobs import WorkloadSettings
from cluster.loadtest.records import RequestRecord
from cluster.loadtest.samples import SAMPLE_S
from cluster.loadtest.target import Target

RUN_FILE, REQUESTS_FILE = "run.json", "requests.jsonl"


class LoadSettings(BaseModel):
    """All that a load test is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Target
    model: str
    workload: WorkloadSettings
    arrivals: str
    repeats: PositiveInt = 1
    seed: int = 0
    longest_s: PositiveFloat | None = None
    timeout_s: PositiveFloat = 600.0
    warm_up: NonNegativeInt = 1
    sample_s: PositiveFloat = SAMPLE_S
    settle_s: NonNegativeFloat = SETTLE_S
    slo: dict[str, float] = {}


class RepeatFacts(BaseModel):
    """What became of a repeat, beside its requests; `planned` counts those it would have sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repeat: int
    planned: int
    duration_s: float
    interrupted: bool
    client: ClientFigures
    cluster: ClusterFigures | None = None


class RunFacts(BaseModel):
    """The content of `run.json`.

    `left_out` recorded answers were longer than the context; `repeated` requests of each repeat
    had been sent in it before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: LoadSettings
    started: str
    repeats: list[RepeatFacts] = []
    left_out: NonNegativeInt = 0
    repeated: NonNegativeInt = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended: its facts and its requests."""

    name: str
    facts: RunFacts
    records: list[RequestRecord]

    def of_repeat(self, repeat: int) -> list[RequestRecord]:
        """Return the requests of one repeat."""
        return [record for record in self.records if record.repeat == repeat]

    @property
    def whole(self) -> list[RequestRecord]:
        """The requests that ended well."""
        return [record for record in self.records if record.error is None]


class AnswerFile:
    """A trace of the answers, one line each, as `--replay FILE` reads it."""

    def __init__(self, path: Path) -> None:
        self._trace = TraceWriter(path)
        self._known: set[str] = set()

    def add(self, answered: Answered, model: str) -> None:
        """Write a whole answer, the first one to its question."""
        record = answered.record
        if record.error is not None or record.id in self._known or not answered.text:
            return
        self._known.add(record.id)
        *history, question = answered.messages
        line = TraceLine(
            id=record.id,
            category=record.category,
            source=f"apar loadtest, {model}",
            history=tuple(history),
            prompt=question.content,
            response=answered.text,
        )
        self._trace.add(line)

    def close(self) -> None:
        """Close the file."""
        self._trace.close()


class RunFolder:
    """Writes a run while it goes on. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        self.path.mkdir(parents=True, exist_ok=True)
        requests = self.path / REQUESTS_FILE
        if requests.exists() and requests.stat().st_size > 0:
            raise EvaluationError(f"--out {self.path} holds a run already; give another folder")
        self._file = requests.open("w", encoding="utf-8")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, record: RequestRecord) -> None:
        """Write a request's line, so that it outlasts this process."""
        assert self._file is not None
        self._file.write(record.model_dump_json(exclude_none=True) + "\n")
        self._file.flush()

    def write_facts(self, facts: RunFacts) -> None:
        """Write what is known of the run so far."""
        (self.path / RUN_FILE).write_text(facts.model_dump_json(indent=1), encoding="utf-8")


def read_run(path: Path) -> Run:
    """Return the run in a folder, by the name of the folder.

    Raises EvaluationError for a folder that holds no run.
    """
    try:
        facts = RunFacts.model_validate_json((path / RUN_FILE).read_bytes())
    except OSError as error:
        raise EvaluationError(f"{path} holds no run of apar loadtest: {error}") from error
    except Invalid as error:
        raise EvaluationError(f"{path / RUN_FILE}: {validation_summary(error)}") from error
    records = list(read_lines(path / REQUESTS_FILE, RequestRecord))
    return Run(path.resolve().name, facts, records)
