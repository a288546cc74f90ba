"""`apar experiment profile` from its settings to its report, mode by mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apar_core.reporting import Report
from cluster.experiments.parts import PartStore, StartStage
from cluster.experiments.settings import ExperimentSettings

if TYPE_CHECKING:
    from cluster.experiments.step_profile import ProfileLoad


def profile_settings(
    *, trace: Path, model: str, answers: int, load: ProfileLoad
) -> ExperimentSettings:
    """An engine with room for all requests and their threads at once."""
    max_tokens = 640
    rows = max(512, 8 * load.num_requests)
    return ExperimentSettings(
        model=model,
        trace=trace,
        answers=answers,
        max_tokens=max_tokens,
        kv_tokens=max_tokens * load.num_requests,
        kv_shares=(1.0,),
        mixed_kv_shares=(1.0,),
        engine={"max_num_seqs": rows, "max_num_batched_tokens": 2 * rows},
    )


def report_profile(
    settings: ExperimentSettings, load: ProfileLoad, folder: Path, start_stage: StartStage
) -> Report:
    """Time the parts of a step in each mode that the folder does not have, and report them."""
    from cluster.experiments.cost_plots import profile_figure
    from cluster.experiments.step_profile import MODES, StepProfile, profile_table

    store = PartStore(
        folder, settings.as_text() | {f"load_{k}": str(v) for k, v in asdict(load).items()}
    )
    if not all(store.has(mode) for mode in MODES):
        _measure_profiles(settings, load, store, start_stage)
    profiles = {mode: StepProfile(**store.get_or_do(mode, dict)) for mode in MODES}
    facts = {"Trace": str(settings.trace), "Model": settings.model}
    return Report(
        "Where the time of a step goes",
        facts,
        [profile_table(profiles, load)],
        {"profile": profile_figure(profiles)},
        {"profiles": {mode: asdict(each) for mode, each in profiles.items()}},
    )


def _measure_profiles(
    settings: ExperimentSettings, load: ProfileLoad, store: PartStore, start_stage: StartStage
) -> None:
    from cluster.experiments.experiment_engine import Conditions
    from cluster.experiments.open_engine import model_folder, open_engine
    from cluster.experiments.step_profile import MODES, profile_steps
    from cluster.experiments.workload import load_answers, load_experiment_text

    with model_folder(settings) as path:
        text = load_experiment_text(settings, path)
        answers = load_answers(settings.trace, settings, text)
        with open_engine(settings, path) as engine:
            done = start_stage("modes", len(MODES))
            step_s = 1.0
            for mode, policy in MODES.items():
                target_s = settings.token_time_multiple * step_s
                conditions = Conditions(policy=policy or "eager", token_time_s=target_s)

                def measured(
                    conditions: Conditions = conditions, forks: bool = policy is not None
                ) -> dict[str, Any]:
                    found = profile_steps(engine, answers, load, conditions, forks=forks)
                    return asdict(found)

                kept = store.get_or_do(mode, measured)
                if policy is None:
                    step_s = _step_s(kept)
                done()


def _step_s(profile: Mapping[str, Any]) -> float:
    return float(sum(profile["seconds"].values()))
