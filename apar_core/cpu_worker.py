"""vLLM's worker on CPUs: faster adapters and top-p, drafts and seeds as they should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

from apar_core.cpu_sampling import keep_top_k_top_p, repeat_for_drafts
from apar_core.engine.cpu_adapted_layers import adapt_layers
from apar_core.vllm_names import (
    CPUWorker,
    replace_expand_batch_to_tokens,
    replace_top_k_top_p,
    replaced_adapter_kernels,
)


class ForkCPUWorker(CPUWorker):
    """The worker of engines that fork."""

    def load_model(self, **kwargs: Any) -> None:
        """Build the model with our kernels for its adapters, and sample with ours."""
        replace_top_k_top_p(keep_top_k_top_p)
        replace_expand_batch_to_tokens(repeat_for_drafts)
        compilation = self.vllm_config.compilation_config
        mode = compilation.mode
        with replaced_adapter_kernels("apar_core.engine.cpu_adapters.CPUAdapters"):
            super().load_model(**kwargs)
        # vLLM completes the configuration again for a draft model, and turns compilation off.
        compilation.mode = mode
        adapt_layers(self.model_runner.model)
        if not self.use_v2_model_runner:
            _keep_generators(self.model_runner)


def _keep_generators(runner: Any) -> None:
    """Let rows whose token is thrown away draw no number from their request's generator.

    These are rows of unfinished prompts. vLLM's runner (V1) turns the generator back after such a
    draw, which generators of CPUs refuse: a prompt with a seed that takes several steps would end
    the engine (vLLM 0.32).
    """
    # Not the worker's method, which vLLM's executor for Ray does not call.
    sample = runner.sample_tokens

    @wraps(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        with _unused_generators(runner):
            return sample(*args, **kwargs)

    runner.sample_tokens = sample_tokens


@contextmanager
def _unused_generators(runner: Any) -> Iterator[None]:
    batch = runner.input_batch
    thrown_away = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
    kept = {row: batch.generators.pop(row) for row in thrown_away if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(kept)
