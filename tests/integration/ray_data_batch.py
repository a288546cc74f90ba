"""Answer questions with Ray Data over several replicas, as the guide does, and write each row.

Run as a program, because Ray Data's process is the one that a test looks at:

    python -m tests.integration.ray_data_batch --rows 1000 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from apar_core.engine.answer_tree import row_trees
from apar_core.engine.async_engine import SCHEDULER_CLS
from apar_core.models.apar_tiny import checkpoint_path

REPLICAS = 2
BATCH_ROWS = 8
NUM_QUESTIONS = 3


def question(row: dict[str, Any]) -> dict[str, Any]:
    """Ask for lists, so that most answers fork."""
    content = f"Give me {3 + row['id'] % NUM_QUESTIONS} tips for learning guitar."
    return {
        "messages": [{"role": "user", "content": content}],
        "sampling_params": {
            "temperature": 0.0,
            "max_tokens": 400,
            "logprobs": 0,
            "extra_args": {"apar_tree": True},
        },
    }


def answer(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a finished row."""
    [tree] = row_trees(row)
    return {"id": row["id"], "text": row["generated_text"], "tree": tree.to_plain()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    config = vLLMEngineProcessorConfig(
        model_source=str(checkpoint_path()),
        engine_kwargs={
            "scheduler_cls": SCHEDULER_CLS,
            "enable_prefix_caching": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 768,
            "max_num_seqs": 64,
            "kv_cache_memory_bytes": 256 << 20,
        },
        concurrency=(REPLICAS, REPLICAS),
        batch_size=BATCH_ROWS,
        # So that both replicas have work from the start to the end.
        max_concurrent_batches=2,
        tokenize_stage=False,
        detokenize_stage=False,
        placement_group_config={"bundles": [{"CPU": 1}]},
        log_engine_metrics=False,
    )
    processor = build_processor(config, preprocess=question, postprocess=answer)
    rows = ray.data.from_items([{"id": index} for index in range(arguments.rows)])
    with arguments.out.open("w") as file:
        for row in processor(rows).iter_rows():
            file.write(json.dumps(row, default=lambda value: value.tolist()) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
