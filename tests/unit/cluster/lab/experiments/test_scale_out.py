"""The loads of the scale-out experiment with played servers, and when a server counts as ready."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from apar_core.errors import EvaluationError
from cluster.lab.experiments import scale_out
from cluster.lab.experiments.parts import PartStore
from cluster.lab.experiments.scale_out import (
    ReplicasRun,
    report_scale_out,
    run_replicas,
    scale_out_figure,
)
from cluster.lab.experiments.settings import ScaleOutSettings

SETTINGS = ScaleOutSettings(trace=Path("t"))


class Played:
    """Servers that were started, and load tests that were run by the name of their folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served: list[str] = []
        self.loads: list[str] = []
        self.breaks: set[str] = set()
        monkeypatch.setattr(scale_out, "served_cluster", self.serve)
        monkeypatch.setattr("cluster.lab.experiments.scale_out.subprocess.run", self.load)
        monkeypatch.setattr("cluster.loadtest.run_file.read_run", self.read)

    @contextmanager
    def serve(self, model: Any, folder: Path, name: str) -> Iterator[Any]:
        self.served.append(name)
        yield SimpleNamespace(url="http://played", cpu_s=count(1.0).__next__)

    def load(self, arguments: list[str], **_: Any) -> Any:
        out = Path(arguments[arguments.index("--out") + 1])
        self.loads.append(out.name)
        requests = out / "requests.jsonl"
        # As `apar loadtest` does.
        if requests.exists():
            return SimpleNamespace(returncode=1, stderr=f"--out {out} already contains a run")
        out.mkdir(parents=True)
        requests.write_text("{}\n")
        broken = out.name in self.breaks
        return SimpleNamespace(returncode=int(broken), stderr="interrupted" if broken else "")

    def read(self, out: Path) -> Any:
        records = [SimpleNamespace(text_tokens=40, end_s=2.0)]
        facts = SimpleNamespace(repeats=[SimpleNamespace(duration_s=4.0)])
        return SimpleNamespace(whole=records, records=records, facts=facts)


def test_a_folder_of_a_trace_that_has_changed_is_refused(tmp_path: Path) -> None:
    settings = ScaleOutSettings(trace=tmp_path / "trace.jsonl")
    settings.trace.write_text("one answer")
    PartStore(tmp_path / "out", settings.as_text()).add("one", {})
    settings.trace.write_text("another one")

    with pytest.raises(EvaluationError, match="trace_sha256 was"):
        PartStore(tmp_path / "out", settings.as_text())


def test_an_interrupted_experiment_goes_on_with_the_load_that_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(monkeypatch)
    played.breaks = {"load-2-forked"}
    with pytest.raises(EvaluationError, match="the load test load-2-forked failed: interrupted"):
        run_replicas(SETTINGS, 2, tmp_path, PartStore(tmp_path, {}))
    played.breaks = set()

    runs = run_replicas(SETTINGS, 2, tmp_path, PartStore(tmp_path, {}))

    assert played.loads == ["load-2-sequential", "load-2-forked", "load-2-forked"]
    assert [(run.replicas, run.forked, run.tokens_per_s) for run in runs] == [
        (2, False, 10.0),
        (2, True, 10.0),
    ]
    # Nothing is served where all is there.
    assert run_replicas(SETTINGS, 2, tmp_path, PartStore(tmp_path, {})) == runs
    assert played.served == ["serve-2", "serve-2"]


def replicas_run(replicas: int, *, forked: bool, tokens: int) -> ReplicasRun:
    return ReplicasRun(
        replicas=replicas,
        forked=forked,
        text_tokens=tokens,
        duration_s=10.0,
        latency_mean_s=1.0,
        server_cpu_s=12.0,
        client_cpu_s=3.0,
    )


RUNS = [
    replicas_run(2, forked=True, tokens=9000),
    replicas_run(1, forked=False, tokens=4000),
    replicas_run(1, forked=True, tokens=6000),
    replicas_run(2, forked=False, tokens=5000),
]


def test_throughput_stands_over_its_number_of_replicas_with_its_ratio_to_the_fewest() -> None:
    (panel,) = scale_out_figure(RUNS).axes

    sequential, forked = ([bar.get_height() for bar in bars] for bars in panel.containers)
    assert (sequential, forked) == ([400.0, 500.0], [600.0, 900.0])
    assert [bars.get_label() for bars in panel.containers] == ["sequential", "forked"]
    assert [text.get_text() for text in panel.texts] == [
        "400\n1.00x",
        "500\n1.25x",
        "600\n1.00x",
        "900\n1.50x",
    ]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1", "2"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("replicas", "text tokens / s")


def test_the_report_has_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Played(monkeypatch)

    report = report_scale_out(SETTINGS, tmp_path, lambda *_: lambda: None)

    assert report.facts["Load"] == "96 answers of t, 32 under way at once, 3 repeats"
    assert [table.name for table in report.tables] == ["replicas"]
    assert [run["replicas"] for run in report.data["runs"]] == [1, 1, 2, 2]


STARTING_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import yaml

num_health_checks = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global num_health_checks
        is_ready = num_health_checks >= 2
        num_health_checks += self.path == "/health"
        self.send_response(503 if self.path == "/health" and not is_ready else 200)
        self.end_headers()
        self.wfile.write(b"ready" if is_ready else b"starting")


port = yaml.safe_load(Path(sys.argv[-1]).read_text())["port"]
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.slow
def test_a_server_is_ready_when_it_is_healthy_not_when_it_lists_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_out, "APAR", ("-c", STARTING_SERVER))

    with scale_out.served_cluster({"checkpoint": "apar-tiny"}, tmp_path, "serve") as served:
        assert httpx.get(f"{served.url}/v1/models").text == "ready"
