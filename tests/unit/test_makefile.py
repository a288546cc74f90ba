"""`make` chooses vLLM's build by the machine's driver, and an environment for each."""

import os
import subprocess
from pathlib import Path

import pytest

from apar_core.installation import ROOT

has_driver = Path("/proc/driver/nvidia/version").exists()


def commands_of(folder: Path, nvidia_smi: str, *arguments: str) -> tuple[int, str]:
    """Return what `make` would run on a machine whose `nvidia-smi` does this."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    tool.chmod(0o755)
    # These tests may themselves be run by `make`.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=ROOT,
        env={**environment, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("nvidia_smi", "arguments", "environment"),
    [
        pytest.param("exit 9", (), ".venv/", marks=pytest.mark.skipif(has_driver, reason="driver")),
        ("exit 0", (), ".venv-gpu/"),
        ("exit 0", ("DEVICE=cpu",), ".venv/"),
        ("exit 9", ("DEVICE=gpu",), ".venv-gpu/"),
    ],
)
def test_serve_takes_the_build_that_fits_the_machine(
    tmp_path: Path, nvidia_smi: str, arguments: tuple[str, ...], environment: str
) -> None:
    status, said = commands_of(tmp_path, nvidia_smi, "serve", *arguments)

    assert status == 0, said
    assert said.splitlines()[-1] == f"{environment}bin/apar serve"
    other = ".venv-gpu/" if environment == ".venv/" else ".venv/"
    assert other not in said


def test_an_environment_is_set_up_also_where_the_model_cannot_be_fetched(tmp_path: Path) -> None:
    status, said = commands_of(tmp_path, "exit 9", "--always-make", "venv", "DEVICE=cpu")

    assert status == 0, said
    *_, fetched, once = said.splitlines()
    command, _, otherwise = fetched.partition(" || ")
    assert command == ".venv/bin/apar fetch"
    assert otherwise.startswith('echo "Set up without apar-smollm2. To fetch it later: ')
    assert once == "touch .venv/fetched"


def test_checks_run_in_the_cpu_environment_also_beside_a_driver(tmp_path: Path) -> None:
    status, said = commands_of(tmp_path, "exit 0", "check-quick")

    assert status == 0, said
    assert said.splitlines()[-1] == ".venv/bin/mypy"


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    status, said = commands_of(tmp_path, "exit 0", "serve", "DEVICE=tpu")

    assert status == 2
    assert "DEVICE is 'tpu': choose cpu or gpu" in said
