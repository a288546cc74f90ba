"""GPU checks of vLLM engines with forks: see `check.py`.

Each check starts one engine of another kind in a process of its own. The first compares its threads
with plain decoding of the same prefixes; the others compare their texts with the first one's.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch

from benchmarks.gpu.torch_checks import CheckError, Found, Setup, run

_FORK, _TEXT = -1, 300
# A tree whose tokens are forced: forks beside each other and in one another.
_TREE = {
    "": [_TEXT, _FORK, _TEXT + 1, _FORK, *range(_TEXT + 2, _TEXT + 20)],
    "0": [*range(_TEXT + 20, _TEXT + 40), _FORK, *range(_TEXT + 40, _TEXT + 50)],
    "0.0": [*range(_TEXT + 50, _TEXT + 60)],
    "1": [*range(_TEXT + 60, _TEXT + 90)],
}
_READ = [*range(_TEXT, _TEXT + 1), *range(_TEXT + 20, _TEXT + 40), *range(_TEXT + 50, _TEXT + 60),
         *range(_TEXT + 40, _TEXT + 50), _TEXT + 1, *range(_TEXT + 60, _TEXT + 90),
         *range(_TEXT + 2, _TEXT + 20)]  # fmt: skip


def vllm_default(setup: Setup) -> Found:
    """Start an engine as vLLM does by default; its forks equal plain decoding."""
    from tests.integration.plain_decoding import FLOAT_NOISE, mismatches

    found, threads = _answers(setup)
    wrong = [each for each in mismatches(threads) if each.gap > FLOAT_NOISE]
    found["threads"], found["mismatches"] = len(threads), [str(each) for each in wrong]
    found["summary"].append(
        f"{len(threads)} threads against plain decoding in float32: {len(wrong)} tokens differ"
    )
    _first(setup).write_text(json.dumps(found["texts"]), encoding="utf-8")
    if wrong:
        raise CheckError(f"threads differ from plain decoding: {wrong[:3]}")
    return found


def vllm_v1(setup: Setup) -> Found:
    """Run vLLM's V1 model runner, with the other kind of logits processors."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return _compared(setup)


def vllm_sync(setup: Setup) -> Found:
    """Schedule step by step."""
    return _compared(setup, async_scheduling=False)


def vllm_eager(setup: Setup) -> Found:
    """Capture no CUDA graphs."""
    return _compared(setup, enforce_eager=True)


def _first(setup: Setup) -> Any:
    return setup.work / "vllm-texts.json"


def _compared(setup: Setup, **arguments: Any) -> Found:
    found, _ = _answers(setup, **arguments)
    if not _first(setup).exists():
        raise CheckError("vllm_default has no texts to compare with")
    expected = json.loads(_first(setup).read_text(encoding="utf-8"))
    different = sum(a != b for a, b in zip(found["texts"], expected, strict=True))
    found["summary"].append(f"{different} of {len(expected)} texts differ from vllm_default's")
    if different:
        raise CheckError(found["summary"][-1])
    return found


def _answers(setup: Setup, **arguments: Any) -> tuple[Found, Any]:
    """Start an engine, answer chats at once, and replay a tree."""
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.engine.replay import REPLAY, replay_args
    from apar_core.models.apar_tiny import checkpoint_path
    from tests.integration.plain_decoding import chats, generate_threads

    number = 4 if setup.is_tiny else 32
    limits: dict[str, Any] = {"gpu_memory_utilization": 0.3} if setup.has_gpu else {
        "kv_cache_memory_bytes": 1 << 28, "block_size": 32, "enforce_eager": True,
    }  # fmt: skip
    begin_s = time.perf_counter()
    engine = OfflineEngine(
        checkpoint_path(), dtype="float32", max_num_seqs=256, logits_processors=[REPLAY],
        **{**limits, **arguments},
    )  # fmt: skip
    start_s = time.perf_counter() - begin_s
    config = engine.llm.llm_engine.vllm_config
    begin_s = time.perf_counter()
    result = generate_threads(engine, chats(number), 60 if setup.is_tiny else 400)
    seconds = time.perf_counter() - begin_s
    control = engine.control_tokens
    assert control is not None
    end_id = engine.tokenizer.eos_token_id
    scripts = {
        key: [*(control.fork_id if token == _FORK else token for token in tokens), end_id]
        for key, tokens in _TREE.items()
    }
    sampling = {"max_tokens": 400, "extra_args": replay_args(scripts)}
    [replayed] = engine.generate([{"prompt_token_ids": [_TEXT] * 40}], sampling)
    graphs = config.compilation_config.max_cudagraph_capture_size
    found: Found = {
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "scheduler": type(engine.scheduler).__name__,
        "logits_processors": [str(each) for each in config.model_config.logits_processors or ()],
        "largest_graph": graphs,
        "start_s": start_s,
        "answers_s": seconds,
        "forks": engine.scheduler.admission.counters.accepted,
        "texts": [[list(each.prefix), list(each.generated)] for each in result.threads],
    }
    if setup.has_gpu:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    found["summary"] = [
        f"{found['model_runner']} model runner, {found['scheduler']}, CUDA graphs up to {graphs}: "
        f"started in {start_s:.1f} s, {number} answers in {seconds:.1f} s, {found['forks']} forks"
        + (f", peak {found['peak_gib']:.2f} GiB" if setup.has_gpu else "")
    ]
    answer = list(replayed.token_ids)
    engine.shutdown()
    if found["forks"] == 0:
        raise CheckError("no answer forked")
    if [token for token in answer if token != end_id] != _READ:
        raise CheckError(f"the replay gave {answer}, not {_READ}")
    return found, result.threads


if __name__ == "__main__":
    run((vllm_default, vllm_v1, vllm_sync, vllm_eager))
