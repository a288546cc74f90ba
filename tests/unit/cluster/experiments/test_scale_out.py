"""The loads of the scale-out experiment, on a server and with a client that are played."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from cluster.experiments import scale_out
from cluster.experiments.parts import PartStore
from cluster.experiments.scale_out import ScaleOutSettings, run_replicas

SETTINGS = ScaleOutSettings(trace=Path("t"))


class Played:
    """Servers that were started, and load tests that were run by the name of their folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served: list[str] = []
        self.loads: list[str] = []
        self.breaks: set[str] = set()
        monkeypatch.setattr(scale_out, "served_cluster", self.serve)
        monkeypatch.setattr("cluster.experiments.scale_out.subprocess.run", self.load)
        monkeypatch.setattr("cluster.loadtest.run_file.read_run", self.read)

    @contextmanager
    def serve(self, model: Any, folder: Path, name: str) -> Iterator[Any]:
        self.served.append(name)
        yield SimpleNamespace(url="http://played", cpu_s=lambda: 1.0)

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
