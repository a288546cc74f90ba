"""The comparison from its settings to its files; what a folder has already is not done again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.experiments.parts import StartStage
from cluster.experiments.peers.runs import (
    PeerRunner,
    PeerSettings,
    RunKey,
    RunStore,
    keys_of,
)

if TYPE_CHECKING:
    from apar_core.reporting import Report


def run_peers(settings: PeerSettings, folder: Path, start_stage: StartStage) -> Report:
    """Do the runs that are missing and return what all of them came to.

    Raises EvaluationError for a folder with other settings, a trace that cannot be read, or an
    answer that was not generated as recorded.
    """
    store = RunStore(folder, settings)
    if any(key not in store.lines for key in keys_of(settings)):
        _run(settings, store, start_stage)
    return _report(settings, store)


def _run(settings: PeerSettings, store: RunStore, start_stage: StartStage) -> None:
    # These import vLLM, torch and transformers, which take seconds.
    from cluster.experiments.open_engine import model_folder, open_engines
    from cluster.experiments.peers.methods import build_questions, marker_id
    from cluster.experiments.workload import load_answers, load_experiment_text

    with model_folder(settings) as model_path:
        text = load_experiment_text(settings, model_path)
        answers = load_answers(settings.trace, settings, text)
        arguments = {"max_model_len": settings.context_tokens, **settings.engine}
        settings = settings.model_copy(update={"engine": arguments})
        number = settings.num_engines(len(settings.methods))
        with open_engines(settings, model_path, number) as engines:
            engine = engines[0]
            least_tokens = round(min(settings.kv_shares) * engine.num_blocks) * engine.block_size
            questions = build_questions(
                answers,
                settings.trace,
                text,
                max_model_tokens=min(settings.context_tokens, least_tokens),
            )
            tokens = text.tokens
            taken = (tokens.fork_id, tokens.child_id, tokens.end_id)
            marker = marker_id(engine.engine.tokenizer, taken)
            runner = PeerRunner(engines, questions, marker, settings, store)
            runner.warm_up()
            for keys in runner.groups(keys_of(settings)):
                runner.run(keys, start_stage(_title(keys), len(questions) * len(keys)))


def _title(keys: Sequence[RunKey]) -> str:
    methods = keys[0].method if len(keys) == 1 else f"{len(keys)} methods side by side"
    return f"round {keys[0].round + 1}, {keys[0].kv_share:g} of KV, {methods}"


def _report(settings: PeerSettings, store: RunStore) -> Report:
    from apar_core.reporting import Report
    from cluster.experiments.peers.plot import peers_figure
    from cluster.experiments.peers.table import (
        comparison_table,
        comparisons,
        peer_goals,
        standing_table,
    )

    found = comparisons(store.lines)
    facts = {
        "Model": settings.model,
        "Trace": str(settings.trace),
        "Questions": f"{settings.max_requests} under way at once, kept by their clients",
        "Time": "no client pays for network, HTTP or tokenising; all methods in one process, "
        f"{settings.order}; every answer was compared with the text of the trace",
    }
    for number, goal in enumerate(peer_goals(found), start=1):
        facts[f"Goal {number}"] = goal.line
    tables = [standing_table(found), *(comparison_table(each) for each in found)]
    data = {"runs": [run.model_dump(mode="json") for run in store.lines.values()]}
    return Report(
        "Ways of answering in parallel, side by side",
        facts,
        tables,
        {"peers": peers_figure(found)},
        data,
    )
