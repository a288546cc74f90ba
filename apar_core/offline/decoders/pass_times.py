"""Durations of a decoder's passes by rows and inputs, measured or from a file.

They decide the size of the candidate trees. A pass is measured as a decoder runs it: proposing
candidates, the model, choosing tokens and handing them to the threads.
Source: Parallel Prompt Decoding (arXiv 2405.18628), section 4.2, "hardware-awareness".
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from apar_core.errors import EvaluationError, validation_summary
from apar_core.offline.decoders.interface import AnswerDecoder, TokenChoice, decode_answer
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.sparse_tree import (
    FAMILY_ROWS,
    DynamicTree,
    TreeFamily,
    best_size,
    optimal_tree,
)
from apar_core.step_costs.costs import StepCosts

PASS_INPUTS = (1, 2, 4, 8, 16, 32, 64)
"""Most inputs of a row in the measured passes."""

PASSES_FILE = "passes.json"

# Tokens that each thread still has to write when all are alive, halved: guesses may be right.
_PASSES_PER_ROUND = 4

MEASURED_TOKENS = PASS_INPUTS[-1] + 2 * (FAMILY_ROWS[-1] + 2 * _PASSES_PER_ROUND)
"""Room that a measurement needs after the context (tokens)."""

ProposerName = Literal["prompt_tokens", "medusa_heads"]

_SECONDS = TypeAdapter(dict[ProposerName, dict[PositiveInt, dict[PositiveInt, PositiveFloat]]])


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass by rows of the batch and inputs per row.

    They hold for one model, proposer and device. Rows between those measured take the next larger
    number.
    """

    seconds: Mapping[int, Mapping[int, float]]

    def pass_s(self, rows: int) -> Callable[[int], float]:
        """Return the seconds of a pass over so many rows by its tokens, linear between points."""
        known = min((each for each in self.seconds if each >= rows), default=max(self.seconds))
        points, slowest = [], 0.0
        for inputs, seconds in sorted(self.seconds[known].items()):
            # More inputs take no less time; a smaller value is noise.
            slowest = max(slowest, seconds)
            points.append((known * inputs, slowest))
        costs = StepCosts("passes", "measured", "this run", tuple(points), 0.0)
        return lambda tokens: costs.matrix_time_s(max(tokens * known // rows, 1))

    def family(
        self, table: AcceptanceTable, *, ensemble: int, max_inputs: int = PASS_INPUTS[-1]
    ) -> TreeFamily:
        """Return the trees that are predicted to be fastest by number of live rows."""
        return TreeFamily(
            FAMILY_ROWS,
            tuple(
                best_size(
                    table, self.pass_s(rows), rows, ensemble=ensemble, max_inputs=max_inputs
                ).tree
                for rows in FAMILY_ROWS
            ),
        )


def write_passes(times: Mapping[ProposerName, PassTimes], path: Path) -> None:
    """Write the seconds as JSON: proposer, rows, then inputs."""
    seconds = {name: each.seconds for name, each in times.items()}
    path.write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")


def read_passes(path: Path) -> dict[ProposerName, PassTimes]:
    """Read `passes.json`. Raises EvaluationError for a missing or damaged file."""
    try:
        found = _SECONDS.validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(
            f"no pass times in {path}: {error}. `apar evaluate passes` measures them"
        ) from error
    except ValidationError as error:
        raise EvaluationError(f"{path}: {validation_summary(error)}") from error
    if not found or not all(seconds and all(seconds.values()) for seconds in found.values()):
        raise EvaluationError(f"{path} has no pass times")
    return {name: PassTimes(seconds) for name, seconds in found.items()}


def measured_trees(table: AcceptanceTable, ensemble: int) -> dict[int, DynamicTree]:
    """Return the best tree of each measured size, by its own number of inputs."""
    trees = [optimal_tree(table, most, ensemble) for most in PASS_INPUTS]
    return {tree.num_inputs(ensemble): tree for tree in trees}


def measure_passes(
    load: Callable[[TreeFamily], AnswerDecoder],
    trees: Mapping[int, DynamicTree],
    context: int,
    vocabulary: Sequence[int],
    fork_id: int | None,
    *,
    repeats: int = 3,
    rows: Sequence[int] = FAMILY_ROWS,
    on_round: Callable[[], None] = lambda: None,
) -> PassTimes:
    """Measure the passes of decoders with each of the `trees`.

    `load` returns a decoder with the given trees. Its threads replay random tokens of the
    `vocabulary` after `context` such tokens, so that guesses are wrong and every pass yields a
    token. The root opens the other rows with `fork_id`; without one, passes of one row are
    measured. All points are measured once before any is measured again; the median counts.

    Sizes above two whose passes are too long to pay with any tree are left out: of many rows on a
    CPU they take most of the time. `on_round` is called after each round, the warm-up included.
    """
    draws = random.Random(0)
    prompt = draws.choices(vocabulary, k=context)
    decoders = {inputs: load(TreeFamily.of(tree)) for inputs, tree in trees.items()}
    numbers = [number for number in rows if number == 1 or fork_id is not None]
    sizes = {number: sorted(decoders) for number in numbers}
    longest = max(tree.expected_length() for tree in trees.values())
    measured: dict[tuple[int, int], list[float]] = {}
    for repeat in range(repeats + 1):
        # The first round warms up.
        for number in numbers[:1] if repeat == 0 else numbers:
            too_long = 0
            for inputs in tuple(sizes[number]):
                replay = _replay(number, vocabulary, fork_id, draws)
                trace = decode_answer(decoders[inputs], prompt, TokenChoice.replay(replay)).trace
                # Of the passes with all rows, the first opens the last one.
                passes = [step for step in trace[1:] if step.threads == number][1:]
                if repeat > 0:
                    seconds = [step.seconds for step in passes]
                    measured.setdefault((number, inputs), []).extend(seconds)
                    limit = longest * median(measured[number, sizes[number][0]])
                    too_long = too_long + 1 if median(seconds) > limit else 0
                    # A single one may have been disturbed.
                    if repeat == 1 and too_long == 2:
                        sizes[number] = [size for size in sizes[number] if size <= inputs]
                        break
        on_round()
    return PassTimes(
        {
            number: {inputs: median(measured[number, inputs]) for inputs in sizes[number]}
            for number in numbers
        }
    )


def _replay(
    num_rows: int, vocabulary: Sequence[int], fork_id: int | None, draws: random.Random
) -> dict[str, list[int]]:
    """Return tokens with which `num_rows` threads are alive together for a few passes."""
    num_tokens = num_rows + 2 * _PASSES_PER_ROUND
    replay = {"": [draws.choice(vocabulary)]}
    for child in range(num_rows - 1):
        assert fork_id is not None
        # No fork follows a fork.
        replay[""] += [fork_id, draws.choice(vocabulary)]
        replay[str(child)] = draws.choices(vocabulary, k=2 * num_tokens)
    replay[""] += draws.choices(vocabulary, k=2 * _PASSES_PER_ROUND)
    return replay
