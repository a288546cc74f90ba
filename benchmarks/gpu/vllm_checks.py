"""GPU checks of vLLM with forks: its kernels, engines, texts and speed. See `check.py`.

Texts: the first engine's threads are compared with plain decoding of the same prefixes, those of
other engines with the first one's. Speed: engines with the dimensions of a 7B model and random
weights replay recorded answers, forked and sequentially.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.torch_checks import CheckError, Found, Setup, own_answers, run

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine
    from cluster.lab.experiments.settings import ValidationSettings

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
# Twice the rounding of bf16.
_KERNEL_ERROR = 1e-2
# Graphs without torch.compile; vLLM's default has both.
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
_CPU = {"kv_cache_memory_bytes": 1 << 28, "block_size": 32, "enforce_eager": True}
_ENGINE_LIMIT_S = 180
# Every family counts, also in small batches.
_FAMILY: dict[str, Any] = {
    "additional_config": {
        "apar": {"attention": "family", "family": {"min_prefix_blocks": 1, "min_saved_blocks": 0}}
    }
}
# As in production: only what saves enough.
_FAMILY_DEFAULT: dict[str, Any] = {"additional_config": {"apar": {"attention": "family"}}}
_AGAIN = "again"
_FLOAT_GAPS = (1e-4, 0.1, 0.5)


def kernels(setup: Setup) -> Found:
    """Compare vLLM's compiled kernels with torch. A CPU lacks most of them."""
    torch.manual_seed(0)
    errors: dict[str, float] = {}
    absent: dict[str, str] = {}
    for name, check in kernel_checks(setup.device).items():
        try:
            found, expected = check()
        # What a CPU build lacks: the function, its module, or its implementation.
        except (AttributeError, ImportError, NotImplementedError) as error:
            if setup.has_gpu:
                raise CheckError(f"{name}: {error}") from error
            absent[name] = f"{type(error).__name__}: {error}".partition(". ")[0][:100]
        except RuntimeError as error:
            # Such as "no kernel image": the library lacks the kernel for this GPU.
            print(f"{name}: {error}", flush=True)
            errors[name] = float("inf")
        else:
            difference = (found.double() - expected).norm() / expected.norm()
            errors[name] = float(difference.nan_to_num(nan=float("inf")))
    wrong = [f"{name} {error:.1e}" for name, error in errors.items() if error > _KERNEL_ERROR]
    flash = [name for name in wrong if name.startswith("FlashAttention")]
    found_data: Found = {
        "errors": errors, "absent": absent, "flash_is_right": not flash,
        "summary": [
            f"{len(errors)} kernels, largest relative error {max(errors.values(), default=0):.1e} "
            f"(at most {_KERNEL_ERROR:.0e})",
            *(f"not on this device: {name}: {reason}" for name, reason in absent.items()),
        ],
    }  # fmt: skip
    setup.keep(found_data)
    # Without FlashAttention, engines go on with Triton's attention.
    if wrong != flash:
        raise CheckError(f"wrong: {', '.join(wrong)}")
    return found_data


def kernel_checks(device: str) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Return functions that give what a kernel of vLLM computes, and what torch does in float64."""
    from vllm import _custom_ops as ops

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def rms_norm() -> tuple[Tensor, Tensor]:
        states, weight = draw(64, 4096), draw(4096)
        found = torch.full_like(states, float("nan"))
        ops.rms_norm(found, states, weight, 1e-6)
        return found, functional.rms_norm(states.double(), (4096,), weight.double(), 1e-6)

    def silu_and_mul() -> tuple[Tensor, Tensor]:
        states = draw(64, 2 * 11008)
        found = torch.full_like(states[:, :11008], float("nan"))
        torch.ops._C.silu_and_mul(found, states)
        gate, up = states.double().chunk(2, -1)
        return found, functional.silu(gate) * up

    def reshape_and_cache() -> tuple[Tensor, Tensor]:
        keys, values = draw(40, 32, 128), draw(40, 32, 128)
        cache = torch.zeros((8, 16, 32, 256), device=device, dtype=torch.bfloat16)
        slots = torch.randperm(8 * 16, device=device)[:40]
        one = torch.ones((), device=device)
        key_cache, value_cache = cache.split(128, dim=-1)
        ops.reshape_and_cache_flash(keys, values, key_cache, value_cache, slots, "auto", one, one)
        return cache.flatten(0, 1)[slots], torch.cat([keys, values], -1).double()

    def merge_attn_states() -> tuple[Tensor, Tensor]:
        first, second = draw(40, 32, 128), draw(40, 32, 128)
        sums = [torch.randn((32, 40), device=device) for _ in range(2)]
        found = torch.full_like(first, float("nan"))
        ops.merge_attn_states(found, first, sums[0], second, sums[1])
        share = torch.stack(sums).double().softmax(0).transpose(1, 2)[..., None]
        return found, share[0] * first.double() + share[1] * second.double()

    def attention(queries: int, head_size: int, heads: int = 32) -> tuple[Tensor, Tensor]:
        """FlashAttention over a paged cache, for decoding (1 query a row) or prefill."""
        attend = flash_attention()
        rows, blocks, size = 5, 20, 16
        cache = draw(rows * blocks, size, heads, 2 * head_size)
        keys, values = cache.split(head_size, dim=-1)
        table = torch.randperm(rows * blocks, device=device).to(torch.int32).view(rows, blocks)
        lengths = torch.tensor([300, 33, 320, 160, 97], device=device, dtype=torch.int32)
        query = draw(rows * queries, heads, head_size)
        starts = torch.arange(rows + 1, device=device, dtype=torch.int32) * queries
        found, _ = attend(
            q=query, k=keys, v=values, out=torch.full_like(query, float("nan")),
            cu_seqlens_q=starts, max_seqlen_q=queries, seqused_k=lengths, max_seqlen_k=320,
            block_table=table, causal=True, softmax_scale=head_size**-0.5,
            return_softmax_lse=True, fa_version=flash_attention_version(head_size),
        )  # fmt: skip
        expected = []
        for row, length in enumerate(lengths.tolist()):
            own = [part[table[row].long()].flatten(0, 1)[:length] for part in (keys, values)]
            asked = query[row * queries : (row + 1) * queries]
            mask = torch.ones((queries, length), device=device, dtype=torch.bool)
            row_query, row_keys, row_values = (
                part.double().transpose(0, 1) for part in (asked, *own)
            )
            attended = functional.scaled_dot_product_attention(
                row_query, row_keys, row_values, attn_mask=mask.tril(length - queries)
            )
            expected.append(attended.transpose(0, 1))
        return found, torch.cat(expected)

    return {
        "rms_norm": rms_norm,
        "silu_and_mul": silu_and_mul,
        "reshape_and_cache_flash": reshape_and_cache,
        "merge_attn_states": merge_attn_states,
        **{
            f"FlashAttention, {queries} queries, heads of {size}": partial(attention, queries, size)
            for queries in (1, 7, 33)
            for size in (64, 128)
        },
    }


def flash_attention() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return vLLM's FlashAttention for paged sequences."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    function: Callable[..., tuple[Tensor, Tensor]] = flash_attn_varlen_func
    return function


def flash_attention_version(head_size: int = 128) -> int:
    """Return the version of FlashAttention that vLLM chooses on this GPU, 3 where it has none."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return get_flash_attn_version(head_size=head_size) or 3


def engine(setup: Setup) -> Found:
    """Find arguments with which an engine starts, from vLLM's default to ever simpler ones.

    Each has a process of its own. What it compiles is kept for the engines of later checks.
    """
    checkpoint(setup)
    tried: dict[str, str] = {}
    for arguments in _engines(setup):
        text = json.dumps(arguments)
        command = [sys.executable, "-m", "benchmarks.gpu.vllm_checks", "started_engine",
                   *setup.as_options(setup.work / "started_engine.json"),
                   "--engine", text]  # fmt: skip
        try:
            done = subprocess.run(command, timeout=_ENGINE_LIMIT_S, capture_output=True, text=True)
            output, is_right = done.stdout + done.stderr, done.returncode == 0
        except subprocess.TimeoutExpired:
            output, is_right = f"no end after {_ENGINE_LIMIT_S} s", False
        print(text, output[-20_000:], sep="\n", flush=True)
        if is_right:
            path = setup.work / "started_engine.json"
            found: Found = json.loads(path.read_text(encoding="utf-8"))
            found["arguments"], found["refused"] = arguments, tried
            found["summary"].insert(0, f"arguments {text}; refused before: {tried or 'none'}")
            return found
        lines = [line for line in output.splitlines() if line.strip()]
        # vLLM's own errors come before those that follow from them.
        errors = [line for line in lines if "Error" in line]
        tried[text] = (errors or lines or ["no output"])[0][-300:]
        setup.keep({"refused": tried, "summary": [f"refused: {tried}"]})
    raise CheckError(f"no engine starts: {tried}")


def _engines(setup: Setup) -> tuple[dict[str, Any], ...]:
    if not setup.has_gpu:
        return ({"enforce_eager": True, "block_size": 32},)
    flash, triton = {"attention_backend": "FLASH_ATTN"}, {"attention_backend": "TRITON_ATTN"}
    engines: tuple[dict[str, Any], ...] = (
        flash, triton, {**flash, "compilation_config": _GRAPHS},
        {**triton, "compilation_config": _GRAPHS}, {**triton, "enforce_eager": True},
    )  # fmt: skip
    if not setup.results.get("kernels", {}).get("flash_is_right", True):
        engines = tuple(each for each in engines if not flash.items() <= each.items())
    return engines


def started_engine(setup: Setup) -> Found:
    """Start one engine, and let it generate given tokens with forks; a process of `engine`."""
    from cluster.lab.experiments.calibrate import calibrated_engine
    from cluster.lab.experiments.validate import engine_limits

    number = 4 if setup.is_tiny else 64
    begin_s = time.monotonic()
    # The arguments of `replay`, whose engine then finds what is compiled here.
    settings = replay_settings(setup, setup.engine)
    engine = calibrated_engine(
        settings.model, settings.engine, kv_tokens=8192, **engine_limits(settings)
    )
    started_s = time.monotonic() - begin_s
    control, end = engine.control_tokens, engine.tokenizer.eos_token_id
    assert control is not None
    sampling = _scripted_sampling(engine)
    prompts = [{"prompt_token_ids": [500 + index] * 60} for index in range(number)]
    engine.generate(prompts, sampling)
    begin_s = time.monotonic()
    answers = engine.generate(prompts, sampling)
    seconds = time.monotonic() - begin_s
    wrong = sum([t for t in each.token_ids if t != end] != _READ for each in answers)
    config = engine.llm.llm_engine.vllm_config
    found: Found = {
        "start_s": started_s,
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "graphs": str(config.compilation_config.cudagraph_mode),
        "blocks": config.cache_config.num_gpu_blocks,
    }
    found["summary"] = [
        f"started in {started_s:.0f} s, {number} answers in {seconds:.2f} s, {wrong} wrong; "
        f"{found['model_runner']} runner, async {found['async_scheduling']}, {found['graphs']}, "
        f"{found['blocks']} KV blocks"
    ]
    engine.shutdown()
    if wrong:
        raise CheckError(found["summary"][0])
    return found


def checkpoint(setup: Setup) -> Path:
    """Return the folder of a checkpoint with the wanted dimensions and no weights."""
    # Relative to the root of the repository, so that its name is the same on every machine.
    folder = Path(os.path.relpath(setup.work / "model"))
    if not (folder / "config.json").exists():
        packed = os.environ.get("APAR_CHECK_MODEL")
        if packed:
            shutil.copytree(packed, folder, dirs_exist_ok=True)
        else:
            from cluster.lab.experiments.random_model import write_random_model

            write_random_model("apar-tiny" if setup.is_tiny else setup.dimensions, folder)
    return folder


def replay_settings(setup: Setup, engine: Mapping[str, Any]) -> ValidationSettings:
    """Return the runs of `replay`: the paper's cap of 350 requests, at two sizes of the KV cache.

    engine: arguments that `engine` has found.
    """
    from cluster.lab.experiments.settings import ValidationSettings

    own: dict[str, Any] = {"answers": 600, "max_tokens": 2048, "limits": (350,)}
    if setup.is_tiny:
        own = {"answers": 6, "max_tokens": 300, "limits": (4,)}
    return ValidationSettings(
        model=str(checkpoint(setup)),
        trace=setup.answers or own_answers(setup.work / "answers.jsonl"),
        kv_shares=(0.9, 0.3) if not setup.is_tiny else (0.9, 0.8),
        repeats=1,
        engine={"load_format": "dummy", **engine},
        **own,
    )


def replay(setup: Setup) -> Found:
    """Measure runs and a grid of steps in one engine; what is measured is kept, run by run."""
    from cluster.lab.experiments.settings import machine_name
    from cluster.lab.experiments.validate import measure_runs, run_name, run_points

    settings = replay_settings(setup, setup.results["engine"]["arguments"])
    store = measure_runs(settings, setup.work / "replay", _printed)
    runs = {point.name: store.find(run_name(0, point)) for point in run_points(settings)}
    found: Found = {
        "settings": settings.model_dump(mode="json"),
        "machine": machine_name(),
        "engine": store.find("engine"),
        "runs": {name: _without_samples(run) for name, run in runs.items()},
        "parts": (setup.work / "replay" / "parts.jsonl").read_text(encoding="utf-8"),
    }
    found["summary"] = [_line(name, each) for name, each in found["runs"].items()]
    return found


def _without_samples(run: Mapping[str, Any]) -> Found:
    return {name: value for name, value in run.items() if name != "samples"}


def _line(name: str, run: Mapping[str, Any]) -> str:
    rate = run["text_tokens"] / run["duration_s"]
    return f"{name}: {run['duration_s']:.1f} s, {rate:.0f} tokens/s, {run['steps']} steps"


def _printed(stage: str, total: int) -> Callable[[], None]:
    """Print the progress of a stage to the check's log."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        print(f"{stage}: {done} of {total}, {time.monotonic():.0f} s", flush=True)

    return count


def families(setup: Setup) -> Found:
    """Do the runs of `replay` with family attention, and compare."""
    return _replayed(setup, _FAMILY_DEFAULT if setup.has_gpu else _FAMILY)


def triton(setup: Setup) -> Found:
    """Do one forked run of `replay` with vLLM's Triton attention; a CPU has one backend only."""
    arguments = {"attention_backend": "TRITON_ATTN"} if setup.has_gpu else {}
    return _replayed(setup, arguments, has_one_run=True)


def triton_families(setup: Setup) -> Found:
    """Do the runs of `replay` with our Triton kernel."""
    backend = {"attention_backend": "TRITON_ATTN", **_FAMILY_DEFAULT}
    return _replayed(setup, backend if setup.has_gpu else _FAMILY)


def _replayed(setup: Setup, arguments: Mapping[str, Any], *, has_one_run: bool = False) -> Found:
    """Do runs of `replay` in an engine with other arguments and as many KV blocks."""
    from apar_core.offline.evaluation.replay_text import load_text
    from cluster.lab.experiments.calibrate import calibrated_engine
    from cluster.lab.experiments.engine import ExperimentEngine, hidden_ids
    from cluster.lab.experiments.validate import (
        RunPoint,
        engine_limits,
        load_answers,
        replay,
        run_points,
    )

    base = setup.results["replay"]
    settings = replay_settings(setup, setup.results["engine"]["arguments"])
    blocks = base["engine"]["kv_tokens"] // base["engine"]["block_size"] + 1
    engine = calibrated_engine(
        settings.model,
        {**settings.engine, "num_gpu_blocks_override": blocks, **arguments},
        kv_tokens=base["engine"]["kv_tokens"],
        **engine_limits(settings),
    )
    experiment = ExperimentEngine(engine, hidden_ids(engine, settings.model))
    answers = load_answers(settings, load_text(settings.tokenizer))
    replay(experiment, answers[:4], settings, RunPoint("eager", 4, 1.0))
    # Runs that a call could finish before it was cut off.
    kept = setup.data.with_suffix(".runs.json")
    runs: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    points = list(run_points(settings))
    if has_one_run:
        points = [point for point in points if point.method == "eager"][:1]
    # The first run once more, for the spread of the times.
    for name, point in [*((point.name, point) for point in points), (_AGAIN, points[0])]:
        if name not in runs:
            timed = replay(experiment, answers, settings, point)
            runs[name] = {"duration_s": timed.duration_s, "steps": timed.steps,
                          "text_tokens": timed.text_tokens}  # fmt: skip
            kept.write_text(json.dumps(runs), encoding="utf-8")
        print(_line(name, runs[name]), flush=True)
    found: Found = {"engine": dict(arguments), "runs": runs, "speed_ups": {}, "summary": []}
    for point in points:
        own, before = runs[point.name], base["runs"][point.name]
        ratio = before["duration_s"] / own["duration_s"]
        found["speed_ups"][point.name] = ratio
        found["summary"].append(f"{_line(point.name, own)}; {ratio:.3f} times as fast as `replay`")
        if own["text_tokens"] != before["text_tokens"]:
            raise CheckError(f"{point.name}: {own['text_tokens']} tokens, not those of `replay`")
    spread = runs[_AGAIN]["duration_s"] / runs[points[0].name]["duration_s"] - 1
    found["spread"] = abs(spread)
    found["summary"].append(f"{points[0].name} once more: {spread:+.1%} in time")
    if "additional_config" in arguments:
        [found["families"]] = engine.llm.collective_rpc("family_counts")
        found["summary"].append(f"families: {found['families']}")
        if not found["families"]["shared_rows"]:
            raise CheckError(f"no row was read in a family: {found['families']}")
    engine.shutdown()
    return found


def predictions(setup: Setup) -> Found:
    """Predict the runs of `replay` in virtual time, and report the errors. Needs no GPU."""
    from cluster.lab.experiments.settings import ValidationSettings
    from cluster.lab.experiments.validate import validate

    base = setup.results["replay"]
    folder = setup.work / "replay"
    folder.mkdir(exist_ok=True)
    parts = folder / "parts.jsonl"
    if not parts.exists():
        parts.write_text(base["parts"], encoding="utf-8")
    # The report may be from another machine, with other paths.
    places = {
        "model": str(checkpoint(setup)),
        "trace": setup.answers or own_answers(setup.work / "answers.jsonl"),
    }
    settings = ValidationSettings.model_validate({**base["settings"], **places})
    report = validate(settings, folder, _printed, base["machine"])
    tables = [
        {"name": table.name, "columns": [each.title for each in table.columns],
         "rows": [list(row) for row in table.rows]}
        for table in report.tables
    ]  # fmt: skip
    summary = [f"{name}: {value}" for name, value in report.facts.items()]
    for table in tables:
        summary += [
            f"{row[0]}: "
            + ", ".join(
                f"{title} {value:.4g}"
                for title, value in zip(table["columns"][1:], row[1:], strict=True)
                if isinstance(value, int | float)
            )
            for row in table["rows"]
        ]
    costs = (folder / "step-costs.json").read_text(encoding="utf-8")
    return {"facts": dict(report.facts), "tables": tables, "step_costs": costs, "summary": summary}


def vllm_default(setup: Setup) -> Found:
    """Start an engine as vLLM does by default; its forks equal plain decoding."""
    from tests.integration.plain_decoding import FLOAT_NOISE, mismatches

    with _embedded_engine(setup, dtype="float32") as engine:
        found, threads = _answers(setup, engine)
    wrong = [each for each in mismatches(threads) if each.gap > FLOAT_NOISE]
    found["threads"], found["mismatches"] = len(threads), [str(each) for each in wrong]
    found["summary"].append(
        f"{len(threads)} threads against plain decoding in float32: {len(wrong)} tokens differ"
    )
    if wrong:
        setup.keep(found)
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


def _compared(setup: Setup, **arguments: Any) -> Found:
    with _embedded_engine(setup, dtype="float32", **arguments) as engine:
        found, _ = _answers(setup, engine)
    expected = setup.results["vllm_default"]["texts"]
    different = sum(a != b for a, b in zip(found["texts"], expected, strict=True))
    found["summary"].append(f"{different} of {len(expected)} texts differ from vllm_default's")
    if different:
        setup.keep(found)
        raise CheckError(found["summary"][-1])
    return found


def families_f32(setup: Setup) -> Found:
    """Read families in float32: every token is the one that plain decoding chooses."""
    backend = {"attention_backend": "TRITON_ATTN"} if setup.has_gpu else {}
    found = _gaps(setup, dtype="float32", **backend, **_FAMILY)
    if found["largest"] > _FLOAT_GAPS[0]:
        setup.keep(found)
        raise CheckError(found["summary"][0])
    return found


def bf16(setup: Setup) -> Found:
    """Compare bf16, as users have it, with plain decoding in float32, without and with families.

    Rounding changes tokens. Family attention may not change them further than that: it must choose
    no token that is less likely than the worst one without it, but for twice the gap.
    """
    # vLLM's CPU kernels for bf16 read families only on some processors.
    dtype = "bfloat16" if setup.has_gpu else "float32"
    plain = _gaps(setup, dtype=dtype)
    family = _gaps(setup, dtype=dtype, **_FAMILY)
    bound = max(2 * plain["largest"], _FLOAT_GAPS[1])
    found: Found = {"plain": plain, "families": family, "bound": bound}
    found["summary"] = [*plain["summary"], *family["summary"]]
    if family["largest"] > bound:
        setup.keep(found)
        raise CheckError(f"a token is {family['largest']:.2f} less likely, at most {bound:.2f}")
    return found


def _gaps(setup: Setup, **arguments: Any) -> Found:
    """Answer chats, and return how much less likely their tokens are than plain decoding's."""
    from tests.integration.plain_decoding import chats, generate_threads, mismatches

    number = 4 if setup.is_tiny else 32
    counts = None
    with _embedded_engine(setup, **arguments) as engine:
        threads = generate_threads(engine, chats(number), 60 if setup.is_tiny else 400).threads
        if "additional_config" in arguments:
            [counts] = engine.llm.collective_rpc("family_counts")
    gaps = [each.gap for each in mismatches(threads)]
    found: Found = {
        "threads": len(threads),
        "tokens": sum(len(each.generated) for each in threads),
        "families": counts,
        "differ": {str(least): sum(gap > least for gap in gaps) for least in _FLOAT_GAPS},
        "largest": max(gaps, default=0.0),
    }
    named = {name: value for name, value in arguments.items() if name != "additional_config"}
    found["summary"] = [
        f"{named}{' with families' if counts else ''}: {found['tokens']} tokens of "
        f"{found['threads']} threads, less likely than plain decoding's by {_FLOAT_GAPS}: "
        f"{[*found['differ'].values()]}, largest {found['largest']:.2g}; {counts or ''}"
    ]
    if counts is not None and not counts["shared_rows"]:
        raise CheckError(f"no row was read in a family: {counts}")
    return found


@contextmanager
def _embedded_engine(setup: Setup, **arguments: Any) -> Iterator[OfflineEngine]:
    """Start an engine of the embedded model as vLLM does by default."""
    from apar_core.engine.offline_engine import OfflineEngine
    from apar_core.engine.replay import REPLAY
    from apar_core.models.apar_tiny import checkpoint_path

    limits: dict[str, Any] = {"gpu_memory_utilization": 0.3} if setup.has_gpu else _CPU
    engine = OfflineEngine(
        checkpoint_path(), max_num_seqs=256, logits_processors=[REPLAY], **{**limits, **arguments}
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def _answers(setup: Setup, engine: OfflineEngine) -> tuple[Found, Any]:
    """Answer chats at once, and replay a tree."""
    from tests.integration.plain_decoding import chats, generate_threads

    number = 4 if setup.is_tiny else 32
    config = engine.llm.llm_engine.vllm_config
    begin_s = time.perf_counter()
    result = generate_threads(engine, chats(number), 60 if setup.is_tiny else 400)
    seconds = time.perf_counter() - begin_s
    [replayed] = engine.generate([{"prompt_token_ids": [_TEXT] * 40}], _scripted_sampling(engine))
    graphs = config.compilation_config.max_cudagraph_capture_size
    found: Found = {
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "scheduler": type(engine.scheduler).__name__,
        "logits_processors": [str(each) for each in config.model_config.logits_processors or ()],
        "largest_graph": graphs,
        "answers_s": seconds,
        "forks": engine.scheduler.admission.counters.accepted,
        "texts": [f"{_ids(each.prefix)} | {_ids(each.generated)}" for each in result.threads],
    }
    if setup.has_gpu:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    found["summary"] = [
        f"{found['model_runner']} model runner, {found['scheduler']}, CUDA graphs up to {graphs}: "
        f"{number} answers in {seconds:.1f} s, {found['forks']} forks"
        + (f", peak {found['peak_gib']:.2f} GiB" if setup.has_gpu else "")
    ]
    end_id = engine.tokenizer.eos_token_id
    answer = [token for token in replayed.token_ids if token != end_id]
    if found["forks"] == 0:
        raise CheckError("no answer forked")
    if answer != _READ:
        raise CheckError(f"the replay gave {answer}, not {_READ}")
    return found, result.threads


def _ids(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def _scripted_sampling(engine: OfflineEngine) -> dict[str, Any]:
    """Return sampling that forces the tokens of a tree."""
    from apar_core.engine.replay import replay_args

    control, end_id = engine.control_tokens, engine.tokenizer.eos_token_id
    assert control is not None
    scripts = {
        key: [*(control.fork_id if token == _FORK else token for token in tokens), end_id]
        for key, tokens in _TREE.items()
    }
    return {"max_tokens": 400, "extra_args": replay_args(scripts)}


if __name__ == "__main__":
    run((
        kernels, engine, started_engine, replay, families, triton, triton_families, predictions,
        vllm_default, vllm_v1, vllm_sync, vllm_eager, families_f32, bf16,
    ))  # fmt: skip
