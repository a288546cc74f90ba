from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from apar_core.attention.settings import FamilySettings
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.files import write_costs
from cluster.lab.simulation.cluster import Cluster, ClusterRun
from cluster.lab.simulation.measures import measure, ratio, summarise
from cluster.lab.simulation.report import simulation_report
from cluster.lab.simulation.runs import cluster_settings, run_case
from cluster.lab.simulation.settings import Case, SimulationSettings
from cluster.lab.simulation.workload import Answer, RecordedArrivals, RecordedData, SimRequest
from cluster.lab.virtual.text import checkpoint_tokens
from deployments.config.model import ModelConfig
from deployments.config.retries import RetryConfig
from deployments.config.routing import RoutingPolicy

TOKENS = checkpoint_tokens()
COSTS = StepCosts("test GPU", "predicted", "made up", ((1, 0.01), (64, 0.02)), 1e-6)
CONFIG = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}


def answer(category: str, *details: int) -> Answer:
    """A list with one item per detail of so many tokens; without details one thread."""
    if not details:
        single = [*range(300, 340), TOKENS.end_id]
        return Answer(category, {"": single}, single, 30, len(single))
    item = [200, 201, 202]
    root = [token for _ in details for token in (*item, TOKENS.fork_id)] + [TOKENS.end_id]
    threads = {"": root}
    flat: list[int] = []
    ends = [len(root)]
    for number, length in enumerate(details):
        text = list(range(400, 400 + length))
        threads[str(number)] = [*text, TOKENS.end_id]
        flat += [*item, *text]
        ends.append(4 * (number + 1) + length + 1)
    return Answer(category, threads, [*flat, TOKENS.end_id], 30, max(ends))


DATA = RecordedData(
    [answer("plain"), answer("list", 30, 50, 40), answer("list", 20, 20)],
    RecordedArrivals((0.1, 0.1, 3.0, 0.2, 0.1, 1.0, 0.5), (40, 300, 90, 700, 20, 900, 120)),
)
FOLDER = TemporaryDirectory()


def small_replica(costs: StepCosts = COSTS) -> dict[str, Any]:
    """Options of replicas of a small model with made-up step costs."""
    folder = Path(FOLDER.name)
    config = {**CONFIG, "vocab_size": 100, "max_position_embeddings": 4096, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 1024}))
    file = folder / f"{hash(costs)}.json"
    write_costs(costs, file)
    return {"trace": [], "model": str(folder), "costs": file, "kv_tokens": 8192}


def settings_of(costs: StepCosts = COSTS, **given: Any) -> SimulationSettings:
    usual = {"concurrency": 8, "duration_s": 8.0, "replicas": (3,), "rate": (20.0,)}
    return SimulationSettings(**{**small_replica(costs), **usual, **given})


SETTINGS = settings_of()
CASE = Case(3, 20.0, None, "threads", "eager")


def run(case: Case = CASE, seed: int = 0, **changes: Any) -> ClusterRun:
    return run_case(settings_of(**changes), DATA, case, seed)[1]


@cache
def undisturbed() -> ClusterRun:
    return run()


@pytest.mark.parametrize("router", [policy.value for policy in RoutingPolicy])
def test_every_request_is_answered_whole_with_every_router(router: str) -> None:
    found = run(CASE._replace(router=router))

    assert len(found.outcomes) == 160
    for outcome in found.outcomes:
        assert outcome.error is None
        assert outcome.first_token_s is not None
        assert outcome.end_s is not None
        assert outcome.request.arrival_s < outcome.first_token_s < outcome.end_s
        tokens = sum(map(len, outcome.request.answer.threads.values()))
        assert outcome.generated_tokens == tokens


def test_two_runs_are_identical() -> None:
    ends = [
        [(each.replica_id, each.end_s) for each in found.outcomes]
        for found in (undisturbed(), run())
    ]

    assert ends[0] == ends[1]


def test_all_policies_get_the_same_requests_and_forks_shorten_them() -> None:
    plain = run(CASE._replace(fork_policy="off"))

    forked = undisturbed()
    assert plain.forks == 0 < forked.forks
    pairs = zip(plain.outcomes, forked.outcomes, strict=True)
    assert all(
        a.request.arrival_s == b.request.arrival_s and a.request.answer is b.request.answer
        for a, b in pairs
    )
    assert measure(forked).mean_s < measure(plain).mean_s


@pytest.mark.slow
def test_with_family_attention_threads_are_answered_in_shorter_steps() -> None:
    class Grouped(SimulationSettings):
        @property
        def family(self) -> FamilySettings:
            return FamilySettings(min_prefix_blocks=1)

    costs = replace(COSTS, attended_token_s=2e-5)
    plain = settings_of(costs, duration_s=2.0, replicas=(1,))
    ordinary, family = (
        run_case(settings, DATA, CASE, 0)[1] for settings in (plain, Grouped(**plain.model_dump()))
    )

    assert [each.generated_tokens for each in ordinary.outcomes] == [
        each.generated_tokens for each in family.outcomes
    ]
    assert measure(family).token_p50_s < measure(ordinary).token_p50_s


def test_the_requests_of_a_dead_replica_continue_on_another() -> None:
    found = run(kill=[3.0], start_delay_s=1.0)

    lost = [outcome for outcome in found.outcomes if outcome.retries]
    assert lost
    assert all(outcome.error is None for outcome in found.outcomes)
    assert all(outcome.replica_id != "replica-0" for outcome in lost)
    for outcome in lost:
        assert outcome.generated_tokens == sum(map(len, outcome.request.answer.threads.values()))
    assert "replica-3" in {outcome.replica_id for outcome in found.outcomes}
    # A continued stream has kept its first token from before the death.
    assert any(outcome.first_token_s < 3.0 < outcome.end_s for outcome in lost)  # type: ignore[operator]


def test_streams_end_with_their_replica_if_they_may_not_continue() -> None:
    settings = cluster_settings(settings_of(kill=[3.0]), CASE)
    settings = replace(settings, retries=RetryConfig(continue_streams=False))
    requests = DATA.workload(0).requests(SETTINGS.stages(CASE))

    found = Cluster(settings).run(requests)

    assert {outcome.error for outcome in found.outcomes} == {None, "stream lost"}


def test_a_replica_that_joins_takes_requests() -> None:
    found = run(join=[2.0])

    joined = [each for each in found.outcomes if each.replica_id == "replica-3"]
    assert joined
    assert all(each.sent_s is not None and each.sent_s >= 2.0 for each in joined)


def test_the_router_sends_less_to_a_slow_replica() -> None:
    found = run(slow=1, slowness=4.0)

    counts = [sum(each.replica_id == f"replica-{n}" for each in found.outcomes) for n in range(3)]
    assert counts[2] < 0.7 * min(counts[:2])


def test_requests_beyond_the_caps_wait_and_then_are_refused() -> None:
    model = ModelConfig(max_concurrency=2, max_queued_requests=10, max_queue_s=1.0)
    settings = replace(cluster_settings(SETTINGS, CASE), model=model)

    found = Cluster(settings).run(DATA.workload(0).requests([(4.0, 60.0)]))

    errors = {outcome.error for outcome in found.outcomes}
    assert errors == {None, "queue full", "queue timeout"}
    assert max(sample.queued for sample in found.samples) == 10
    assert max(sample.requests for sample in found.samples) == 6


def test_the_autoscaler_follows_a_surge() -> None:
    case = Case(1, 6.0, None, "threads", "eager", target_threads=6.0)

    found = run(case, autoscale=(1, 6), surge=6.0, duration_s=36.0, start_delay_s=2.0)

    replicas = [len(sample.threads) for sample in found.samples]
    assert replicas[0] == 1
    assert max(replicas) > 2
    assert found.replica_s > len(found.samples)


def test_several_gateways_share_the_replicas() -> None:
    found = run(gateways=3)

    assert all(outcome.error is None for outcome in found.outcomes)


def test_conversations_and_system_prompts_hit_the_prefix_cache() -> None:
    found = run(CASE._replace(replicas=1, rate=2.0), duration_s=50.0)

    assert 0.05 < measure(found).cached < 0.6


def test_the_workload_of_a_seed_is_the_same_whatever_serves_it() -> None:
    def drawn(seed: int) -> list[SimRequest]:
        return DATA.workload(seed).requests([(10.0, 5.0)])

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(drawn(1)) == 50
    assert drawn(1)[-1].arrival_s == pytest.approx(10.0)


def test_measures_of_seeds_are_combined() -> None:
    measures = [measure(undisturbed()), measure(run(seed=1))]

    summary = summarise(measures)

    means = [each.mean_s for each in measures]
    assert summary.mean.mean_s == pytest.approx(sum(means) / 2)
    assert summary.half_width.mean_s == pytest.approx(12.706 * abs(means[0] - means[1]) / 2)
    assert ratio(measures, measures, lambda m: m.mean_s) == (1.0, 0.0)


def test_the_report_says_what_is_predicted() -> None:
    from cluster.lab.simulation.runs import CaseResult

    settings = settings_of(router=("threads", "random"), seeds=2, duration_s=2.0)
    results = [
        CaseResult(case, tuple(run_case(settings, DATA, case, seed)[0] for seed in range(2)))
        for case in settings.cases(None)
    ]

    report = simulation_report(settings, results, None)

    assert "predicted for test GPU" in report.title
    assert [table.name for table in report.tables] == ["latency", "ratios", "balance", "counts"]
    assert all("predicted" in table.title for table in report.tables if table.name != "ratios")
    assert "random" in report.tables[1].as_markdown()
