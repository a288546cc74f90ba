from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from apar_core.step_costs.costs import StepCosts
from cluster.lab.experiments.parts import PartStore
from cluster.lab.simulation import goodput
from cluster.lab.simulation.goodput import (
    RateRun,
    Search,
    find_goodput,
    goodput_report,
    rate_bound,
    search_rates,
    searches_of,
)
from cluster.lab.simulation.runs import replica_capacity
from cluster.lab.simulation.settings import ADAPTIVE, NO_FORKS, GoodputSettings, Objective
from cluster.lab.simulation.workload import Answer, RecordedData, read_data
from cluster.lab.sizing.search import rate_place
from tests.unit.cluster.lab.simulation.test_cluster import DATA, TOKENS, answer, small_replica

STRICT, LOOSE = "ttft=1s,tpot=1.5x", "ttft=2s,tpot=3x"
FORKS_ONLY = "ttft=1s,tpot=0.8x"
# Prompts of a thousand tokens cost little.
COSTS = StepCosts("test GPU", "predicted", "made up", ((1, 0.01), (64, 0.02), (4096, 0.03)), 1e-7)
MARGIN = 0.04
# Tokens of the text and of the prompt.
PLAIN = ((100, 40), (250, 300), (60, 900))
LISTS = (
    replace(answer("list", 60, 90, 70), prompt_tokens=80),
    replace(answer("list", 40, 40, 40, 40, 60), prompt_tokens=40),
    replace(answer("list", 120, 80), prompt_tokens=500),
)
POISSON = RecordedData([each for each in DATA.answers if len(each.threads) > 1], None)


def plain(text_tokens: int, prompt_tokens: int) -> Answer:
    tokens = [*range(300, 300 + text_tokens), TOKENS.end_id]
    return Answer("plain", {"": tokens}, tokens, prompt_tokens, len(tokens))


def settings_of(
    *slos: str, methods: tuple[str, ...] = (NO_FORKS, "eager"), **given: Any
) -> GoodputSettings:
    load = {"slo": list(slos), "methods": methods, "concurrency": 64, "requests": 120}
    return GoodputSettings(**{**small_replica(COSTS), **load, **given})


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "_LEAST_S", 1.0)


def started(_stage: str, _total: int) -> Callable[[], None]:
    return lambda: None


def test_limits_are_times_or_multiples_of_a_step_and_wrong_ones_are_refused() -> None:
    step_s = settings_of().step_s

    (found,) = settings_of("ttft=1s, tpot=1.5x").objectives

    assert found.limits == {"ttft": 1.0, "tpot": pytest.approx(1.5 * step_s)}
    with pytest.raises(EvaluationError, match="unknown time 'latency'; known: ttft, certain"):
        _ = settings_of("latency=1s").objectives


def test_the_adaptive_policy_needs_a_time_per_token() -> None:
    with pytest.raises(EvaluationError, match="adaptive policy needs a limit on tpot"):
        searches_of(settings_of("e2e=1s", methods=("adaptive",)))

    searches = searches_of(settings_of(STRICT, "ttft=3s,tpot=1.5x", LOOSE, methods=("adaptive",)))
    assert [search.slos for search in searches] == [(STRICT, "ttft=3s,tpot=1.5x"), (LOOSE,)]


def test_forks_take_three_steps_of_a_limit_on_silence() -> None:
    assert Objective("", {"tpot": 0.03, "silence": 0.06}).token_s == pytest.approx(0.02)
    assert Objective("", {"tpot": 0.03, "silence": 0.3}).token_s == pytest.approx(0.03)


@pytest.mark.ci
@pytest.mark.parametrize("method", [NO_FORKS, "eager"])
def test_the_highest_rate_meets_the_slo_and_no_rate_exceeds_the_bound(method: str) -> None:
    settings = settings_of(STRICT, FORKS_ONLY)

    runs = search_rates(settings, POISSON, 60.0, Search(method, tuple(settings.slo)))

    for slo in settings.objectives:
        within = [run for run in runs if run.shares[slo.text] >= settings.share]
        if method == NO_FORKS and slo.text == FORKS_ONLY:
            assert within == []
            continue
        best = max(within, key=lambda run: run.place)
        following = [run for run in runs if run.place == best.place + 1]
        assert all(run.shares[slo.text] < settings.share for run in following)
        requests = POISSON.workload(0).requests([(100.0, 10.0)], forked=method != NO_FORKS)
        bound = rate_bound(settings, requests, slo)
        assert bound is not None
        assert best.rate <= 1.05 * bound


def test_forks_make_tokens_certain_sooner_although_the_first_comes_no_sooner() -> None:
    settings = settings_of(LOOSE)
    # One request at a time.
    place = rate_place(0.05)
    runs = {}
    for method in (NO_FORKS, "eager"):
        nominal = goodput.nominal_requests(settings, POISSON, method, 0.1)[:20]
        runs[method] = goodput.run_rate(settings, method, None, nominal, place).p95

    assert runs["eager"]["ttft"] == pytest.approx(runs[NO_FORKS]["ttft"])
    assert runs["eager"]["ttft"] < runs["eager"]["certain"] < runs["eager"]["e2e"]
    assert runs["eager"]["certain"] < 0.9 * runs[NO_FORKS]["certain"]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(1800)
def test_at_no_rate_do_adaptive_forks_keep_fewer_requests_within_the_slo() -> None:
    """Whole answers, lists and long prompts on the A100, from a third of the capacity to beyond it.

    A rate at which the share falls from 100 % to nothing differs by a few requests of a run.
    """
    slos = ("ttft=1s,tpot=1.5x", "ttft=1s,tpot=3x", "ttft=1s,tpot=3x,silence=5x")
    settings = GoodputSettings(
        trace=[], model="llama-7b", gpu="a100-80gb", requests=400, slo=list(slos)
    )
    data = RecordedData([*(plain(*each) for each in PLAIN), *LISTS], None)
    capacity = replica_capacity(settings.base, data)

    def run(place: int, method: str, token_s: float | None = None) -> RateRun:
        nominal = goodput.nominal_requests(settings, data, method, capacity)
        return goodput.run_rate(settings, method, token_s, nominal, place)

    for share_of_capacity in (0.3, 0.6, 0.75, 0.9, 1.05):
        place = rate_place(share_of_capacity * capacity)
        others = [run(place, method) for method in (NO_FORKS, "eager")]
        for slo in settings.objectives:
            adaptive = run(place, ADAPTIVE, slo.token_s).shares[slo.text]
            best = max(other.shares[slo.text] for other in others)
            assert adaptive >= best - MARGIN, (slo.text, share_of_capacity, adaptive, best)


def test_a_seed_draws_other_requests_of_the_same_number_and_rate() -> None:
    drawn = [
        goodput.nominal_requests(settings_of(LOOSE, seed=seed), POISSON, "eager", 5.0)
        for seed in (0, 0, 1)
    ]
    arrivals = [[each.arrival_s for each in requests] for requests in drawn]

    assert arrivals[0] == arrivals[1] != arrivals[2]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    tips = ("Sleep: go to bed early", "Eat: cook with vegetables", "Walk: take the stairs")
    response = "\n".join(
        f"{number}. {tip}{', again and again' * 12}." for number, tip in enumerate(tips, 1)
    )
    line = {"prompt": "Give me 3 tips.", "response": response, "category": "list"}
    file.write_text(json.dumps(line) + "\n")
    return file


def test_lists_without_training_make_tokens_certain_sooner(trace: Path) -> None:
    settings = settings_of(LOOSE, trace=[trace], methods=(NO_FORKS, "lists"))
    data = read_data(settings.trace, None, lists=True)
    runs: dict[str, RateRun] = {}
    for method in settings.methods:
        # Each request finds its prompt, and the answers in it, in the prefix cache.
        nominal = goodput.nominal_requests(settings, data, method, 0.1)[:20]
        runs[method] = goodput.run_rate(settings, method, None, nominal, rate_place(0.05))

    assert runs["lists"].failed == runs[NO_FORKS].failed == 0.0
    assert runs["lists"].rows > 1.2 * runs[NO_FORKS].rows
    assert runs["lists"].p95["certain"] < runs[NO_FORKS].p95["certain"]
    assert runs["lists"].p95["e2e"] < 0.9 * runs[NO_FORKS].p95["e2e"]


def test_finished_searches_are_not_repeated(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(LOOSE, trace=[trace], requests=50)

    def find() -> list[goodput.Goodput]:
        return find_goodput(settings, PartStore(tmp_path, settings.as_text()), 1, started)

    first = find()
    monkeypatch.setattr(goodput, "run_rate", None)
    second = find()

    assert first == second
    assert all(each.rate > 0 for each in first)
    report = goodput_report(settings, second)
    table = report.tables[0]
    assert table.rows[0][0] == LOOSE
    assert table.rows[0][1] == first[0].rate
    assert table.rows[0][-1] == first[1].bound
    other = settings.model_copy(update={"share": 0.5})
    with pytest.raises(EvaluationError, match="share"):
        PartStore(tmp_path, other.as_text())
