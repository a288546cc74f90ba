"""A run as a folder: `run.json`, what was asked for and what came of each repeat, and
`requests.jsonl`, a line for every request."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any

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
from apar_core.offline.data.records import ChatMessage
from apar_core.workload.trace import TraceLine, TraceWriter
from cluster.loadtest.jobs import Target, WorkloadSettings

SAMPLE_S = 3.0
"""Default length of a throughput sample, as in the paper."""
SETTLE_S = 11.0
"""Longer than a process waits between reports: `metrics.report_s`, or Ray's 10 s elsewhere."""
MOST_CPU_SHARE = 0.9
MOST_LAG_S = 0.1
MOST_LATE_S = 0.25
CANCELLED = "cancelled"
"""Kind of error of a request that was under way when the user ended the run."""


class RequestRecord(BaseModel):
    """One request; times are seconds, `sent_s` and `planned_s` since the start of its repeat.

    `planned_s` is None where a request is sent when another one ends. `pieces` are the parts of the
    text as they came: (seconds since it was sent, characters). `end_s`, when the last part of the
    answer had come, and `paragraph_s`, when the first paragraph was complete, count from there too.
    `text_tokens` are the server's count, or that of the pieces if it gives none (`counted` is false
    then). `error` is the kind of error, None for an answer that came whole. `apar` is the server's
    statistics of its threads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    repeat: int
    index: int
    id: str
    category: str
    sent_s: float
    end_s: float
    planned_s: float | None = None
    pieces: list[tuple[float, int]] = []
    paragraph_s: float | None = None
    status: int | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    text_tokens: int = 0
    counted: bool = True
    error: str | None = None
    message: str | None = None
    apar: dict[str, Any] | None = None

    @property
    def first_s(self) -> float | None:
        """When the first piece of text had come, since the start of the repeat."""
        return self.sent_s + self.pieces[0][0] if self.pieces else None

    @property
    def finished_s(self) -> float:
        """When it had ended, since the start of the repeat."""
        return self.sent_s + self.end_s

    @property
    def late_s(self) -> float | None:
        """How long after its time it was sent: the client's fault."""
        return None if self.planned_s is None else self.sent_s - self.planned_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between one piece of text and the next."""
        times = [time_s for time_s, _ in self.pieces]
        return [after - before for before, after in pairwise(times)]

    def tokens_by_piece(self) -> list[tuple[float, float]]:
        """When the text's tokens came, since the start of the repeat, and how many.

        A piece may hold several; the answer's tokens are shared out by characters.
        """
        characters = sum(length for _, length in self.pieces)
        if not characters:
            return []
        per_character = self.text_tokens / characters
        return [(self.sent_s + time_s, length * per_character) for time_s, length in self.pieces]


RUN_FILE, REQUESTS_FILE = "run.json", "requests.jsonl"


@dataclass(frozen=True, slots=True)
class Answered:
    """A record, and what was asked and said."""

    record: RequestRecord
    messages: tuple[ChatMessage, ...]
    text: str


class ClientFigures(BaseModel):
    """What the client did in one repeat.

    Shares are of one core: over the whole repeat, and of its busiest second. `lag_...` is how much
    later than asked for the event loop woke up; `late_p99_s` how long after their times requests
    were sent (None where they have none).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_share: float
    busiest_cpu_share: float
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    late_p99_s: float | None

    @property
    def marks(self) -> list[str]:
        """Why this run says more about the client than about the server; empty if it does not."""
        marks = []
        if self.cpu_share > MOST_CPU_SHARE:
            marks.append(
                f"the client used {self.cpu_share:.2f} of a core (more than {MOST_CPU_SHARE})"
            )
        if self.lag_p99_s > MOST_LAG_S:
            marks.append(
                f"the client's event loop was {self.lag_p99_s * 1000:.0f} ms late at its 99th "
                f"percentile (more than {MOST_LAG_S * 1000:.0f})"
            )
        if self.late_p99_s is not None and self.late_p99_s > MOST_LATE_S:
            marks.append(
                f"requests were sent {self.late_p99_s * 1000:.0f} ms late at the 99th percentile "
                f"(more than {MOST_LATE_S * 1000:.0f})"
            )
        return marks


class ClusterMoment(BaseModel):
    """Gauges at a moment of a repeat; the KV share is that of the fullest replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_s: float
    kv_share: float
    running: float
    waiting: float
    deferred: float


class ClusterFigures(BaseModel):
    """What the servers themselves counted in one repeat, and how they stood meanwhile.

    Counters hold all that the servers did, other clients' requests included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    generated_tokens: float
    engine_steps: float
    engine_busy_s: float
    forks: dict[str, float]
    shared_blocks: float
    copied_blocks: float
    attended_tokens: float
    sequential_attended_tokens: float
    cached_tokens: float
    sequential_cached_tokens: float
    moments: list[ClusterMoment]
    failures: int = 0


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
    """A trace of the answers, one line each, as `--workload replay:FILE` reads it."""

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
