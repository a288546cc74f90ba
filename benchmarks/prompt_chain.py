"""A chain of prompt tokens in vLLM, next to no speculation: tokens per step, and the host's work.

Each engine has a process of its own; they answer each prompt in turn. The host's work is what a GPU
would wait for in each step without async scheduling. Seconds are CPU time of the engine's only
thread, so that other work on the machine counts less.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from time import thread_time
from typing import Any

from rich.console import Console
from rich.table import Table

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.prompt_chain import PROPOSER
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_PROMPTS
from apar_core.offline.data.tiny_corpus.generator import Corpus

PLAIN = "no speculation"
CHAIN_LENGTHS = (2, 3)
MAX_TOKENS = 128
WAITED_FOR = ("schedule", "prepare", "bookkeep", "propose", "update")
"""Host work during which a GPU has nothing to do: before the forward pass is launched, and after
the sampled tokens have arrived. `prepare` is the model runner's work before the pass."""
HIDDEN = ("forward", "logits", "sample")
"""Work of the device, or launched while it computes."""
PARTS = (*WAITED_FOR, *HIDDEN, "other")
_VOCABULARY = 4096


def _zeros() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class Measured:
    """All answers of one engine. Seconds by part; `step` is the whole step of the engine core.

    `outcomes` counts the rows by (guesses, accepted guesses). `host_s` has the seconds of each step
    that a GPU would wait for.
    """

    tokens: int = 0
    rows: int = 0
    steps: int = 0
    answer_s: float = 0.0
    seconds: defaultdict[str, float] = field(default_factory=_zeros)
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    texts: list[tuple[int, ...]] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)

    def end_step(self) -> None:
        """Note what the host has done since the last step."""
        total = sum(self.seconds[part] for part in WAITED_FOR)
        self.host_s.append(total - sum(self.host_s))

    def add(self, other: Measured) -> None:
        """Add the answers of another measurement."""
        self.tokens += other.tokens
        self.rows += other.rows
        self.steps += other.steps
        self.answer_s += other.answer_s
        for part, seconds in other.seconds.items():
            self.seconds[part] += seconds
        self.outcomes += other.outcomes
        self.texts += other.texts
        self.host_s += other.host_s


def run(console: Console, *, num_answers: int, forked: bool) -> dict[str, Any]:
    """Answer held-out prompts with each engine in turn; return figures as plain values."""
    measured = {name: Measured() for name in _engines()}
    ratios: dict[str, list[float]] = {name: [] for name in measured}
    questions = [each.messages[-1].content for each in Corpus(seed=11).examples(num_answers + 1)]
    with ExitStack() as stack:
        # A process has one engine: vLLM's registry of CPU kernels takes no second one.
        pools = {
            name: stack.enter_context(
                ProcessPoolExecutor(1, get_context("spawn"), _start, (arguments,))
            )
            for name, arguments in _engines().items()
        }
        for number, question in enumerate(questions):
            answered = {
                name: pool.submit(_answer, question, forked).result()
                for name, pool in pools.items()
            }
            # The first question warms up.
            if number:
                for name, each in answered.items():
                    measured[name].add(each)
                    ratios[name].append(answered[PLAIN].answer_s / each.answer_s)
    results = {name: _figures(each, ratios[name]) for name, each in measured.items()}
    for name, each in measured.items():
        results[name]["same_answers"] = each.texts == measured[PLAIN].texts
    console.print(_table(results))
    return {"answers": num_answers, "forked": forked, "max_tokens": MAX_TOKENS, "engines": results}


def _engines() -> dict[str, dict[str, Any]]:
    common: dict[str, Any] = {
        "model": str(checkpoint_path()),
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 768,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 64 << 20,
    }
    engines = {PLAIN: common}
    for length in CHAIN_LENGTHS:
        engines[f"chain, {length} drafts"] = {
            **common,
            "speculative_config": {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": length,
            },
            "additional_config": {"apar": {"prompt_tokens": str(SHIPPED_PROMPTS["apar-tiny"])}},
        }
    return engines


# The engine of a process, built by `_start`.
_ENGINE: list[OfflineEngine] = []


def _start(arguments: dict[str, Any]) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    _ENGINE.append(OfflineEngine(**arguments))


def _answer(question: str, forked: bool) -> Measured:
    (engine,) = _ENGINE
    parameters = {
        "temperature": 0.0,
        "max_tokens": MAX_TOKENS,
        "extra_args": {"apar_enabled": forked},
    }
    found = Measured()
    with _watched(engine, found):
        begin = thread_time()
        (answer,) = engine.generate([engine.chat_prompt(question)], parameters)
        found.answer_s = thread_time() - begin
    found.texts.append(answer.token_ids)
    return found


@contextmanager
def _watched(engine: OfflineEngine, into: Measured) -> Iterator[None]:
    core: Any = engine.llm.llm_engine.engine_core
    core = core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    scheduler = core.scheduler
    with ExitStack() as stack:

        def time(owner: Any, method: str, part: str) -> None:
            stack.enter_context(_replaced(owner, method, _timed(into, part)))

        time(core, "step_fn", "step")
        time(scheduler, "schedule", "schedule")
        begun: list[float] = []
        stack.enter_context(_replaced(runner, "execute_model", _noted(begun)))
        stack.enter_context(_replaced(runner, "_model_forward", _prepared(into, begun)))
        time(runner, "_model_forward", "forward")
        time(runner.model, "compute_logits", "logits")
        time(runner, "_sample", "sample")
        time(runner, "_bookkeeping_sync", "bookkeep")
        if hasattr(runner, "drafter"):
            time(runner.drafter, "propose", "propose")
        time(scheduler, "update_from_output", "update")
        stack.enter_context(_replaced(scheduler, "update_from_output", _counted(into)))
        stack.enter_context(_replaced(core, "step_fn", _ended(into)))
        yield


@contextmanager
def _replaced(
    owner: Any, method: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    before = vars(owner).get(method)
    setattr(owner, method, wrap(getattr(owner, method)))
    try:
        yield
    finally:
        if before is None:
            delattr(owner, method)
        else:
            setattr(owner, method, before)


def _timed(into: Measured, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                into.seconds[part] += thread_time() - begin

        return timed

    return wrap


def _noted(begun: list[float]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Note when the model runner begins a step."""

    def wrap(execute: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            begun[:] = [thread_time()]
            return execute(*args, **kwargs)

        return noted

    return wrap


def _prepared(
    into: Measured, begun: list[float]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the time between the beginning of a step and its forward pass."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def prepared(*args: Any, **kwargs: Any) -> Any:
            into.seconds["prepare"] += thread_time() - begun[0]
            return forward(*args, **kwargs)

        return prepared

    return wrap


def _ended(into: Measured) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        def ended(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            into.end_step()
            return result

        return ended

    return wrap


def _counted(into: Measured) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Count steps, rows and tokens. Drafts from the vocabulary's size on are prompt tokens."""

    def wrap(update: Callable[..., Any]) -> Callable[..., Any]:
        def counted(step: Any, output: Any) -> Any:
            into.steps += 1
            for request_id, index in output.req_id_to_index.items():
                sampled = output.sampled_token_ids[index] if output.sampled_token_ids else []
                drafts = step.scheduled_spec_decode_tokens.get(request_id, ())
                if sampled:
                    into.tokens += len(sampled)
                    into.rows += 1
                    guesses = sum(token_id < _VOCABULARY for token_id in drafts)
                    into.outcomes[guesses, len(sampled) - 1] += 1
            return update(step, output)

        return counted

    return wrap


def _figures(measured: Measured, ratios: list[float]) -> dict[str, Any]:
    seconds = dict(measured.seconds)
    seconds["other"] = seconds["step"] - sum(
        seconds.get(part, 0.0) for part in (*WAITED_FOR, *HIDDEN)
    )
    # The first prompt token's guess, given that the step had one.
    guessed = sum(rows for (guesses, _), rows in measured.outcomes.items() if guesses)
    right = sum(rows for (guesses, n), rows in measured.outcomes.items() if guesses and n)
    return {
        "tokens": measured.tokens,
        "steps": measured.steps,
        "tokens_per_row_and_step": measured.tokens / measured.rows,
        "first_guess_right": right / guessed if guessed else None,
        "outcomes": {f"{g} guesses, {n} accepted": c for (g, n), c in measured.outcomes.items()},
        "speed_up_median": statistics.median(ratios),
        "step_us": 1e6 * seconds["step"] / measured.steps,
        # Deciles: the least loaded moments of a busy machine come first.
        "host_us": [1e6 * each for each in statistics.quantiles(measured.host_s, n=10)],
        "parts_us": {part: 1e6 * seconds.get(part, 0.0) / measured.steps for part in PARTS},
    }


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="A chain of prompt tokens in vLLM, one request at a time")
    for name in (
        "",
        "tokens per row and step",
        "first guess right",
        "speed-up",
        "step us",
        "host us",
    ):
        table.add_column(name, justify="right")
    for part in PARTS:
        table.add_column(part, justify="right")
    for name, each in results.items():
        right = each["first_guess_right"]
        table.add_row(
            name,
            f"{each['tokens_per_row_and_step']:.3f}",
            "" if right is None else f"{right:.3f}",
            f"{each['speed_up_median']:.2f}",
            f"{each['step_us']:.0f}",
            f"{each['host_us'][0]:.0f} to {each['host_us'][-1]:.0f}",
            *(f"{each['parts_us'][part]:.0f}" for part in PARTS),
        )
    return table
