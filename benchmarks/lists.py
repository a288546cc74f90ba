"""Lists of an instruct model, written in parallel and in one thread: text, steps and time.

The model answers all questions without forks, and those with a list once more for each way to
write it. `docs/lists.md` shows the results.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from apar_core.engine.offline_engine import Answer, OfflineEngine
from apar_core.formats import list_shape
from apar_core.formats.lists import ListRules
from apar_core.formats.parallel_format import ListItems
from apar_core.intervals import Floats, of_sums, over_repeats, ratio_over_repeats
from apar_core.offline.data.structure import StructureRules
from apar_core.offline.evaluation.fork_answers import num_repeated, text_rules
from apar_core.reporting import Column, Report, ReportTable

BATCH = 32
_ITEM = re.compile(
    r"^ {0,1}(?:#{1,6} +)?[*_]{0,3}(?:[A-Z][a-z]+ )?(?:\d{1,3}[.):]|[-*•] \*\*)", re.MULTILINE
)
_RULES = StructureRules(unordered_lists=True, points_without_colon=True)


@dataclass(frozen=True)
class Way:
    """A way to write lists; `changes` are attributes to replace meanwhile."""

    name: str
    ahead: int = 4
    changes: tuple[tuple[Any, str, Any], ...] = ()


def _block_that_reads_the_outline(self: ListRules, *arguments: Any, **numbers: Any) -> Any:
    return _BLOCK(self, *arguments, **(numbers | {"num_skipped": 0}))


def _block_with_ellipses(self: ListRules, run: Any, number: int, seed: Any, **numbers: Any) -> Any:
    block = _BLOCK(self, run, number, seed, **numbers)
    detail, head = block.children
    text = " ..." + run.shape.separator + run.shape.marker.text(number + 1)
    return replace(block, children=(detail, replace(head, seed=self.encode(text))))


_BLOCK = ListRules.block
WAYS = (
    Way("4 items ahead (default)"),
    Way("1 item ahead", 1),
    Way("2 items ahead", 2),
    Way("8 items ahead", 8),
    Way("details read the other heads", 4, ((ListRules, "block", _block_that_reads_the_outline),)),
    Way("heads read an ellipsis", 4, ((ListRules, "block", _block_with_ellipses),)),
    Way("first detail of 80 characters", 4, ((list_shape, "MIN_DETAIL_CHARACTERS", 80),)),
)


@contextmanager
def _written(way: Way) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in way.changes]
    for owner, name, value in way.changes:
        setattr(owner, name, value)
    yield
    for owner, name, value in before:
        setattr(owner, name, value)


def run(
    engine: OfflineEngine,
    questions: Sequence[str],
    out: Path,
    console: Console,
    *,
    max_tokens: int,
    requests: Sequence[int],
    repeats: int,
    speed_questions: int,
) -> Report:
    """Measure and return a report; `out` gets the answers."""
    prompts = [engine.chat_prompt(question) for question in questions]

    def answers(chosen: Sequence[int], way: Way | None, at_once: int = BATCH) -> list[Answer]:
        extra = {"apar_enabled": way is not None}
        found: list[Answer] = []
        if way is not None:
            _set_ahead(engine, way.ahead)
        for start in range(0, len(chosen), at_once):
            part = [prompts[index] for index in chosen[start : start + at_once]]
            sampling = {"temperature": 0.0, "max_tokens": max_tokens, "extra_args": extra}
            found += engine.generate(part, sampling)
        return found

    everything = range(len(questions))
    alone = answers(everything, None)
    console.print(f"{len(alone)} answers in one thread")
    with _written(WAYS[0]):
        forked = answers(everything, WAYS[0])
    with_list = [index for index in everything if _statistics(forked[index])["threads"] > 1]
    # In bfloat16, an answer depends a little on what else is in the batch.
    again = answers(everything, None, BATCH // 2)
    others = [index for index in everything if index not in set(with_list)]
    same = sum(forked[index].text == alone[index].text for index in others)
    same_again = sum(again[index].text == alone[index].text for index in others)
    console.print(f"{len(with_list)} fork; of {len(others)} others {same}, {same_again} are equal")
    loss = _Losses(engine, prompts)
    own = [loss(index, alone[index]) for index in with_list]
    rows = [_row("one thread", [alone[i] for i in with_list], own, own, None)]
    console.print(*rows[-1])
    kept: dict[str, list[str]] = {"one thread": [each.text for each in alone]}
    for way in WAYS:
        with _written(way):
            found = answers(with_list, way)
        kept[way.name] = [each.text for each in found]
        losses = [loss(index, each) for index, each in zip(with_list, found, strict=True)]
        rows.append(_row(way.name, found, losses, own, [alone[i] for i in with_list]))
        console.print(*rows[-1])
    (out / "answers.json").write_text(
        json.dumps({"questions": list(questions), "with_list": with_list, **kept}, indent=1)
    )
    table = ReportTable(
        "ways",
        f"{len(with_list)} answers with lists",
        (
            *(Column("way", ""), Column("threads", ".1f"), Column("tokens", ".0f")),
            *(Column("tokens/step", ".2f"), Column("discarded", ".1%"), Column("items", ".2f")),
            *(Column("as many items", ".0%"), Column("with a repeated item", ".0%")),
            *(Column("log-loss/token", ".3f"), Column("ratio", ".3f"), Column("95% interval", "")),
        ),
        tuple(rows),
        "Discarded: of all tokens that threads generate. As many items as in one thread. Log-loss "
        "of the text under the model, and its ratio to that of the model's own text.",
    )
    tables = [table, _speeds(answers, with_list[:speed_questions], requests, repeats, console)]
    facts = {
        "Answers": f"{len(questions)}, greedy, at most {max_tokens} tokens; {len(with_list)} fork",
        "Without a list": f"{same} of {len(others)} have the same text as in one thread; without "
        f"the format but with other batches, {same_again} have",
    }
    return Report("Lists written in parallel", facts, tables, {}, {})


def _row(
    name: str,
    found: Sequence[Answer],
    losses: Sequence[tuple[float, int]],
    own: Sequence[tuple[float, int]],
    alone: Sequence[Answer] | None,
) -> tuple[Any, ...]:
    counts = [_statistics(each) for each in found]
    tokens = [each["text_tokens"] for each in counts]
    discarded = [each.get("discarded_tokens", 0) for each in counts]
    items = [len(_ITEM.findall(each.text)) for each in found]
    repeated = [num_repeated(text_rules(each.text, _RULES).forks) > 0 for each in found]
    as_many = None
    if alone is not None:
        as_many = statistics.fmean(
            number == len(_ITEM.findall(other.text))
            for number, other in zip(items, alone, strict=True)
        )
    pairs = [(*mine, *its) for mine, its in zip(losses, own, strict=True)]
    ratio = None if alone is None else of_sums(pairs, _ratio_of_means, seed=0)
    return (
        name,
        statistics.fmean(each["threads"] for each in counts),
        statistics.fmean(tokens),
        sum(tokens) / sum(each["decode_steps"] for each in counts),
        sum(discarded) / (sum(tokens) + sum(discarded)),
        statistics.fmean(items),
        as_many,
        statistics.fmean(repeated),
        sum(total for total, _ in losses) / sum(number for _, number in losses),
        None if ratio is None else ratio.value,
        None if ratio is None else ratio.interval(".3f"),
    )


def _ratio_of_means(sums: Floats) -> Floats:
    return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])


def _speeds(
    answers: Callable[..., list[Answer]],
    chosen: Sequence[int],
    requests: Sequence[int],
    repeats: int,
    console: Console,
) -> ReportTable:
    """Time both ways in turn; each answer counts the tokens of its own text."""
    rows: list[tuple[Any, ...]] = []
    for at_once in requests:
        speeds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats):
            for forks in (True, False):
                began = time.perf_counter()
                found = answers(chosen, WAYS[0] if forks else None, at_once)
                took = time.perf_counter() - began
                tokens = sum(_statistics(each)["text_tokens"] for each in found)
                speeds[forks].append(tokens / took)
        forked, alone = over_repeats(speeds[True]), over_repeats(speeds[False])
        ratio = ratio_over_repeats(speeds[True], speeds[False])
        rows.append((at_once, forked.value, alone.value, ratio.value, ratio.interval(".2f") or ""))
        console.print(*rows[-1])
    return ReportTable(
        "speed",
        f"Text tokens/s, {len(chosen)} answers with lists",
        (
            *(Column("requests at once", "d"), Column("lists in parallel", ".1f")),
            *(Column("one thread", ".1f"), Column("ratio", ".2f"), Column("95% interval", "")),
        ),
        tuple(rows),
        f"{repeats} repeats in turn.",
    )


class _Losses:
    """Log-loss of texts under the model, in nats: sum over the tokens, and their number."""

    def __init__(self, engine: OfflineEngine, prompts: Sequence[dict[str, Any]]) -> None:
        self._engine, self._prompts = engine, prompts

    def __call__(self, index: int, answer: Answer) -> tuple[float, int]:
        prompt = list(self._prompts[index]["prompt_token_ids"])
        tokens = list(answer.token_ids)
        from vllm import SamplingParams

        llm: Any = self._engine.llm
        (output,) = llm.generate(
            [{"prompt_token_ids": [*prompt, *tokens]}],
            SamplingParams(max_tokens=1, prompt_logprobs=0, extra_args={"apar_enabled": False}),
            use_tqdm=False,
        )
        rows = output.prompt_logprobs[len(prompt) :]
        found = [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
        return -math.fsum(found), len(found)


def _statistics(answer: Answer) -> dict[str, int]:
    assert answer.record is not None
    return answer.record.statistics.to_plain()


def _set_ahead(engine: OfflineEngine, ahead: int) -> None:
    """Let the next requests have another limit on the items ahead."""
    processor = engine._engine.input_processor
    definition = processor.format.definition.model_copy(update={"items": ListItems(ahead=ahead)})
    parameters = processor._parameters
    object.__setattr__(parameters, "blocks", definition.model_dump_json())
