"""Throughput of `apar serve` by number of replicas, on this machine.

With few cores, replicas, gateway, proxy and client compete for CPU time. So the CPU time per text
token is measured too; it limits the tokens per second that the cores can carry.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from apar_core.errors import EvaluationError
from apar_core.reporting import PLOT_SETTINGS, Column, Report, ReportTable
from cluster.lab.experiments.parts import PartStore
from cluster.lab.experiments.served_cluster import APAR, ServedCluster, served_cluster
from cluster.lab.experiments.settings import file_digest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR_WIDTH = 0.38


class ScaleOutSettings(BaseModel):
    """The model, its replicas, and the load on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: Path
    model: str = "apar-tiny"
    replicas: tuple[PositiveInt, ...] = Field((1, 2), min_length=1)
    requests: PositiveInt = 96
    concurrency: PositiveInt = 32
    repeats: PositiveInt = 3
    engine: Mapping[str, Any] = {}

    def served_model(self, replicas: int) -> dict[str, Any]:
        """Return a `models` entry in which the kernels of each replica use one core."""
        return {
            "checkpoint": self.model,
            "replicas": replicas,
            "max_concurrency": self.concurrency,
            "cpu_threads": 1,
            "replay": True,
            "engine": dict(self.engine),
        }

    def as_text(self) -> dict[str, str]:
        """Return the settings to compare with those of an earlier run, the trace by its content."""
        values = {name: str(value) for name, value in self.model_dump(mode="json").items()}
        return {**values, "trace_sha256": file_digest(self.trace)}


class ReplicasRun(BaseModel):
    """Forked or sequential decoding with a number of replicas.

    CPU seconds are of all server processes, and of the client, over all repeats, including warm-up
    and reports of the load test.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int
    forked: bool
    text_tokens: int
    duration_s: float
    latency_mean_s: float
    server_cpu_s: float
    client_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """Text tokens per second."""
        return self.text_tokens / self.duration_s

    @property
    def cpu_ms_per_token(self) -> float:
        """CPU milliseconds per text token, the client's included."""
        return 1000 * (self.server_cpu_s + self.client_cpu_s) / self.text_tokens

    @property
    def cores_used(self) -> float:
        """Mean number of busy cores."""
        return (self.server_cpu_s + self.client_cpu_s) / self.duration_s


def run_replicas(
    settings: ScaleOutSettings, replicas: int, folder: Path, store: PartStore
) -> list[ReplicasRun]:
    """Serve with a number of replicas and run the load on them, sequential and forked.

    Each result is stored as it completes. Loads that are already in the store are skipped.
    """
    names = {forked: _load_name(replicas, forked) for forked in (False, True)}
    missing = [forked for forked, name in names.items() if not store.has(name)]
    if missing:
        model = settings.served_model(replicas)
        with served_cluster(model, folder, f"serve-{replicas}") as served:
            for forked in missing:
                run = _load(settings, served, replicas, folder, forked)
                store.add(names[forked], run.model_dump())
    return [ReplicasRun(**store.find(name)) for name in names.values()]


def scale_out_table(runs: Sequence[ReplicasRun]) -> ReportTable:
    """Return throughput and CPU time by replicas, and throughput relative to the fewest."""
    num_cores = psutil.cpu_count() or 1
    columns = (
        Column("decoding"),
        Column("replicas", "d"),
        Column("text tokens/s", ".0f"),
        Column("x fewest replicas", ".2f"),
        Column("latency s", ".2f"),
        Column("cores used", ".2f"),
        Column("CPU ms a token", ".3f"),
        Column("tokens/s at most", ".0f"),
    )
    rows = []
    for run in sorted(runs, key=lambda each: (each.forked, each.replicas)):
        alike = [each for each in runs if each.forked == run.forked]
        fewest = min(alike, key=lambda each: each.replicas)
        rows.append(
            (
                "forked" if run.forked else "sequential",
                run.replicas,
                run.tokens_per_s,
                run.tokens_per_s / fewest.tokens_per_s,
                run.latency_mean_s,
                run.cores_used,
                run.cpu_ms_per_token,
                1000 * num_cores / run.cpu_ms_per_token,
            )
        )
    return ReportTable(
        "replicas",
        f"Replicas on this machine of {num_cores} cores",
        columns,
        tuple(rows),
        note=f"tokens/s at most: what {num_cores} cores could carry at this CPU time per token of "
        "server, gateway, proxy and client together. CPU and cores include the client's imports, "
        "tokenizing and report, and the warm-up, which the duration leaves out.",
    )


def report_scale_out(settings: ScaleOutSettings, runs: Sequence[ReplicasRun]) -> Report:
    """Return the report with table and plot."""
    facts = {
        "Model": settings.model,
        "Load": f"{settings.requests} answers of {settings.trace}, {settings.concurrency} under "
        f"way at once, {settings.repeats} repeats",
        "More replicas": "predicted by `apar simulate --replicas 1,2,4,8`",
    }
    return Report(
        "Scaling out",
        facts,
        [scale_out_table(runs)],
        {"scale-out": scale_out_figure(runs)},
        {"runs": [run.model_dump(mode="json") for run in runs]},
    )


def scale_out_figure(runs: Sequence[ReplicasRun]) -> Figure:
    """Draw throughput as bars, labelled with its ratio to that of the fewest replicas."""
    # matplotlib takes a second to import.
    import matplotlib as mpl
    from matplotlib.figure import Figure as NewFigure

    from cluster.lab.experiments.plots import METHOD_COLOURS

    with mpl.rc_context(PLOT_SETTINGS):
        figure = NewFigure(figsize=(5.8, 4), layout="constrained")
        panel = figure.subplots()
        numbers = sorted({run.replicas for run in runs})
        for offset, forked in ((-_BAR_WIDTH / 2, False), (_BAR_WIDTH / 2, True)):
            alike = sorted(
                (run for run in runs if run.forked is forked), key=lambda run: run.replicas
            )
            rates = [run.tokens_per_s for run in alike]
            bars = panel.bar(
                [numbers.index(run.replicas) + offset for run in alike],
                rates,
                _BAR_WIDTH,
                color=METHOD_COLOURS["eager" if forked else "sequential"],
                label="forked" if forked else "sequential",
            )
            labels = [f"{rate:,.0f}\n{rate / rates[0]:.2f}x" for rate in rates]
            panel.bar_label(bars, labels, padding=2, fontsize=8)
        panel.set_xticks(range(len(numbers)), [str(number) for number in numbers])
        panel.set_title("Measured on this machine")
        panel.set_xlabel("replicas")
        panel.set_ylabel("text tokens / s")
        panel.set_ylim(0, 1.3 * max(run.tokens_per_s for run in runs))
        panel.legend(frameon=False, loc="upper left", ncols=2)
    return figure


def _load(
    settings: ScaleOutSettings, served: ServedCluster, replicas: int, folder: Path, forked: bool
) -> ReplicasRun:
    from cluster.loadtest.run_file import read_run

    name = _load_name(replicas, forked)
    out = folder / name
    if out.exists():
        # Left by an interrupted load, which a load test would not resume.
        shutil.rmtree(out)
    arguments = [
        "loadtest", "run", "--target", served.url, "--replay", str(settings.trace),
        "--concurrency", str(settings.concurrency), "--answers", str(settings.requests),
        "--repeats", str(settings.repeats), "--out", str(out),
    ]  # fmt: skip
    server_before_s = served.cpu_s()
    client_before_s = _children_cpu_s()
    done = subprocess.run(
        [sys.executable, *APAR, *arguments, *([] if forked else ["--no-fork"])],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise EvaluationError(f"the load test {name} failed: {done.stderr.strip()[-300:]}")
    run = read_run(out)
    if len(run.whole) < len(run.records):
        failed = len(run.records) - len(run.whole)
        raise EvaluationError(f"{failed} of {len(run.records)} requests failed; see {out}")
    return ReplicasRun(
        replicas=replicas,
        forked=forked,
        text_tokens=sum(record.text_tokens for record in run.whole),
        duration_s=sum(repeat.duration_s for repeat in run.facts.repeats),
        latency_mean_s=sum(record.end_s for record in run.whole) / len(run.whole),
        server_cpu_s=served.cpu_s() - server_before_s,
        client_cpu_s=_children_cpu_s() - client_before_s,
    )


def _load_name(replicas: int, forked: bool) -> str:
    return f"load-{replicas}-{'forked' if forked else 'sequential'}"


def _children_cpu_s() -> float:
    """Return the CPU seconds of this process's children that have exited."""
    times = psutil.Process().cpu_times()
    return float(times.children_user + times.children_system)
