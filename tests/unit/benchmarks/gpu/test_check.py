"""`check.sh` goes on past failures, keeps to its time, and resumes, also on another machine."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.check import CHECKS, Check, main, obstacle, pinned, with_needed

ROOT = Path(__file__).resolve().parents[4]
UNFINISHED = 3
PLAN = ROOT / "benchmarks" / "gpu" / "README.md"


def fake(name: str, *, limit_s: int = 30, expected_s: int = 1, **others: Any) -> Check:
    fields = {"packages": ("torch",), **others}
    return Check(name, expected_s, limit_s, "", "tests.unit.benchmarks.gpu.fake_checks", **fields)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path


def choose(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    monkeypatch.setattr(gpu_check, "CHECKS", checks)


def run(folders: Path, *options: str) -> int:
    return main(["--device", "cpu", "--size", "tiny", "--state", str(folders), *options])


def report(folders: Path) -> dict[str, Any]:
    path = folders / "out" / "gpu-check.json"
    found: dict[str, Any] = json.loads(path.read_text())["checks"]
    return found


def results(folders: Path) -> dict[str, Any]:
    return {name: found["status"] for name, found in report(folders).items()}


@pytest.mark.ci
def test_a_failure_and_a_check_without_end_do_not_stop_the_others(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_CPU_LIMITS", 1)
    choose(
        monkeypatch, fake("breaks"), fake("hangs", limit_s=5),
        fake("absent", packages=("no_such_package",)), fake("works"),
    )  # fmt: skip

    assert run(folders) == 1

    assert results(folders) == {
        "breaks": "failed", "hangs": "timed out", "absent": "skipped", "works": "passed",
    }  # fmt: skip
    page = (folders / "out" / "gpu-check.md").read_text()
    assert "| breaks |  | failed: a / b is wrong |" in page
    assert "- works on cpu" in page
    # What a check had found before it was ended stays.
    assert "- hangs on cpu" in page
    with tarfile.open(folders / "out" / "logs.tar.xz") as logs:
        assert {*logs.getnames()} == {"breaks.log", "hangs.log", "works.log"}


def test_a_call_leaves_what_does_not_fit_to_the_next(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, fake("long", expected_s=90, limit_s=120), fake("works"))

    assert run(folders, "--minutes", "1") == UNFINISHED
    assert results(folders) == {"works": "passed"}
    assert run(folders) == 0
    assert results(folders) == {"long": "passed", "works": "passed"}

    def never(*_: Any) -> Any:
        raise AssertionError("a check with a result ran again")

    monkeypatch.setattr(gpu_check, "run_check", never)
    assert run(folders) == 0
    with pytest.raises(AssertionError, match="ran again"):
        run(folders, "--again", "--only", "works")


@pytest.mark.ci
def test_a_check_that_the_end_of_a_call_cuts_off_is_tried_again(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, fake("hangs", expected_s=1, limit_s=120))

    assert run(folders, "--minutes", "0.25") == UNFINISHED
    assert report(folders)["hangs"]["status"] == "cut off"

    # After a check has timed out, one more try follows: what it has compiled is kept.
    choose(monkeypatch, fake("works"), fake("hangs", limit_s=1))
    monkeypatch.setattr(gpu_check, "_CPU_LIMITS", 1)
    for tries in (1, 2):
        assert run(folders) == 1
        assert results(folders) == {"hangs": "timed out", "works": "passed"}
        assert report(folders)["hangs"]["tries"] == tries
    monkeypatch.setattr(gpu_check, "run_check", None)
    assert run(folders) == 1


def test_ending_the_harness_ends_the_check_that_runs(folders: Path) -> None:
    program = (
        "import runpy, sys\n"
        "from benchmarks.gpu import check\n"
        "from tests.unit.benchmarks.gpu.test_check import fake\n"
        "check.CHECKS = (fake('hangs'),)\n"
        "check.signal.signal(check.signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"check.main(['--device', 'cpu', '--size', 'tiny', '--state', {str(folders)!r}])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    data = folders / "cpu-tiny" / "hangs.data.json"
    while not data.exists():
        assert process.poll() is None
        time.sleep(0.02)
    [child] = psutil.Process(process.pid).children()
    process.terminate()

    assert process.wait() == 143
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(60)
    assert not child.is_running()


def test_a_skipped_check_is_tried_again(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = fake("works", packages=("torch", "no_such_package", "ijson"))
    choose(monkeypatch, missing)
    assert run(folders) == UNFINISHED
    # The pins are those of requirements/gpu.txt, for what it has.
    page = (folders / "out" / "gpu-check.md").read_text()
    assert re.search(r"skipped: missing: python\S* -m pip install no_such_package \|", page)

    choose(monkeypatch, replace(missing, packages=("torch",)))
    assert run(folders) == 0
    assert results(folders) == {"works": "passed"}


def test_missing_packages_are_named_with_their_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"ijson==[\d.]+", pinned("ijson"))
    monkeypatch.setattr(gpu_check, "_is_installed", lambda name: name == "torch")

    found = obstacle(fake("any", packages=("torch", "ijson", "pydantic")), {})

    assert found is not None
    assert found.endswith(f"pip install {pinned('ijson')} {pinned('pydantic')}")


def test_what_a_check_needs_runs_first_and_gives_it_its_result(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, fake("works"), fake("other"), fake("reads", after=("works",)))

    assert run(folders, "--only", "reads") == 0

    assert results(folders) == {"works": "passed", "reads": "passed"}
    assert report(folders)["reads"]["data"] == {"summary": ["works on cpu"]}


def test_what_needs_a_failed_check_is_skipped(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, fake("breaks"), fake("reads", after=("breaks",)))

    assert run(folders) == 1

    assert report(folders)["reads"] == {"status": "skipped", "reason": "breaks is failed"}


def test_results_of_another_machine_are_taken_over(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, fake("works"), fake("other"), fake("reads", after=("works",)))
    run(folders, "--only", "works")
    shutil.move(folders / "out" / "gpu-check.json", folders / "brought.json")

    assert run(folders / "fresh", "--resume", str(folders / "brought.json")) == 0

    assert results(folders) == {"works": "passed", "other": "passed", "reads": "passed"}
    # The logs are those of this machine: `works` did not run again.
    assert not (folders / "fresh" / "cpu-tiny" / "works.log").exists()


def test_results_of_different_gpus_are_not_mixed(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, fake("works"), fake("other"))
    monkeypatch.setattr(gpu_check, "gpu_name", lambda: "NVIDIA A")
    run(folders, "--only", "works")
    brought = str(shutil.move(folders / "out" / "gpu-check.json", folders / "brought.json"))
    monkeypatch.setattr(gpu_check, "gpu_name", lambda: "NVIDIA B")

    assert run(folders, "--resume", brought) == 0

    assert "brought.json is of NVIDIA A, not NVIDIA B: all checks run" in capsys.readouterr().out
    assert {found["gpu"] for found in report(folders).values()} == {"NVIDIA B"}
    # Without a GPU, what needs none may use the results.
    monkeypatch.setattr(gpu_check, "gpu_name", lambda: None)
    assert run(folders, "--resume", brought) == 0
    assert report(folders)["works"]["gpu"] == "NVIDIA A"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is no gpu-check.json: KeyError: 'device'"),
        ("[1]", "is no gpu-check.json: TypeError"),
        ("{", "is no gpu-check.json: JSONDecodeError"),
        (
            '{"device": "cuda", "size": "full", "checks": {}}',
            "is of --device cuda --size full, not --device cpu --size tiny",
        ),
    ],
)
def test_a_report_to_resume_from_is_checked(
    folders: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    (folders / "brought.json").write_text(content)

    with pytest.raises(SystemExit):
        run(folders, "--resume", str(folders / "brought.json"))

    assert message in capsys.readouterr().err
    assert not (folders / "cpu-tiny" / "gpu-check.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resume", "nowhere.json"), "--resume: no file nowhere.json"),
        (("--answers", "nowhere.jsonl"), "--answers: no file nowhere.jsonl"),
        (("--minutes", "0"), "--minutes must be above 0, not 0"),
    ],
)
def test_wrong_options_are_named(
    folders: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str], message: str
) -> None:
    with pytest.raises(SystemExit):
        run(folders, *options)

    assert message in capsys.readouterr().err


def test_an_unknown_check_is_named(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(folders, "--only", "machine, nope")

    assert "no check 'nope'; there are machine, kernels, engine" in capsys.readouterr().err


def test_the_checks_that_come_first_take_half_an_hour() -> None:
    """A borrowed GPU is lent for 30 minutes, of which its start and transfers take a part."""
    names = [check.name for check in CHECKS]
    expected_s = sum(check.expected_s for check in CHECKS[: names.index("training")])

    assert expected_s <= 27 * 60
    assert names[-1] == "figure4"
    assert all(check.expected_s <= check.limit_s for check in CHECKS)
    assert all(with_needed([name])[-1] == name for name in names)
    # One call of ten minutes has room for each of them.
    assert max(check.limit_s for check in CHECKS) <= 600


def test_the_plan_names_every_check_with_its_time() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", PLAN.read_text(encoding="utf-8"), re.M)

    assert rows == [(check.name, str(check.expected_s)) for check in CHECKS]


@pytest.mark.ci
@pytest.mark.parametrize("module", ["torch_checks", "family_kernel", "check"])
def test_checks_without_vllm_do_not_import_it(module: str) -> None:
    imported = f"import sys, benchmarks.gpu.{module}"
    program = f"{imported}; sys.exit('vllm' in sys.modules or 'ray' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.ci
@pytest.mark.timeout(5400)
def test_every_check_runs_here_as_far_as_a_cpu_can(folders: Path) -> None:
    assert run(folders, "--minutes", "90") == 0, (folders / "out" / "gpu-check.md").read_text()

    assert results(folders) == {check.name: "passed" for check in CHECKS}
    page = (folders / "out" / "gpu-check.md").read_text()
    assert "as many in virtual time as measured, in every run" in page
    assert "the baseline is not vLLM's default" in page
