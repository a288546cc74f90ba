"""Files of a run: settings and results (`run.json`), and requests (`requests.jsonl`)."""

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
from apar_core.tree.reader_times import ReaderTimes
from cluster.loadtest.jobs import Target, WorkloadSettings
from cluster.loadtest.trace import TraceLine, TraceWriter

RUN_FILE, REQUESTS_FILE = "run.json", "requests.jsonl"
SAMPLE_S = 3.0
"""Default length of a throughput sample, as in the paper."""
SETTLE_S = 3.0
"""Longer than the interval at which engines report their counts, which is 1 s."""
MAX_CPU_SHARE = 0.9
MAX_LAG_S = 0.1
MAX_LATE_S = 0.25
"""Above any of these limits, the client counts as a bottleneck."""
CANCELLED = "cancelled"
"""Error kind of a request that was running when the user interrupted the run."""


class RequestRecord(BaseModel):
    """Result of one request, a line of `requests.jsonl`; all times are in seconds.

    `sent_s` and `planned_s` are relative to the start of the repeat. `planned_s` is None for
    closed-loop arrivals. The following are relative to `sent_s`: the times in `pieces`, the chunks
    of text as (time, characters); `end_s`, the last chunk of the answer; `paragraph_s`, the end of
    the first paragraph. `text_tokens` is the server's count, or the number of chunks if the server
    reports none (then `counted` is false). `error` is the error kind, None for a complete answer.
    `apar` is the server's statistics of the request's threads.
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
        """Time of the first text, since the start of the repeat."""
        return self.sent_s + self.pieces[0][0] if self.pieces else None

    @property
    def finished_s(self) -> float:
        """Time of the end, since the start of the repeat."""
        return self.sent_s + self.end_s

    @property
    def late_s(self) -> float | None:
        """Delay of sending relative to the plan, caused by the client."""
        return None if self.planned_s is None else self.sent_s - self.planned_s

    @property
    def reader(self) -> ReaderTimes:
        """Times of the text as its reader sees it, since sending; `pieces` hold certain text.

        They are weighted by characters, because a chunk does not tell its tokens.
        """
        times = ReaderTimes()
        for time_s, characters in self.pieces:
            times.add(characters, time_s)
        return times

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive chunks of text."""
        times = [time_s for time_s, _ in self.pieces]
        return [after - before for before, after in pairwise(times)]

    def tokens_by_piece(self) -> list[tuple[float, float]]:
        """Return (time since the start of the repeat, tokens) for each chunk of text.

        A chunk may contain several tokens; tokens are distributed by characters.
        """
        characters = sum(length for _, length in self.pieces)
        if not characters:
            return []
        per_character = self.text_tokens / characters
        return [(self.sent_s + time_s, length * per_character) for time_s, length in self.pieces]


@dataclass(frozen=True, slots=True)
class Answered:
    """Record of a request with its messages and its answer."""

    record: RequestRecord
    messages: tuple[ChatMessage, ...]
    text: str


class ClientFigures(BaseModel):
    """Load of the client in one repeat.

    CPU shares are relative to one core: over the whole repeat, and in its busiest second.
    `lag_...` is the delay of the event loop's wake-ups. `late_p99_s` is the delay of sending
    requests, None for closed-loop arrivals.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_share: float
    busiest_cpu_share: float
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    late_p99_s: float | None

    @property
    def warnings(self) -> list[str]:
        """Warnings that the client was a bottleneck; empty if it was not."""
        warnings = []
        if self.cpu_share > MAX_CPU_SHARE:
            warnings.append(
                f"the client used {self.cpu_share:.2f} of a core (limit {MAX_CPU_SHARE})"
            )
        if self.lag_p99_s > MAX_LAG_S:
            warnings.append(
                f"the client's event loop lagged by {self.lag_p99_s * 1000:.0f} ms at the 99th "
                f"percentile (limit {MAX_LAG_S * 1000:.0f} ms)"
            )
        if self.late_p99_s is not None and self.late_p99_s > MAX_LATE_S:
            warnings.append(
                f"requests were sent {self.late_p99_s * 1000:.0f} ms late at the 99th percentile "
                f"(limit {MAX_LATE_S * 1000:.0f} ms)"
            )
        return warnings


class ClusterMoment(BaseModel):
    """Gauges at one time in a repeat; the KV share is that of the fullest replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_s: float
    kv_share: float
    running: float
    waiting: float
    deferred: float


class ClusterFigures(BaseModel):
    """Metrics of the servers in one repeat: increases of counters, and gauges over time.

    Counters include the requests of other clients. `failures` counts failed readings.
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
    """Settings of a load test."""

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
    """Results of a repeat except its requests; `planned` is the number of planned requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repeat: int
    planned: int
    duration_s: float
    interrupted: bool
    client: ClientFigures
    cluster: ClusterFigures | None = None


class RunFacts(BaseModel):
    """Content of `run.json`.

    `left_out` recorded answers exceeded the context. `repeated` requests of each repeat were
    repetitions of earlier ones. `client` names the client's software and machine, and
    `server_version` is the version of the server's vLLM; both may be unknown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: LoadSettings
    started: str
    client: str | None = None
    server_version: str | None = None
    repeats: list[RepeatFacts] = []
    left_out: NonNegativeInt = 0
    repeated: NonNegativeInt = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    name: str
    facts: RunFacts
    records: list[RequestRecord]

    def of_repeat(self, repeat: int) -> list[RequestRecord]:
        """Return the requests of one repeat."""
        return [record for record in self.records if record.repeat == repeat]

    @property
    def whole(self) -> list[RequestRecord]:
        """Requests with a complete answer."""
        return [record for record in self.records if record.error is None]


class AnswerFile:
    """Writes answers as a trace for `--replay FILE`."""

    def __init__(self, path: Path) -> None:
        self._trace = TraceWriter(path)
        self._known: set[str] = set()

    def add(self, answered: Answered, model: str) -> None:
        """Write a complete answer, unless its question already has one."""
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
    """Writes the files of a run while it is running. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        self.path.mkdir(parents=True, exist_ok=True)
        requests = self.path / REQUESTS_FILE
        if requests.exists() and requests.stat().st_size > 0:
            raise EvaluationError(
                f"--out {self.path} already contains a run; choose another folder"
            )
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
        """Write and flush the line of a request."""
        assert self._file is not None
        self._file.write(record.model_dump_json(exclude_none=True) + "\n")
        self._file.flush()

    def write_facts(self, facts: RunFacts) -> None:
        """Write `run.json`."""
        (self.path / RUN_FILE).write_text(facts.model_dump_json(indent=1), encoding="utf-8")


def read_run(path: Path) -> Run:
    """Read a run, which is named after its folder.

    Raises EvaluationError if the folder contains no run.
    """
    try:
        facts = RunFacts.model_validate_json((path / RUN_FILE).read_bytes())
    except OSError as error:
        raise EvaluationError(f"{path} contains no run of apar loadtest: {error}") from error
    except Invalid as error:
        raise EvaluationError(f"{path / RUN_FILE}: {validation_summary(error)}") from error
    records = list(read_lines(path / REQUESTS_FILE, RequestRecord))
    return Run(path.resolve().name, facts, records)
