"""A simulated replica ends every request, keeps its limits, and gives all its blocks back."""

import random
from dataclasses import replace

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.scheduler.fork_policy import AdaptivePolicy, EagerPolicy, ForkPolicy
from benchmarks.cluster_simulation.replica import SimReplica
from benchmarks.cluster_simulation.step_times import ReplicaModel, StepTimes
from benchmarks.cluster_simulation.threads import Outcome, SimRequest
from benchmarks.cluster_simulation.trees import AnswerTree, ThreadPlan
from deployments.wire.request import RequestHint

TIMES = StepTimes(5e-3, 20e-6, 0.2e-6, 25e-6)
MODEL = ReplicaModel("test", "none", TIMES, 400, 16, max_threads=8, max_requests=8)
EAGER = EagerPolicy()


def request(
    tree: AnswerTree,
    *,
    at_s: float = 0.0,
    prompt_tokens: int = 100,
    name: str = "r0",
    pieces: tuple[tuple[int, int], ...] = (),
) -> SimRequest:
    return SimRequest(name, at_s, prompt_tokens, tree, RequestHint(), pieces)


def serve(
    requests: list[SimRequest],
    model: ReplicaModel = MODEL,
    *,
    policy: ForkPolicy = EAGER,
    longest_chain: int = 1 << 40,
    slowness: float = 1.0,
) -> tuple[SimReplica, list[Outcome]]:
    """Serve requests, in order of arrival, until nothing happens any more."""
    env = simpy.Environment()
    replica = SimReplica(
        env, "replica", model, policy, longest_chain=longest_chain, slowness=slowness
    )
    ended: list[Outcome] = []
    for each in requests:
        arrival = env.timeout(each.arrival_s, value=Outcome(each))
        assert arrival.callbacks is not None
        arrival.callbacks.append(lambda event: replica.submit(event.value, ended.append))
    env.run()
    return replica, sorted(ended, key=lambda outcome: outcome.request.request_id)


def random_tree(rng: random.Random) -> AnswerTree:
    threads = [ThreadPlan(0)]
    for index in range(rng.choice([1, 1, 2, 4, 6])):
        if index:
            threads.append(ThreadPlan(0))
    forks: list[list[tuple[int, int]]] = [[] for _ in threads]
    lengths = [rng.randint(1, 60) for _ in threads]
    for child in range(1, len(threads)):
        parent = rng.randrange(child)
        lengths[parent] += 1
        forks[parent].append((0, child))
    for index, own in enumerate(forks):
        places = sorted(rng.sample(range(1, lengths[index] + 1), len(own)))
        if places and places[-1] == lengths[index]:
            lengths[index] += 1
        children = [child for _, child in own]
        plan = tuple(zip(places, children, strict=True))
        threads[index] = ThreadPlan(lengths[index], plan)
    total = sum(lengths) - len(threads) - (len(threads) - 1)
    return AnswerTree(tuple(threads), max(1, total))


def random_requests(seed: int, number: int, gap_s: float) -> list[SimRequest]:
    rng, at_s, requests = random.Random(seed), 0.0, []
    for index in range(number):
        at_s += rng.expovariate(1 / gap_s)
        prompt_tokens = rng.randint(60, 300)
        system = rng.choice([1, 2, 3])
        pieces = ((-system, 16 * system + 7), (1000 * seed + index, prompt_tokens))
        requests.append(
            request(
                random_tree(rng),
                at_s=at_s,
                prompt_tokens=prompt_tokens,
                name=f"r{index:03}",
                pieces=pieces if rng.random() < 0.7 else (),
            )
        )
    return requests


def test_one_request_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    replica, (outcome,) = serve([request(AnswerTree((ThreadPlan(50),), 49))])

    first_s = TIMES.step_s(1, 0, prefill=100)
    further_s = sum(TIMES.step_s(1, 100 + generated) for generated in range(1, 50))
    assert outcome.first_token_s == pytest.approx(first_s)
    assert outcome.end_s == pytest.approx(first_s + further_s)
    assert replica.engine.step == 50
    assert replica.busy_s == pytest.approx(outcome.end_s)


def test_a_slow_replica_takes_longer_by_its_slowness() -> None:
    tree = AnswerTree((ThreadPlan(50),), 49)

    (_, (usual,)), (_, (slow,)) = serve([request(tree)]), serve([request(tree)], slowness=2.0)

    assert slow.end_s == pytest.approx(2 * (usual.end_s or 0))


def test_a_child_runs_beside_its_parent_and_shares_its_blocks() -> None:
    tree = AnswerTree((ThreadPlan(100, ((10, 1),)), ThreadPlan(80)), 177)

    replica, (outcome,) = serve([request(tree)])

    # No step more than the parent's own: the child starts after token 10 and ends before it.
    assert replica.engine.step == tree.critical_steps == 100
    assert replica.engine.most_rows == 2
    root_s = TIMES.step_s(1, 0, prefill=100) + sum(TIMES.step_s(1, 100 + n) for n in range(1, 100))
    # The child's first step computes the fork and the child token, the others read 112 and more.
    child_s = TIMES.step_s(1, 0, prefill=2) + sum(TIMES.step_s(1, 111 + n) for n in range(1, 80))
    assert outcome.end_s == pytest.approx(root_s + child_s - 80 * TIMES.base_s)


def test_children_of_a_full_family_run_after_others_have_ended() -> None:
    children = tuple((10 + index, index + 1) for index in range(4))
    tree = AnswerTree((ThreadPlan(20, children), *[ThreadPlan(30)] * 4), 135)

    replica, (outcome,) = serve([request(tree)], replace(MODEL, max_request_threads=2))

    assert replica.engine.most_rows == 2
    assert outcome.generated_tokens == 140
    # From step 10 one child runs beside the root, which ends at 20 and makes place for the second;
    # the third starts at 40, the fourth at 50.
    assert replica.engine.step == 80


def test_short_memory_puts_the_youngest_request_off() -> None:
    trees = [AnswerTree((ThreadPlan(200),), 199)] * 2
    requests = [request(trees[0], name="old"), request(trees[1], name="young", at_s=1e-6)]

    replica, (old, young) = serve(requests, replace(MODEL, blocks=30))

    assert replica.engine.preemptions > 0
    assert (old.preemptions, young.preemptions) == (0, replica.engine.preemptions)
    assert old.end_s is not None
    assert young.end_s is not None
    assert old.end_s < young.end_s


def test_a_prompt_that_never_fits_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="do not fit into 5 blocks"):
        serve([request(AnswerTree((ThreadPlan(5),), 4))], replace(MODEL, blocks=5))


def test_the_beginning_of_a_prompt_is_computed_once_and_held_once() -> None:
    tree = AnswerTree((ThreadPlan(100),), 99)
    prompts = [((1, 64), (10, 100)), ((1, 64), (20, 100))]
    requests = [
        request(tree, name=f"r{index}", at_s=0.1 * index, pieces=pieces)
        for index, pieces in enumerate(prompts)
    ]

    _, (first, second) = serve(requests)
    # Each grows to 13 blocks; 22 are enough, as four of them are read by both.
    tight, _ = serve(requests, replace(MODEL, blocks=22))

    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
    assert tight.engine.preemptions == 0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.sampled_from([50, 80, 400]),
    max_threads=st.sampled_from([2, 5, 64]),
    family=st.sampled_from([1, 2, 32]),
    step_tokens=st.sampled_from([128, 2048]),
    gap_s=st.sampled_from([0.001, 0.1, 1.0]),
    adaptive=st.booleans(),
)
def test_every_request_ends_once_within_the_limits_and_all_blocks_come_back(
    seed: int,
    blocks: int,
    max_threads: int,
    family: int,
    step_tokens: int,
    gap_s: float,
    adaptive: bool,
) -> None:
    model = replace(
        MODEL,
        blocks=blocks,
        max_threads=max_threads,
        max_request_threads=family,
        step_tokens=step_tokens,
    )
    requests = random_requests(seed, 12, gap_s)
    policy = AdaptivePolicy(0.0055) if adaptive else EAGER

    replica, outcomes = serve(requests, model, policy=policy)

    assert [outcome.request.request_id for outcome in outcomes] == [
        each.request_id for each in requests
    ]
    for outcome in outcomes:
        assert outcome.generated_tokens == outcome.request.tree.generated_tokens
        assert outcome.first_token_s is not None
        assert outcome.end_s is not None
        assert outcome.request.arrival_s < outcome.first_token_s <= outcome.end_s
    assert replica.engine.most_rows <= max_threads
    assert replica.engine.pool.free == blocks
    assert replica.engine.pool.piece_blocks == 0
    assert replica.engine.num_threads == replica.engine.num_waiting_forks == 0


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.sampled_from([60, 400]),
    max_threads=st.sampled_from([3, 64]),
    gap_s=st.sampled_from([0.001, 0.1, 1.0]),
)
def test_steps_taken_together_are_the_steps_taken_one_by_one(
    seed: int, blocks: int, max_threads: int, gap_s: float
) -> None:
    model = replace(MODEL, blocks=blocks, max_threads=max_threads)
    requests = random_requests(seed, 10, gap_s)

    together, fast = serve(requests, model)
    one_by_one, slow = serve(requests, model, longest_chain=1)

    assert together.engine.step == one_by_one.engine.step
    assert together.engine.preemptions == one_by_one.engine.preemptions
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours.end_s == pytest.approx(theirs.end_s, rel=1e-9)
        assert ours.first_token_s == pytest.approx(theirs.first_token_s, rel=1e-9)


def test_a_report_tells_the_state_amid_steps() -> None:
    env = simpy.Environment()
    replica = SimReplica(env, "replica", MODEL, EAGER)
    tree = AnswerTree((ThreadPlan(1000),), 999)
    replica.submit(Outcome(request(tree)), lambda outcome: None)

    env.run(until=1.0)
    load = replica.load()

    assert (load.requests, load.threads, load.waiting_forks) == (1, 1, 0)
    assert load.step_s == pytest.approx(TIMES.step_s(1, 200), rel=0.02)
    assert load.tokens_per_s == pytest.approx(1 / load.step_s, rel=0.02)
    held = -(-(100 + replica.steps_done() + replica.engine.step) // 16)
    assert load.blocks - load.free_blocks == pytest.approx(held, abs=1)
