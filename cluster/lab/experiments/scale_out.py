"""Throughput of `apar serve` by number of replicas, on this machine.

With few cores, replicas, gateway, proxy and client compete for CPU time. So the CPU time per text
token is measured too; it limits the tokens per second that the cores can carry.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import yaml

from apar_core.errors import EngineError, EvaluationError
from apar_core.reporting import Report, ReportTable
from cluster.lab.experiments.parts import PartStore, StartStage
from cluster.lab.experiments.settings import ScaleOutSettings
from cluster.lab.plots import panels
from cluster.lab.tables import Value, table_of
from cluster.local_ray import free_port

if TYPE_CHECKING:
    from matplotlib.figure import Figure

APAR = ("-c", "from cluster.cli.main import app; app()")
"""Python arguments that run the `apar` command of this installation."""
_START_S = 300.0
_STOP_S = 120.0
_POLL_S = 0.5
_BAR_WIDTH = 0.38


@dataclass(frozen=True, slots=True)
class ServedCluster:
    """A server that is ready: its URL, and the process from which all its others descend."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes so far, without those that have exited."""
        total_s = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s


@contextmanager
def served_cluster(model: dict[str, Any], folder: Path, name: str) -> Iterator[ServedCluster]:
    """Serve one model (a `models` entry of the configuration) until the end of the context.

    Configuration and log stay in the folder. Raises EngineError if the server does not get ready.
    """
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / f"{name}.yaml", folder / f"{name}.log"
    config.write_text(yaml.safe_dump({"port": port, "models": [model]}), encoding="utf-8")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *APAR, "serve", "--config", str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, process, log)
        yield ServedCluster(url, psutil.Process(process.pid))
    finally:
        _stop(process)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            # /v1/models answers before a replica runs, without the model's folder and context.
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(_POLL_S)
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise EngineError(f"apar serve did not get ready within {_START_S:g} s; {log} ends: {last}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server gracefully; kill its whole session if it does not exit."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        # The server leads its own session, so no other process is in the group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True, slots=True)
class ReplicasRun:
    """Forked or sequential decoding with a number of replicas.

    CPU seconds are of all server processes, and of the client, over all repeats, including warm-up
    and reports of the load test.
    """

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
        # The kernels of each replica use one core.
        model = {
            "checkpoint": settings.model,
            "replicas": replicas,
            "max_concurrency": settings.concurrency,
            "cpu_threads": 1,
            "replay": True,
        }
        with served_cluster(model, folder, f"serve-{replicas}") as served:
            for forked in missing:
                run = _load(settings, served, replicas, folder, forked)
                store.add(names[forked], asdict(run))
    return [ReplicasRun(**store.find(name)) for name in names.values()]


def scale_out_table(runs: Sequence[ReplicasRun]) -> ReportTable:
    """Return throughput and CPU time by replicas, and throughput relative to the fewest."""
    num_cores = psutil.cpu_count() or 1
    ordered = sorted(runs, key=lambda run: (run.forked, run.replicas))
    fewest = {run.forked: run for run in reversed(ordered)}
    return table_of(
        "replicas",
        f"Replicas on this machine of {num_cores} cores",
        ordered,
        (
            Value("decoding", "", lambda run: "forked" if run.forked else "sequential"),
            Value("replicas", "d", lambda run: run.replicas),
            Value("text tokens/s", ".0f", lambda run: run.tokens_per_s),
            Value(
                "x fewest replicas",
                ".2f",
                lambda run: run.tokens_per_s / fewest[run.forked].tokens_per_s,
            ),
            Value("latency s", ".2f", lambda run: run.latency_mean_s),
            Value("cores used", ".2f", lambda run: run.cores_used),
            Value("CPU ms a token", ".3f", lambda run: run.cpu_ms_per_token),
            Value("tokens/s at most", ".0f", lambda run: 1000 * num_cores / run.cpu_ms_per_token),
        ),
        note=f"tokens/s at most: what {num_cores} cores could carry at this CPU time per token of "
        "server, gateway, proxy and client together. CPU and cores include the client's imports, "
        "tokenizing and report, and the warm-up, which the duration leaves out.",
    )


def report_scale_out(settings: ScaleOutSettings, folder: Path, start_stage: StartStage) -> Report:
    """Run the loads that the folder does not have, and report all of them."""
    store = PartStore(folder, settings.as_text())
    done = start_stage("numbers of replicas", len(settings.replicas))
    runs: list[ReplicasRun] = []
    for number in settings.replicas:
        runs += run_replicas(settings, number, folder, store)
        done()
    facts = {
        "Model": settings.model,
        "Load": f"{settings.answers} answers of {settings.trace}, {settings.concurrency} under "
        f"way at once, {settings.repeats} repeats",
        "More replicas": "predicted by `apar simulate --replicas 1,2,4,8`",
    }
    return Report(
        "Scaling out",
        facts,
        [scale_out_table(runs)],
        {"scale-out": scale_out_figure(runs)},
        {"runs": [asdict(run) for run in runs]},
    )


def scale_out_figure(runs: Sequence[ReplicasRun]) -> Figure:
    """Draw throughput as bars, labelled with its ratio to that of the fewest replicas."""
    # Imports matplotlib, which takes a second.
    from cluster.lab.experiments.plots import METHOD_COLOURS

    with panels(1, 1, (5.8, 4)) as (figure, ((panel,),)):
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
        panel.set(title="Measured on this machine", xlabel="replicas", ylabel="text tokens / s")
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
        "--concurrency", str(settings.concurrency), "--answers", str(settings.answers),
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
