"""The same load from three clients: ours, vLLM's and guidellm."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deployments.config.model import PRESETS
from tests.fakes.apar_command import APAR

GUIDELLM = "APAR_GUIDELLM"
"""Environment variable: a folder to import guidellm from, or none."""

_TIMEOUT_S = 300.0
_VLLM = """
import asyncio, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Load:
    """Prompts of a file with a fixed concurrency; every answer has exactly `num_tokens`."""

    url: str
    model: str
    prompts: tuple[str, ...]
    num_tokens: int
    concurrency: int


@dataclass(frozen=True)
class Seen:
    """A client's measurements; milliseconds are means over requests."""

    requests: int
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float


def by_apar(load: Load, folder: Path) -> Seen:
    """`apar loadtest`."""
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{prompt}\n" for prompt in load.prompts))
    out = folder / "apar"
    _run(
        [*APAR, "loadtest", "run",
         "--target", load.url, "--model-name", load.model,
         "--prompts", str(prompts), "--concurrency", str(load.concurrency),
         "--max-tokens", str(load.num_tokens), "--ignore-eos", "--warm-up", "1",
         "--out", str(out)],
    )  # fmt: skip
    figures = json.loads((out / "report.json").read_text())["figures"]
    whole = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    return Seen(
        requests=sum("error" not in line for line in whole),
        tokens_per_s=figures["tokens_per_s"]["value"],
        ttft_ms=figures["ttft.mean"]["value"],
        tpot_ms=figures["tpot.mean"]["value"],
        e2e_ms=figures["e2e.mean"]["value"],
    )


def by_vllm(load: Load, folder: Path) -> Seen:
    """`vllm bench serve`, as a module: the CPU wheel has no `vllm` script."""
    # The one kind of file with prompts of one's own that needs no pandas.
    dataset = folder / "prompts.json"
    turns = [{"value": "an answer of no importance"}]
    dataset.write_text(
        json.dumps([{"conversations": [{"value": prompt}, *turns]} for prompt in load.prompts])
    )
    _run(
        [sys.executable, "-c", _VLLM, "--backend", "openai-chat", "--base-url", load.url,
         "--endpoint", "/v1/chat/completions", "--model", load.model,
         "--tokenizer", PRESETS["apar-tiny"].path, "--dataset-name", "sharegpt",
         "--dataset-path", str(dataset), "--disable-shuffle", "--sharegpt-output-len",
         str(load.num_tokens), "--num-prompts", str(len(load.prompts)), "--max-concurrency",
         str(load.concurrency), "--ignore-eos", "--temperature", "0", "--num-warmups", "1",
         "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm", "--save-result",
         "--result-dir", str(folder), "--result-filename", "vllm.json"],
    )  # fmt: skip
    result = json.loads((folder / "vllm.json").read_text())
    return Seen(
        requests=result["completed"],
        tokens_per_s=result["output_throughput"],
        ttft_ms=result["mean_ttft_ms"],
        tpot_ms=result["mean_tpot_ms"],
        e2e_ms=result["mean_e2el_ms"],
    )


def by_guidellm(load: Load, folder: Path) -> Seen:
    """guidellm, from the folder that APAR_GUIDELLM names: no part of this project's environment.

    Its own throughput weighs seconds, not tokens; here it is worked out from its requests.
    """
    rows = [{"prompt": prompt, "output_tokens_count": load.num_tokens} for prompt in load.prompts]
    data, result = folder / "guidellm-prompts.jsonl", folder / "guidellm.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    backend = {
        "kind": "openai_http",
        "target": load.url,
        "model": load.model,
        "request_format": "/v1/chat/completions",
        "validate_backend": False,
        "extras": {"body": {"temperature": 0}},
    }
    _run(
        [sys.executable, "-m", "guidellm", "run", "--backend", json.dumps(backend),
         "--profile", f"kind=concurrent,streams={load.concurrency}",
         "--constraint", f"kind=max_requests,count={len(load.prompts)}",
         "--data", f"kind=json_file,path={data}",
         "--tokenizer", f"kind=huggingface_auto,model={PRESETS['apar-tiny'].path}",
         "--output", f"kind=json,path={result}", "--disable-console"],
        PYTHONPATH=os.environ[GUIDELLM],
        # It starts a process for every core and more, which here the server needs.
        GUIDELLM__MAX_WORKER_PROCESSES="1",
    )  # fmt: skip
    (benchmark,) = json.loads(result.read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]
    begun = min(each["request_start_time"] for each in requests)
    ended = max(each["request_end_time"] for each in requests)

    def mean(field: str) -> float:
        return statistics.fmean(each[field] for each in requests)

    return Seen(
        requests=len(requests),
        tokens_per_s=sum(each["output_tokens"] for each in requests) / (ended - begun),
        ttft_ms=mean("time_to_first_token_ms"),
        tpot_ms=mean("inter_token_latency_ms"),
        e2e_ms=1000 * mean("request_latency"),
    )


Client = Callable[[Load, Path], Seen]


def _run(command: list[str], **more: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | more
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
