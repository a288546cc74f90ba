"""`apar generate`: one answer, generated in this process by vLLM or a transformers decoder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from apar_core.errors import AparError, RequestError
from apar_core.offline.data.records import ChatMessage
from apar_core.tree import (
    ROOT_THREAD,
    ParagraphTree,
    ThreadId,
    TreeStatistics,
    thread_steps,
)
from cluster.cli.options import (
    DECODERS,
    MaxTokens,
    MedusaHeads,
    Model,
    PassTimes,
    PromptTokens,
    finite,
)
from cluster.cli.terminal import fail
from deployments.config.model import DEFAULT_MODEL, ModelConfig, model_path

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import OfflineEngine

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: str
    max_tokens: int
    temperature: float
    seed: int | None
    fork: bool
    raw: bool
    show_threads: bool


def generate(
    prompt: Annotated[
        str, typer.Argument(help="Question to answer, or with --raw a text to continue.")
    ],
    model: Model = DEFAULT_MODEL,
    show_threads: Annotated[
        bool, typer.Option("--show-threads", help="Show the tree of threads and its savings.")
    ] = False,
    max_tokens: MaxTokens = 1024,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="Sampling temperature; 0 is greedy decoding.", callback=finite),
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Random seed (default: a new one each time).")
    ] = None,
    fork: Annotated[
        bool, typer.Option("--fork/--no-fork", help="Whether the model may fork.")
    ] = True,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")
    ] = False,
    decoder: Annotated[
        str,
        typer.Option(
            help="vllm, or a decoder on transformers: plain, medusa, ppd, lookup or recycling; "
            "vanilla_apar, medusa_apar, ppd_apar, lookup_apar or recycling_apar with forks.",
            autocompletion=lambda: ["vllm", *DECODERS],
        ),
    ] = "vllm",
    medusa_heads: MedusaHeads = None,
    prompt_tokens: PromptTokens = None,
    pass_times: PassTimes = None,
) -> None:
    """Generate one answer in this process, without a server.

    Starting vLLM takes about 10 seconds. Example:
    [bold]apar generate "Give me 5 tips for learning guitar." --show-threads[/bold]
    """
    asked = _Asked(prompt, max_tokens, temperature, seed, fork, raw, show_threads)
    try:
        if decoder == "vllm" and medusa_heads is prompt_tokens is pass_times is None:
            _generate_by_engine(model, asked)
        else:
            _generate_by_decoder(decoder, model, medusa_heads, prompt_tokens, pass_times, asked)
    # vLLM and transformers report unusable models with a ValueError.
    except (AparError, OSError, ValueError) as error:
        fail(f"{model}: {error}", error)


def _generate_by_engine(model: str, asked: _Asked) -> None:
    sampling: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "seed": asked.seed,
        "extra_args": {"apar_enabled": asked.fork},
    }
    with Console(stderr=True).status(f"Starting {model} ..."):
        engine = start_engine(model, enforce_eager=True)
    question = asked.prompt if asked.raw else engine.chat_prompt(asked.prompt)
    answer = engine.generate([question], sampling)[0]
    if not asked.show_threads:
        _print_text(answer.text)
    elif answer.record is None:
        _print_text("This model has no control tokens: it answers in one thread.\n")
        _print_text(answer.text)
    else:

        def decode(tokens: Sequence[Any]) -> str:
            return str(engine.tokenizer.decode([token.token_id for token in tokens]))

        for tree in answer.record.trees:
            Console().print(thread_view(tree, decode))
        _print_text(statistics_line(answer.record.statistics))
    engine.shutdown()


def start_engine(model: str, **engine_args: Any) -> OfflineEngine:
    """Start the engine of a preset or checkpoint in this process.

    `engine_args` override the preset's.
    """
    path, settings = model_path(model), ModelConfig(checkpoint=model)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Importing vLLM takes seconds, and `apar --help` must be fast.
    from apar_core.engine.offline_engine import OfflineEngine

    arguments: dict[str, Any] = dict(settings.preset.engine)
    if settings.preset.is_small:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if (adapter := settings.fork_adapter_folder) is not None:
        arguments["additional_config"] = {"apar": {"fork_adapter": str(adapter)}}
    return OfflineEngine(path, **{**arguments, **engine_args})


def _generate_by_decoder(
    name: str,
    model: str,
    medusa_heads: Path | None,
    prompt_tokens: Path | None,
    pass_times: Path | None,
    asked: _Asked,
) -> None:
    # Importing torch takes seconds, and `apar --help` must be fast.
    from transformers.utils.logging import disable_progress_bar

    from apar_core.models.guesses import SHIPPED_HEADS, SHIPPED_PROMPTS
    from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice, decode_answer
    from apar_core.offline.decoders.load import (
        HEADED,
        PROMPTED,
        UNFORKED,
        UNSPECULATED,
        load_decoder,
        load_tokenizer,
    )
    from apar_core.offline.decoders.pass_times import read_passes
    from apar_core.offline.evaluation.replay_text import ModelText
    from apar_core.tree.statistics import tree_statistics

    disable_progress_bar()
    if medusa_heads is not None and name not in HEADED:
        raise RequestError(
            f"--medusa-heads {medusa_heads}: only --decoder medusa and medusa_apar use heads",
            param="medusa_heads",
        )
    if prompt_tokens is not None and name not in PROMPTED:
        raise RequestError(
            f"--prompt-tokens {prompt_tokens}: only --decoder ppd and ppd_apar use prompt tokens",
            param="prompt_tokens",
        )
    if not asked.fork:
        name = UNFORKED.get(name, name)
    if pass_times is not None and name in UNSPECULATED:
        raise RequestError(
            f"--pass-times {pass_times}: decoder {name} has no candidate trees", param="pass_times"
        )
    path = model_path(model)
    tokenizer = load_tokenizer(path)
    text = ModelText(tokenizer, path)
    decoder = load_decoder(
        name,
        path,
        tokenizer,
        medusa_heads=medusa_heads or SHIPPED_HEADS.get(model),
        prompt_tokens=prompt_tokens or SHIPPED_PROMPTS.get(model),
        pass_times=None if pass_times is None else read_passes(pass_times),
    )
    chat = [ChatMessage("user", asked.prompt)]
    answer = decode_answer(
        decoder,
        text.encode_prompt(asked.prompt) if asked.raw else text.encode_chat(chat),
        TokenChoice.sampled(asked.temperature, seed=asked.seed),
        DecodeLimits(max_tokens=asked.max_tokens),
    )
    if not asked.show_threads:
        _print_text(str(tokenizer.decode(answer.text_ids)))
        return
    Console().print(thread_view(answer.tree, lambda ids: str(tokenizer.decode(list(ids)))))
    _print_text(statistics_line(tree_statistics(answer.tree, answer.num_prompt_tokens)))
    _print_text(f"{name}: {len(answer.trace)} passes")


def _print_text(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def thread_view(tree: ParagraphTree[Item], decode: Callable[[Sequence[Item]], str]) -> Tree:
    """Return the threads of an answer as a tree for the terminal.

    Each has its paragraphs, generated tokens and steps; children stand where they were forked.
    """
    steps = thread_steps(tree)
    root = Tree(_thread_label(ROOT_THREAD, tree, steps[ROOT_THREAD]))
    pending = [(ROOT_THREAD, root, tree.root)]
    while pending:
        thread, branch, node = pending.pop()
        for child in (*tree.threads[thread].children, None):
            text = decode([*node.lead, *node.items]).strip()
            if text:
                branch.add(Text(text))
            if child is None or node.first_child is None or node.next_sibling is None:
                break
            child_branch = branch.add(_thread_label(child, tree, steps[child]))
            pending.append((child, child_branch, node.first_child))
            node = node.next_sibling
    return root


def _thread_label(
    thread: ThreadId, tree: ParagraphTree[Item], stretches: Sequence[tuple[int, int]]
) -> Text:
    record = tree.threads[thread]
    label = Text(thread, style="bold cyan")
    steps = ", ".join(f"{first}-{last}" for first, last in stretches)
    steps = f"steps {steps}" if steps else "no step"
    ending = "" if record.ended or record.is_closed else ", cut off"
    label.append(f"  {record.num_generated_items} tokens, {steps}{ending}", style="dim")
    return label


def statistics_line(statistics: TreeStatistics) -> str:
    """Return the savings by forking in one line."""

    def change(count: int, sequential: int) -> str:
        percent = 0.0 if sequential == 0 else 100 * (count - sequential) / sequential
        return f"{percent:+.0f} %"

    attended = change(statistics.attended_tokens, statistics.sequential_attended_tokens)
    cached = change(statistics.max_cached_tokens, statistics.sequential_max_cached_tokens)
    joins = ""
    if statistics.joins:
        joins = f", {statistics.joins} joins, {statistics.recomputed_tokens} tokens recomputed"
    return (
        f"{statistics.threads} threads{joins}, {statistics.text_tokens} tokens in "
        f"{statistics.decode_steps} steps instead of {statistics.sequential_steps}; "
        f"attended tokens {attended}, max cached tokens {cached}"
    )
