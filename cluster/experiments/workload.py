"""The answers of a trace as tokens of the experiment's model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apar_core.workload.replay_answers import ReplayAnswer, replay_answers
from apar_core.workload.trace import read_trace
from cluster.experiments.cpu_model import FoldedText
from cluster.experiments.settings import ExperimentSettings

if TYPE_CHECKING:
    from apar_core.offline.evaluation.replay_text import ModelText


def load_experiment_text(settings: ExperimentSettings, model_path: str) -> FoldedText | ModelText:
    """Return the text of a checkpoint, or for a CPU model one of realistic token counts."""
    from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text

    own = load_text(model_path)
    return FoldedText(load_text(LLAMA_TOKENIZER), own) if settings.is_cpu_model else own


def load_answers(
    path: Path, settings: ExperimentSettings, text: FoldedText | ModelText
) -> Sequence[ReplayAnswer]:
    """Return as many answers of a trace as the settings say, drawn with their seed."""
    fitting, _ = replay_answers(read_trace(path), text, text.tokens, max_tokens=settings.max_tokens)
    if len(fitting) <= settings.answers:
        return fitting
    return random.Random(settings.seed).sample(fitting, settings.answers)
