"""FlashInfer's sampler, without which a vLLM engine must start where it cannot be compiled.

vLLM 0.32 samples with FlashInfer, already while it warms up. FlashInfer loads that kernel from the
package flashinfer-jit-cache, or builds it with nvcc and ninja (`jit/core.py` in flashinfer-python
0.7). Images and environments without a CUDA toolkit have neither, and the engine fails to start. It
then has to sample with vLLM's own kernels.

Nothing here imports vLLM, which takes seconds.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

_DEFAULT_CUDA_HOME = "/usr/local/cuda"
SAMPLER_VARIABLE = "VLLM_USE_FLASHINFER_SAMPLER"


def flashinfer_problem(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why FlashInfer's sampler cannot start in this environment; None if it can."""
    if find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    if find_spec("flashinfer_jit_cache") is not None:
        return None
    missing = []
    if _nvcc(environment) is None:
        missing.append(f"nvcc (CUDA_HOME, CUDA_PATH, PATH or {_DEFAULT_CUDA_HOME})")
    if shutil.which("ninja") is None:
        missing.append("ninja (PATH)")
    if not missing:
        return None
    return f"flashinfer-jit-cache is not installed, and there is no {', no '.join(missing)}"


def _nvcc(environment: Mapping[str, str]) -> str | None:
    """Return the compiler that FlashInfer would run (`jit/cpp_ext.py`)."""
    if given := environment.get("FLASHINFER_NVCC"):
        return shutil.which(given)
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home is None:
        return shutil.which("nvcc") or shutil.which(f"{_DEFAULT_CUDA_HOME}/bin/nvcc")
    return shutil.which(str(Path(home) / "bin" / "nvcc"))


def choose_sampler() -> None:
    """Let this process and its children sample without FlashInfer if it cannot start.

    Does nothing without a CUDA build of torch, or if the variable is set.
    """
    import torch

    if torch.version.cuda is None or SAMPLER_VARIABLE in os.environ:
        return
    problem = flashinfer_problem()
    if problem is not None:
        os.environ[SAMPLER_VARIABLE] = "0"
        logger.warning(
            "sampling without FlashInfer, which could not start: %s. `vllm download-kernels` "
            "installs its kernels; %s=1 overrides.",
            problem,
            SAMPLER_VARIABLE,
        )
