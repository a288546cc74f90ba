"""`check.sh` goes on past failures, keeps to its time, and resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.check import CHECKS, Check, main

ROOT = Path(__file__).resolve().parents[4]
FAKES = "tests.unit.benchmarks.gpu.fake_checks"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path


def run(folders: Path, *options: str) -> int:
    return main(["--device", "cpu", "--size", "tiny", "--state", str(folders), *options])


def results(folders: Path) -> dict[str, Any]:
    report = json.loads((folders / "out" / "gpu-check.json").read_text())
    return {name: found["status"] for name, found in report["checks"].items()}


def test_a_failure_and_a_check_without_end_do_not_stop_the_others(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = (
        Check("breaks", 30, "", FAKES),
        Check("hangs", 1, "", FAKES),
        Check("absent", 30, "", FAKES, "no_such_package"),
        Check("works", 30, "", FAKES),
    )
    monkeypatch.setattr(gpu_check, "CHECKS", checks)

    assert run(folders) == 1

    assert results(folders) == {
        "breaks": "failed", "hangs": "timed out", "absent": "skipped", "works": "passed",
    }  # fmt: skip
    page = (folders / "out" / "gpu-check.md").read_text()
    assert "| breaks |  | failed: a / b is wrong |" in page
    assert "- works on cpu" in page


def test_a_call_leaves_what_does_not_fit_to_the_next(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = (Check("long", 90, "", FAKES), Check("short", 20, "", FAKES))
    monkeypatch.setattr(gpu_check, "CHECKS", checks)

    assert run(folders, "--minutes", "1") == 0
    assert results(folders) == {"short": "passed"}
    assert run(folders) == 0
    assert results(folders) == {"long": "passed", "short": "passed"}

    def never(*_: Any) -> Any:
        raise AssertionError("a check with a result ran again")

    monkeypatch.setattr(gpu_check, "run_check", never)
    assert run(folders) == 0
    with pytest.raises(AssertionError, match="ran again"):
        run(folders, "--again", "--only", "short")


def test_a_skipped_check_is_tried_again(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Check("works", 30, "", FAKES, "no_such_package")
    monkeypatch.setattr(gpu_check, "CHECKS", (missing,))
    assert run(folders) == 0
    assert (
        "skipped: no_such_package is not installed"
        in (folders / "out" / "gpu-check.md").read_text()
    )

    monkeypatch.setattr(gpu_check, "CHECKS", (replace(missing, needs="torch"),))
    assert run(folders) == 0
    assert results(folders) == {"works": "passed"}


def test_missing_packages_are_named_before_any_check_runs(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Check("works", 30, "", FAKES, packages=("torch", "no_such_package"))
    monkeypatch.setattr(gpu_check, "CHECKS", (check, Check("other", 30, "", FAKES)))
    with pytest.raises(SystemExit):
        run(folders)

    assert "pip install no_such_package\n" in capsys.readouterr().err
    assert not (folders / "out").exists()
    assert run(folders, "--only", "other") == 0


def test_all_limits_together_are_22_minutes() -> None:
    assert sum(check.limit_s for check in CHECKS) <= 22 * 60
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_checks_without_vllm_do_not_import_it() -> None:
    imported = "import sys, benchmarks.gpu.torch_checks"
    program = f"{imported}; sys.exit('vllm' in sys.modules or 'ray' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
def test_every_check_runs_here_as_far_as_a_cpu_can(folders: Path) -> None:
    assert run(folders, "--minutes", "60") == 0, (folders / "out" / "gpu-check.md").read_text()

    assert results(folders) == {check.name: "passed" for check in CHECKS}
