"""The sampler is chosen by what lies on the machine; no GPU is needed to find that out."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from apar_core.engine import gpu_start
from apar_core.engine.gpu_start import SAMPLER_VARIABLE, choose_sampler, flashinfer_problem


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment with FlashInfer, and with nothing on its PATH."""
    for name in (SAMPLER_VARIABLE, "CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC"):
        # Set first, so that what the tests set is removed again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_start, "_DEFAULT_CUDA_HOME", str(tmp_path / "none"))
    install(monkeypatch, "flashinfer")


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    def find(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name in packages else None

    monkeypatch.setattr(gpu_start, "find_spec", find)


def program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_without_compiler_and_compiled_kernels_the_reason_names_what_is_missing() -> None:
    problem = flashinfer_problem()

    assert problem is not None
    assert "no nvcc" in problem
    assert "no ninja" in problem
    assert "flashinfer-jit-cache is not installed" in problem


@pytest.mark.parametrize("home", ["CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC", None])
def test_a_compiler_with_ninja_is_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None
) -> None:
    program(tmp_path / "ninja")
    assert "no nvcc" in (flashinfer_problem() or "")
    assert "no ninja" not in (flashinfer_problem() or "")
    folder = tmp_path / "cuda" / "bin" if home else tmp_path
    program(folder / "nvcc")
    if home is not None:
        value = folder / "nvcc" if home == "FLASHINFER_NVCC" else folder.parent
        monkeypatch.setenv(home, str(value))

    assert flashinfer_problem() is None


def test_compiled_kernels_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    # flashinfer-cubin has no sampler.
    install(monkeypatch, "flashinfer", "flashinfer_cubin")
    assert flashinfer_problem() is not None

    install(monkeypatch, "flashinfer", "flashinfer_jit_cache")
    assert flashinfer_problem() is None


def test_an_engine_without_a_sampler_to_compile_uses_another_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    choose_sampler()
    choose_sampler()

    assert os.environ[SAMPLER_VARIABLE] == "0"
    (record,) = caplog.records
    assert "no nvcc" in record.getMessage()


@pytest.mark.parametrize(("cuda", "given"), [(None, None), ("13.0", "1"), ("13.0", "0")])
def test_other_devices_and_a_choice_of_the_user_stay(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cuda: str | None,
    given: str | None,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if given is not None:
        monkeypatch.setenv(SAMPLER_VARIABLE, given)

    choose_sampler()

    assert os.environ.get(SAMPLER_VARIABLE) == given
    assert not caplog.records
