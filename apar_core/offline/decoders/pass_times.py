"""Durations of passes by rows and tokens, measured or from a file: they decide the tree's size.

Source: Parallel Prompt Decoding (arXiv 2405.18628), section 4.2, "hardware-awareness".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from transformers import DynamicCache

from apar_core.errors import EvaluationError, validation_summary
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.sparse_tree import FAMILY_ROWS, TreeFamily, best_size
from apar_core.step_costs.costs import StepCosts

PASS_INPUTS = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of a row in the measured passes."""

PASSES_FILE = "passes.json"

_SECONDS = TypeAdapter(dict[PositiveInt, dict[PositiveInt, PositiveFloat]])


@dataclass(frozen=True)
class PassTimes:
    """Shortest seconds of a pass by rows of the batch and inputs per row, for one model and device.

    Rows between those measured take the next larger number.
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

    def write(self, path: Path) -> None:
        """Write the seconds as JSON: rows, then inputs."""
        path.write_text(json.dumps(self.seconds, indent=1) + "\n", encoding="utf-8")


def read_passes(path: Path) -> PassTimes:
    """Read `passes.json`. Raises EvaluationError for a missing or damaged file."""
    try:
        seconds = _SECONDS.validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(
            f"no pass times in {path}: {error}. `apar evaluate passes` measures them"
        ) from error
    except ValidationError as error:
        raise EvaluationError(f"{path}: {validation_summary(error)}") from error
    if not seconds or not all(seconds.values()):
        raise EvaluationError(f"{path} has no pass times")
    return PassTimes(seconds)


def stored_passes(path: Path, measure: Callable[[], PassTimes]) -> PassTimes:
    """Return the pass times in a file, or measure and store them."""
    if not path.is_file():
        measure().write(path)
    return read_passes(path)


@torch.inference_mode()
def measure_passes(
    model: Any, context: int, *, repeats: int = 7, rows: Sequence[int] = FAMILY_ROWS
) -> PassTimes:
    """Measure passes over random tokens behind `context` tokens of each row.

    All points are measured once before any is measured again.
    """
    generator = torch.Generator().manual_seed(0)
    size = model.config.vocab_size
    measured: dict[tuple[int, int], list[float]] = {}
    for repeat in range(repeats + 1):
        for number in rows:
            cache = DynamicCache()
            drawn = max(context, PASS_INPUTS[-1])
            draw = torch.randint(size, (number, drawn), generator=generator).to(model.device)
            ids = draw[:, :context]
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            for inputs in PASS_INPUTS:
                ids = draw[:, :inputs]
                _synchronize(model.device)
                start = time.perf_counter()
                model(input_ids=ids, past_key_values=cache, use_cache=True)
                _synchronize(model.device)
                # The first round warms up.
                if repeat > 0:
                    seconds = time.perf_counter() - start
                    measured.setdefault((number, inputs), []).append(seconds)
                cache.crop(-inputs)
    return PassTimes(
        {
            number: {inputs: min(measured[number, inputs]) for inputs in PASS_INPUTS}
            for number in rows
        }
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
