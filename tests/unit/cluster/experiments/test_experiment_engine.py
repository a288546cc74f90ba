from types import SimpleNamespace
from typing import Any

import pytest

from apar_core.errors import EngineError
from cluster.experiments.experiment_engine import Conditions, ExperimentEngine


def opened(*, resets: bool = True, waiting: tuple[Any, ...] = ()) -> ExperimentEngine:
    """The engine of an experiment around a scheduler without any vLLM."""
    pool = SimpleNamespace(
        num_gpu_blocks=11,
        free_blocks=lambda blocks: None,
        get_new_blocks=lambda number: [None] * number,
        get_num_free_blocks=lambda: 10,
    )
    # Request b has forked: b~0 is its child.
    groups = {"b": "group", "b~0": "group"}
    scheduler = SimpleNamespace(
        block_size=32,
        requests={},
        waiting=waiting,
        threads=SimpleNamespace(group=groups.get, group_of_root={"b": "group"}.get),
        scheduler_config=SimpleNamespace(watermark=0.0),
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        gate=SimpleNamespace(),
        admission=SimpleNamespace(),
        reset_prefix_cache=lambda: resets,
        schedule=None,
        update_from_output=None,
        _preempt_request=None,
    )
    states = {name: SimpleNamespace(external_req_id=f"run-{name}") for name in ("a", "b", "b~0")}
    llm_engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    offline: Any = SimpleNamespace(llm=SimpleNamespace(llm_engine=llm_engine), scheduler=scheduler)
    return ExperimentEngine(offline, (1, 2))


def test_no_run_begins_with_what_an_earlier_one_has_cached() -> None:
    opened().prepare(Conditions())

    with pytest.raises(EngineError, match="the prefix cache was not reset"):
        opened(resets=False).prepare(Conditions())


def test_what_the_adaptive_policy_has_learned_is_kept_only_for_a_run_that_asks_for_it() -> None:
    engine = opened()
    models = []
    for keeps_learned in (False, True, False):
        conditions = Conditions(policy="adaptive", token_time_s=0.5, keeps_learned=keeps_learned)
        engine.prepare(conditions)
        assert engine.scheduler.admission.policy.token_time_s == 0.5
        models.append(engine.scheduler.admission.policy.model)

    assert models[1] is models[0]
    assert models[2] is not models[0]


def test_requests_that_wait_are_told_by_the_names_they_were_submitted_with() -> None:
    def request(name: str, preemptions: int = 0) -> SimpleNamespace:
        return SimpleNamespace(request_id=name, num_preemptions=preemptions)

    # A child waits for a step only, and what was preempted has begun before.
    engine = opened(waiting=(request("a"), request("b", 1), request("b~0")))

    assert engine.waiting_requests() == {"run-a"}
    assert engine.has_pending
    assert not opened(waiting=(request("b~0"),)).has_pending
