"""Functions that tests of the other methods run in an engine's process."""

from __future__ import annotations

from dataclasses import dataclass

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.offline.data.structure import extract_tree
from cluster.experiments.driver import Drive, RunPlan, drive
from cluster.experiments.experiment_engine import Conditions
from cluster.experiments.peers.methods import METHODS, Question, marker_id
from cluster.experiments.peers.skeleton_of_thought import skeleton_prompts
from cluster.experiments.run_watch import RunWatch, watched
from tests.integration.experiments.driving import LIST, answers, experiment_engine


@dataclass(frozen=True)
class Answered:
    """A run of one method and its counters."""

    drive: Drive
    watch: RunWatch

    @property
    def prompt_tokens(self) -> int:
        """Count computed tokens, without those that the same request had just generated."""
        return self.watch.prompt_tokens(self.drive.counts.computed_tokens)


def answered(engine: OfflineEngine, method: str, number: int, concurrency: int) -> Answered:
    """Answer this many questions with a method; the driver checks every text."""
    from apar_core.models.apar_tiny import checkpoint_path
    from apar_core.offline.evaluation.replay_text import load_text

    opened = experiment_engine(engine)
    text = load_text(str(checkpoint_path()))
    questions = [
        Question(each, skeleton_prompts(each, extract_tree(LIST.format(number=i)).tree, text))
        for i, each in enumerate(answers(number))
    ]
    tokens = text.tokens
    marker = marker_id(engine.tokenizer, (tokens.fork_id, tokens.child_id, tokens.end_id))
    build = METHODS[method].build
    with watched(opened) as watch:
        conditions = Conditions(
            concurrency=concurrency, keeps_busy=False, policy=METHODS[method].policy
        )
        plan = RunPlan(opened, conditions, lambda index: build(questions[index], marker), number)
        found = drive(plan, sample_s=0.1)
    return Answered(found, watch)
