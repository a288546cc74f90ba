"""What is installed: hidden packages, missing extras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from apar_core.installation import ROOT, hidden_packages, missing_extra


def test_nothing_is_hidden_here() -> None:
    assert hidden_packages() == []


def test_a_package_of_the_same_name_is_reported_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    (found,) = hidden_packages()

    assert found.startswith(f"the package `cluster` in {tmp_path}/cluster")
    assert f"hides the one in {ROOT}" in found


def test_the_console_script_says_what_hides_a_package(tmp_path: Path) -> None:
    (tmp_path / "deployments.py").touch()
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}];"
    program += "from apar_core.command import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )

    assert done.returncode == 1
    assert done.stderr.startswith(f"apar: the package `deployments` in {tmp_path}/deployments.py")
    assert "Traceback" not in done.stderr


def test_a_missing_module_is_told_with_its_extra(tmp_path: Path) -> None:
    program = "import sys; sys.modules['typer'] = None; sys.path.insert(0, sys.argv.pop(1));"
    program += "from apar_core.command import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT), "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )

    assert done.returncode == 1
    assert "apar: the module 'typer' is not installed" in done.stderr
    assert "pip install '.[serve]'" in done.stderr


@pytest.mark.parametrize(
    ("module", "extra"), [("peft.tuners", "train"), ("vllm", "cpu"), ("numpy", None)]
)
def test_the_extra_of_a_module(module: str, extra: str | None) -> None:
    message = missing_extra(ModuleNotFoundError(name=module))

    assert (message is None) == (extra is None)
    assert extra is None or f"pip install '.[{extra}]'" in str(message)
