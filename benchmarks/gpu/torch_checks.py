"""GPU checks that need torch and transformers, but not vLLM: see `check.py`.

Each function returns what it found, with a `summary` of lines for the report, or raises.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

Found = dict[str, Any]
DECODER_TEXTS = Path(__file__).with_name("decoder_texts.json")
"""Token ids that two decoders give on a CPU: one thread, and forks."""
_DECODED_PROMPTS = 2
# Checks of results that a GPU gave.
_WITHOUT_GPU = ("predictions",)


class CheckError(Exception):
    """A result that is not as it must be."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Device and size of a check.

    work: folder for files that a later call on this machine may use. data: file of the result.
    results: data of the checks that have passed, by name. answers: trace to replay, if any.
    dimensions: model whose dimensions random weights get. engine: vLLM's arguments, for a check
    that runs in a process of another one.
    """

    device: str
    is_tiny: bool
    work: Path
    data: Path
    limit_s: float
    results: Mapping[str, Found]
    answers: Path | None = None
    dimensions: str = "apar-7b"
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """Whether the check runs on a GPU."""
        return self.device == "cuda"

    def keep(self, found: Found) -> None:
        """Write what is known so far, which stays if the check fails or is ended."""
        self.data.write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")

    def as_options(self, data: Path) -> list[str]:
        """Return the command line of a check in another process, with a result of its own."""
        return ["--device", self.device, "--size", "tiny" if self.is_tiny else "full",
                "--data", str(data), "--work", str(self.work), "--limit", str(self.limit_s),
                "--dimensions", self.dimensions]  # fmt: skip


def machine(setup: Setup) -> Found:
    """Report versions, and the rates that the step costs assume."""
    import transformers

    found: Found = {"torch": torch.__version__, "transformers": transformers.__version__}
    device = torch.device(setup.device)
    if setup.has_gpu:
        facts = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": facts.name,
            "memory_gib": facts.total_memory / 2**30,
            "capability": f"{facts.major}.{facts.minor}",
            "cuda": torch.version.cuda,
        }
    size = 256 if setup.is_tiny else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = _median_s(lambda: left @ right, setup)
    found["matrix_tflops"] = 2 * size**3 / seconds / 1e12
    source = torch.ones((1 << 20) if setup.is_tiny else (1 << 30), device=device)
    target = torch.empty_like(source)
    seconds = _median_s(lambda: target.copy_(source), setup)
    found["copy_tb_per_s"] = 2 * source.nbytes / seconds / 1e12
    found["summary"] = [
        f"{found.get('gpu', 'CPU')}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}",
        f"bf16 matrix product {found['matrix_tflops']:.1f} TFLOP/s, copy "
        f"{found['copy_tb_per_s']:.3f} TB/s",
    ]
    return found


def step_times(setup: Setup) -> Found:
    """Measure steps of a 7B model on a grid, and compare them with the tables."""
    from apar_core.errors import AparError
    from apar_core.step_costs.gpus import find_gpu

    out = setup.work / "step-times.json"
    command = [sys.executable, "-m", "benchmarks.gpu.step_times", "--out", str(out)]
    name = torch.cuda.get_device_name(0) if setup.has_gpu else "a100-80gb"
    with contextlib.suppress(AparError):
        command += ["--gpu", find_gpu(name).name]
    if setup.is_tiny:
        command += ["--model", _tiny_checkpoint(), "--rows", "1,4", "--contexts", "16",
                    "--prefill", "8", "--repeats", "2"]  # fmt: skip
    else:
        command += ["--rows", "1,16,64,128,192,256,384,512", "--repeats", "10"]
    subprocess.run(command, check=True)
    found: Found = json.loads(out.read_text(encoding="utf-8"))
    summary = [f"{len(found['steps'])} points, {found['model']}"]
    if not setup.is_tiny:
        ratios = [
            predicted["predicted_step_ms"] / step["step_ms"]
            for step, predicted in zip(found["steps"], found.get("predicted", ()), strict=False)
        ]
        if ratios:
            ratios.sort()
            summary.append(
                f"predicted over measured: median {ratios[len(ratios) // 2]:.2f}, from "
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}, against {found['compared_with']}"
            )
    return {**found, "summary": summary}


def decoders(setup: Setup) -> Found:
    """Compare the texts of all decoders in float32 with those that a CPU gave."""
    from transformers import PreTrainedTokenizerFast

    from apar_core.models.guesses import SHIPPED_HEADS, SHIPPED_PROMPTS
    from apar_core.offline.data.tiny_corpus.generator import Corpus
    from apar_core.offline.decoders.interface import DecodeLimits, decode_answer
    from apar_core.offline.decoders.load import DECODER_NAMES, SINGLE_THREAD, load_decoder
    from apar_core.offline.training.example_encoder import prompt_token_ids

    folder = _tiny_checkpoint()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    examples = Corpus(0, held_out=True).examples(_DECODED_PROMPTS)
    prompts = [prompt_token_ids(example, tokenizer) for example in examples]
    # Whole answers: where a limit cuts them depends on the tokens of a step.
    limits = DecodeLimits(max_tokens=1000)

    def decode(name: str) -> list[str]:
        decoder = load_decoder(
            name, folder, medusa_heads=SHIPPED_HEADS["apar-tiny"],
            prompt_tokens=SHIPPED_PROMPTS["apar-tiny"], device=setup.device, dtype=torch.float32,
        )  # fmt: skip
        answers = [decode_answer(decoder, prompt, limits=limits).text_ids for prompt in prompts]
        return [" ".join(map(str, token_ids)) for token_ids in answers]

    if not DECODER_TEXTS.exists() and not setup.has_gpu:
        stored = {name: decode(name) for name in ("plain", "vanilla_apar")}
        DECODER_TEXTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    expected = json.loads(DECODER_TEXTS.read_text(encoding="utf-8"))
    seconds: dict[str, float] = {}
    different: list[str] = []
    for name in DECODER_NAMES:
        begin_s = time.perf_counter()
        texts = decode(name)
        seconds[name] = time.perf_counter() - begin_s
        # Speculation changes no greedy token, so there are two sets of texts.
        pairs = zip(texts, expected["plain" if name in SINGLE_THREAD else "vanilla_apar"],
                    strict=True)  # fmt: skip
        different += [f"{name}, prompt {n}" for n, (text, other) in enumerate(pairs)
                      if text != other]  # fmt: skip
        setup.keep({"seconds": seconds, "different": different})
    found: Found = {"seconds": seconds, "different": different, "prompts": len(prompts)}
    found["summary"] = [
        f"{len(seconds)} decoders, {len(prompts)} prompts, float32: {len(different)} texts differ "
        "from a CPU's"
    ]
    if different:
        setup.keep(found)
        raise CheckError(
            f"texts differ: {', '.join(different[:5])}; if the embedded model has changed, remove "
            f"{DECODER_TEXTS.name} and run this check with --device cpu"
        )
    return found


def figure4(setup: Setup) -> Found:
    """Replay recorded answers at 7B dimensions, one at a time, as long as there is time."""
    from apar_core.offline.evaluation.speed_run import SpeedSettings, run_speed

    class Silent:
        def start(self, stage: str, total: int, done: int = 0) -> Callable[[], None]:
            return lambda: None

    trace = setup.answers or own_answers(setup.work / "answers.jsonl")
    settings = SpeedSettings(
        model="apar-tiny", model_name="apar-tiny", replay=(trace,),
        random_weights="tiny" if setup.is_tiny else "llama-7b",
        # A stand-in: its tokens are shorter than a 7B model's, which makes answers longer.
        tokenizer=_tiny_checkpoint(), device=setup.device,
        dtype="float32" if setup.is_tiny else "bfloat16",
    )  # fmt: skip
    begin_s = time.monotonic()
    number, last_s, report = 1, 0.0, None
    # Answers are kept, so each round adds to those before; loading the model takes seconds.
    while number <= (1 if setup.is_tiny else 64):
        round_s = time.monotonic()
        part = settings.model_copy(update={"limit": number})
        report = run_speed(part, setup.work / "figure4", Silent())
        last_s = time.monotonic() - round_s
        if time.monotonic() - begin_s + 2.2 * last_s > setup.limit_s:
            break
        number *= 2
    assert report is not None
    tables = [
        {
            "name": table.name,
            "title": table.title,
            "columns": [each.title for each in table.columns],
            "rows": [list(row) for row in table.rows],
        }
        for table in report.tables
    ]
    speeds = next(each for each in report.tables if each.name.startswith("speed_"))
    mean = dict(zip([each.title for each in speeds.columns], speeds.rows[-1], strict=True))
    summary = [
        f"{mean['Answers']} answers of {trace.name} at the dimensions of {settings.random_weights}:"
        f" {mean['Fewer steps']:.2f} times fewer steps, {mean['Speed-up']:.2f} times as fast as "
        f"sequential decoding ({mean['Baseline tokens/s']:.1f} tokens/s)",
        f"the last round took {last_s:.0f} s",
    ]
    return {"tables": tables, "facts": dict(report.facts), "summary": summary}


def training(setup: Setup) -> Found:
    """Compare FlexAttention's tree mask with SDPA's: loss, gradients, time and memory."""
    from apar_core.offline.training.tree_forward import FLEX, SDPA, summed_tree_loss
    from apar_core.offline.training.tree_trainer import TreeCollator, tree_batch

    number, joined = (2, 1) if setup.is_tiny else (64, 2048)
    trees, tokenizer = _packed_trees(number, joined=joined)
    dtype = torch.bfloat16 if setup.has_gpu and not setup.is_tiny else torch.float32
    losses: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    found: Found = {"tokens": sum(len(tree.token_ids) for tree in trees), "trees": len(trees)}
    for attention in (SDPA, FLEX):
        model = _llama(setup, len(tokenizer), dtype, attention)
        batch = tree_batch(TreeCollator.for_model(model, tokenizer.pad_token_id)(trees))
        batch = _moved(batch, setup)

        def step(model: Any = model, batch: Any = batch) -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            if not setup.has_gpu:
                # FlexAttention has no gradients on a CPU.
                with torch.no_grad():
                    return summed_tree_loss(model, batch, model)
            loss = summed_tree_loss(model, batch, model)
            loss.backward()
            return loss.detach()

        begin_s = time.perf_counter()
        losses[attention] = float(step())
        found[f"{attention} first step s"] = time.perf_counter() - begin_s
        if setup.has_gpu:
            gradients[attention] = model.lm_head.weight.grad.float().clone()
            torch.cuda.reset_peak_memory_stats()
        found[f"{attention} step s"] = _median_s(step, setup, repeats=3)
        if setup.has_gpu:
            found[f"{attention} peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        del model
    found["loss"] = losses
    difference = 0.0
    if gradients:
        scale = gradients[SDPA].abs().max()
        difference = float((gradients[SDPA] - gradients[FLEX]).abs().max() / scale)
    loss_difference = abs(losses[SDPA] / losses[FLEX] - 1)
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    found["summary"] = [
        f"{found['tokens']} tokens of {len(trees)} rows, {dtype}: SDPA "
        f"{found[f'{SDPA} step s']:.3f} s, FlexAttention {found[f'{FLEX} step s']:.3f} s a step "
        f"(first step {found[f'{FLEX} first step s']:.1f} s)",
        f"loss differs by {loss_difference:.1e}, gradients by {difference:.1e} of the largest "
        f"(none on a CPU); bound {bound:.0e}",
    ]
    if setup.has_gpu:
        found["summary"].append(
            f"peak memory {found[f'{SDPA} peak GiB']:.1f} and {found[f'{FLEX} peak GiB']:.1f} GiB"
        )
    if max(loss_difference, difference) > bound:
        setup.keep(found)
        raise CheckError(f"SDPA and FlexAttention differ: {found['summary'][1]}")
    return found


def fsdp(setup: Setup) -> Found:
    """Compare a sharded training step with an ordinary one, in a process per GPU (on a CPU: 2)."""
    number = torch.cuda.device_count() if setup.has_gpu else 2
    out = setup.work / "fsdp.json"
    out.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.torch_checks", "fsdp_worker",
             *setup.as_options(out)],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
                 "WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for rank in range(number)
    ]  # fmt: skip
    codes = [worker.wait() for worker in workers]
    if any(codes) or not out.exists():
        raise CheckError(f"workers ended with {codes}")
    found: Found = json.loads(out.read_text(encoding="utf-8"))
    return found


def fsdp_worker(setup: Setup) -> Found:
    """Take one step sharded and one whole, as a process of `fsdp`."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from apar_core.offline.training.packing import batch_trees
    from apar_core.offline.training.tree_forward import SDPA, summed_tree_loss

    rank = int(os.environ["RANK"])
    if setup.has_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if setup.has_gpu else "gloo")
    trees, tokenizer = _packed_trees(2, joined=1)
    batch = _moved(batch_trees(trees, tokenizer.pad_token_id), setup)

    def gradient(model: Any) -> tuple[float, torch.Tensor]:
        loss = summed_tree_loss(model, batch, model)
        loss.backward()
        found = model.lm_head.weight.grad
        return float(loss), found.full_tensor() if isinstance(found, DTensor) else found.clone()

    model = _llama(setup, len(tokenizer), torch.float32, SDPA)
    loss, expected = gradient(model)
    model.zero_grad(set_to_none=True)
    mesh = dist.device_mesh.init_device_mesh(setup.device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    begin_s = time.perf_counter()
    sharded, found = gradient(model)
    seconds = time.perf_counter() - begin_s
    difference = float((found - expected).abs().max() / expected.abs().max())
    world = dist.get_world_size()
    dist.destroy_process_group()
    if rank > 0:
        raise SystemExit(0)
    result: Found = {
        "loss": loss, "sharded_loss": sharded, "gradient_difference": difference,
        "seconds": seconds, "processes": world,
    }  # fmt: skip
    result["summary"] = [
        f"{world} processes: loss {sharded:.4f}, without shards {loss:.4f}; gradients differ by "
        f"{difference:.1e} of the largest"
    ]
    if abs(sharded / loss - 1) > 1e-5 or difference > 1e-4:
        raise CheckError(result["summary"][0])
    return result


def _tiny_checkpoint() -> str:
    from apar_core.models.apar_tiny import checkpoint_path

    return str(checkpoint_path())


def own_answers(path: Path) -> Path:
    """Write structured answers of the embedded model's corpus as a trace, unless it exists."""
    from apar_core.offline.data.records import count_forks, flat_text
    from apar_core.offline.data.structure import extract_tree
    from apar_core.offline.data.tiny_corpus.generator import Corpus

    if not path.exists():
        lines = []
        for number, example in enumerate(Corpus(0, held_out=True).examples(400)):
            text = flat_text(example.answer)
            if count_forks(extract_tree(text).tree):
                record: Found = {"id": number, "category": example.kind, "source": "tiny corpus"}
                record |= {"prompt": example.messages[-1].content, "response": text}
                lines.append(json.dumps(record))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _packed_trees(number: int, *, joined: int) -> tuple[Sequence[Any], Any]:
    """Return packed trees of the corpus, joined to rows of at least so many tokens."""
    from apar_core.offline.data.tiny_corpus.generator import Corpus
    from apar_core.offline.training.example_encoder import ExampleEncoder
    from apar_core.offline.training.packing import join_trees
    from apar_core.offline.training.pretrained import load_tokenizer

    tokenizer = load_tokenizer(_tiny_checkpoint())
    encoder = ExampleEncoder(tokenizer, 4096)
    trees = [encoder.pack(example) for example in Corpus(0).examples(number)]
    rows, row = [], []
    for tree in trees:
        row.append(tree)
        if sum(len(each.token_ids) for each in row) >= joined:
            rows.append(join_trees(row))
            row = []
    return rows or [join_trees(trees)], tokenizer


def _moved(batch: Any, setup: Setup) -> Any:
    moved = {each.name: getattr(batch, each.name).to(setup.device) for each in fields(batch)}
    return replace(batch, **moved)


def _llama(setup: Setup, vocabulary: int, dtype: torch.dtype, attention: str) -> Any:
    """Return a Llama with the same random weights in every call, on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = (64, 2) if setup.is_tiny or dtype == torch.float32 else (2048, 16)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 16 if hidden < 128 else 32,
        max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = attention
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype=dtype, device=setup.device).train()


def _median_s(function: Callable[[], Any], setup: Setup, *, repeats: int = 10) -> float:
    times = []
    for _ in range(2 + repeats):
        begin_s = time.perf_counter()
        function()
        if setup.has_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin_s)
    return sorted(times[2:])[repeats // 2]


def run(checks: Sequence[Callable[[Setup], Found]]) -> None:
    """Run the check that the command line names, and write what it found."""
    named = {check.__name__: check for check in checks}
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(named))
    parser.add_argument("--device", required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--dimensions", default="apar-7b")
    parser.add_argument("--engine", type=json.loads, default={})
    options = parser.parse_args()
    has_gpu = options.device == "cuda" and options.name not in _WITHOUT_GPU
    if has_gpu and not torch.cuda.is_available():
        sys.exit("no CUDA device; --device cpu tries the checks without one")
    report: Found = {"checks": {}}
    if options.results is not None and options.results.exists():
        report = json.loads(options.results.read_text(encoding="utf-8"))
    setup = Setup(
        device=options.device,
        is_tiny=options.size == "tiny",
        work=options.work,
        data=options.data,
        limit_s=options.limit,
        results={name: found["data"] for name, found in report["checks"].items()
                 if found["status"] == "passed"},
        answers=options.answers,
        dimensions=options.dimensions,
        engine=options.engine,
    )  # fmt: skip
    try:
        setup.keep(named[options.name](setup))
    except CheckError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    run((machine, step_times, decoders, figure4, training, fsdp, fsdp_worker))
