"""Routing policies: rules that hold for all of them, then each policy's own choices."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config.routing import RoutingPolicy, RoutingSettings
from deployments.routing.policies import POLICIES, Reason, Router, ThreadRouter, build_router
from deployments.wire.request import RequestHint
from tests.unit.deployments.routing.loads import FORKED, HINT, IDLE, PLAIN, busy


def router_of(*names: str, cap: int = 64, policy: str = "threads", affinity: float = 1.0) -> Router:
    settings = RoutingSettings(policy=RoutingPolicy(policy), affinity=affinity)
    router = build_router(settings, seed=1)
    router.replicas_changed(dict.fromkeys(names, cap))
    return router


def send(router: Router, request_id: str, hint: RequestHint = HINT, now_s: float = 1.0) -> str:
    chosen = router.choose(hint)
    assert chosen is not None
    router.sent(request_id, chosen, hint, now_s)
    return chosen


@given(
    num_requests=st.integers(1, 60),
    num_replicas=st.integers(1, 9),
    age_s=st.floats(0.0, 100.0),
    gap_s=st.floats(0.0, 0.5),
)
def test_a_burst_spreads_evenly_however_old_the_reports_are(
    num_requests: int, num_replicas: int, age_s: float, gap_s: float
) -> None:
    names = [f"r{index}" for index in range(num_replicas)]
    router = router_of(*names)
    for name in names:
        router.reported(name, busy(3, 9, step_s=0.02, at_s=1000.0 - age_s), 1000.0)

    now_s = 1000.0
    places: Counter[str] = Counter()
    for index in range(num_requests):
        places[send(router, str(index), now_s=now_s)] += 1
        now_s += gap_s

    counts = [places[name] for name in names]
    assert max(counts) - min(counts) <= 1


@given(
    policy=st.sampled_from(list(RoutingPolicy)),
    caps=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    reported=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    num_requests=st.integers(1, 30),
)
def test_no_replica_gets_more_than_its_cap(
    policy: RoutingPolicy, caps: list[int], reported: list[int], num_requests: int
) -> None:
    router = build_router(RoutingSettings(policy=policy), seed=1)
    router.replicas_changed({str(index): cap for index, cap in enumerate(caps)})
    for index in range(len(caps)):
        router.reported(str(index), busy(reported[index], reported[index], at_s=0.5), 0.5)
    room = {str(index): max(cap - reported[index], 0) for index, cap in enumerate(caps)}

    places: Counter[str] = Counter()
    for request in range(num_requests):
        chosen = router.choose(HINT)
        if chosen is None:
            break
        router.sent(str(request), chosen, HINT, 1.0)
        places[chosen] += 1

    assert all(places[name] <= room[name] for name in room)
    assert places.total() == min(num_requests, sum(room.values()))


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_a_full_cluster_takes_nothing_until_a_request_ends(policy: RoutingPolicy) -> None:
    router = router_of("a", "b", cap=1, policy=policy)
    first = send(router, "1")
    send(router, "2")
    assert router.choose(HINT) is None
    assert router.decisions[Reason.FULL] == 1

    router.ended("1", FORKED, 2.0)

    assert send(router, "3") == first
    assert router.decisions[Reason.ONLY_ONE] == 2


def test_fewer_threads_win_over_fewer_requests() -> None:
    router = router_of("forked", "plain")
    router.reported("forked", busy(2, 40), 0.0)
    router.reported("plain", busy(4, 4), 0.0)

    assert router.choose(HINT) == "plain"


def test_requests_are_spread_by_their_forecast() -> None:
    router = router_of("a", "b")
    plain = replace(HINT, may_fork=False)
    for index in range(50):
        router.sent(f"f{index}", "a", HINT, 0.0)
        router.ended(f"f{index}", FORKED, 0.0)
        router.sent(f"p{index}", "b", plain, 0.0)
        router.ended(f"p{index}", PLAIN, 0.0)

    forked_at = send(router, "forked")
    places = [send(router, f"plain{index}", plain) for index in range(3)]

    assert all(place != forked_at for place in places)


def test_a_slow_replica_gets_fewer_requests() -> None:
    router = router_of("slow", "fast")
    for index in range(50):
        at_s = index * 0.1
        router.reported("slow", busy(8, 16, step_s=0.06, at_s=at_s), at_s)
        router.reported("fast", busy(8, 16, step_s=0.02, at_s=at_s), at_s)

    places = Counter(send(router, str(index), now_s=5.0) for index in range(20))

    assert places["fast"] >= 15


def test_a_replica_whose_cache_is_full_is_avoided() -> None:
    router = router_of("full", "free")
    router.reported("full", replace(busy(2, 4), free_blocks=10), 0.0)
    router.reported("free", replace(busy(2, 8), free_blocks=9_000), 0.0)

    assert router.choose(RequestHint(prompt_tokens=800)) == "free"


def test_waiting_forks_make_a_replica_less_attractive() -> None:
    router = router_of("held", "other")
    router.reported("held", replace(busy(2, 4), waiting_forks=30), 0.0)
    router.reported("other", busy(2, 6), 0.0)

    assert router.choose(HINT) == "other"


def test_a_forking_request_goes_where_it_slows_fewer_requests() -> None:
    router = router_of("many", "few")
    for index in range(50):
        router.sent(f"f{index}", "many", HINT, 0.0)
        router.ended(f"f{index}", FORKED, 0.0)
    router.reported("many", busy(10, 10), 0.0)
    router.reported("few", busy(1, 16), 0.0)

    # About 8 threads are expected. They would slow 10 requests or 1.
    assert router.choose(HINT) == "few"


@pytest.mark.parametrize(("prompt_tokens", "place"), [(64, "many"), (20_000, "few")])
def test_a_long_prompt_goes_where_it_delays_fewer_requests(prompt_tokens: int, place: str) -> None:
    router = router_of("many", "few")
    router.reported("many", busy(10, 10), 0.0)
    router.reported("few", busy(1, 40), 0.0)

    assert router.choose(RequestHint(prompt_tokens, may_fork=False)) == place


def test_a_cached_prefix_saves_more_where_more_requests_would_be_delayed() -> None:
    router = router_of("home", "other")
    first = RequestHint(1500, None, (1, 2), False, (1000, 1500))
    router.sent("0", "home", first, 0.5)
    router.ended("0", PLAIN, 0.6)
    router.reported("home", busy(4, 12, at_s=1.0), 1.0)
    router.reported("other", busy(4, 4, at_s=1.0), 1.0)

    # In units of per_thread_s: 8 more threads in 256 steps cost 2048; 1500 tokens for 5 requests
    # cost 3750.
    assert router.choose(first) == "home"
    # 300 tokens for 5 requests cost 750.
    assert router.choose(replace(first, prompt_tokens=300, prefix_tokens=(200, 300))) == "other"


def turn(number: int, *, conversation: int = 7) -> RequestHint:
    """Hint of the n-th turn, which repeats all pieces of the turn before."""
    pieces = 2 * number + 2
    hashes = (1, *(conversation * 1000 + piece for piece in range(1, pieces)))
    tokens = tuple(300 * (piece + 1) for piece in range(pieces))
    return RequestHint(tokens[-1], None, hashes, True, tokens)


@pytest.mark.parametrize("affinity", [0.0, 1.0])
def test_the_turns_of_a_conversation_stay_where_its_prefix_is_cached(affinity: float) -> None:
    router = router_of(*"abcdefgh", affinity=affinity)
    for name in "abcdefgh":
        router.reported(name, IDLE, 0.0)
    places = []
    for number in range(6):
        places.append(send(router, str(number), turn(number)))
        router.ended(str(number), PLAIN, 1.5)

    if affinity:
        assert len(set(places)) == 1
        assert router.decisions[Reason.AFFINITY] >= 3
    else:
        assert len(set(places)) > 1
        assert router.decisions[Reason.AFFINITY] == 0


def test_prefixes_are_tracked_beyond_the_first_slots() -> None:
    names = [f"r{index}" for index in range(20)]
    router = router_of(*names)
    router.sent("0", "r19", turn(0), 1.0)
    router.ended("0", PLAIN, 1.1)
    successor = router_of(*names[:2])
    successor.adopt(router)

    assert router.choose(turn(1)) == "r19"
    successor.sent("1", "r18", turn(0), 1.3)
    successor.ended("1", PLAIN, 1.4)
    assert successor.choose(turn(1)) == "r18"


def test_a_request_sent_to_a_removed_replica_is_not_counted() -> None:
    router = router_of("a")

    router.sent("1", "gone", turn(0), 1.0)

    assert (router.num_sent, router.replica_of("1")) == (0, None)
    assert router.table.requests.sum() == 0


def test_affinity_yields_when_its_replica_is_overloaded() -> None:
    router = router_of("a", "b")
    home = send(router, "0", turn(0))
    router.ended("0", PLAIN, 1.1)
    other = "b" if home == "a" else "a"
    router.reported(home, busy(40, 300, step_s=0.1, at_s=2.0), 2.0)
    router.reported(other, busy(1, 2, step_s=0.02, at_s=2.0), 2.0)

    assert send(router, "1", turn(1), now_s=3.0) == other


def test_a_shared_system_prompt_does_not_send_everything_to_one_replica() -> None:
    router = router_of(*"abcd")
    for name in "abcd":
        router.reported(name, IDLE, 0.0)
    places = Counter(
        send(router, str(number), RequestHint(400, None, (1, 100 + number), True, (380, 400)))
        for number in range(40)
    )

    assert min(places[name] for name in "abcd") >= 7


def test_a_prefix_is_evicted_after_enough_other_tokens() -> None:
    router = router_of("a", "b")
    for name in "ab":
        router.reported(name, replace(IDLE, blocks=200, free_blocks=200), 0.0)
    home = send(router, "0", turn(0))
    router.ended("0", PLAIN, 1.1)
    assert router.choose(turn(1)) == home

    for index in range(10):
        router.sent(f"x{index}", home, RequestHint(prompt_tokens=600), 1.3)
        router.ended(f"x{index}", PLAIN, 1.4)

    before = router.decisions[Reason.AFFINITY]
    for _ in range(10):
        router.choose(turn(1))
    assert router.decisions[Reason.AFFINITY] == before


def test_a_reused_slot_has_no_prefixes() -> None:
    router = router_of("a", "b")
    home = send(router, "0", turn(0))
    stays = "b" if home == "a" else "a"
    router.replicas_changed({stays: 64})
    router.replicas_changed({stays: 64, "new": 64})

    choices = {router.choose(turn(1)) for _ in range(30)}

    assert choices == {stays, "new"}


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_ended_requests_are_no_longer_counted(policy: RoutingPolicy) -> None:
    router = router_of("a", "b", policy=policy)
    for index in range(10):
        send(router, str(index))
    for index in range(10):
        router.ended(str(index), PLAIN if index % 2 else None, 2.0)
        router.ended(str(index), PLAIN, 2.0)  # A second call changes nothing.

    assert router.num_sent == 0
    assert router.table.requests.sum() == router.table.threads.sum() == 0


def test_a_request_sent_to_another_replica_leaves_the_first() -> None:
    router = router_of("a", "b")
    router.sent("1", "a", HINT, 0.0)
    router.sent("1", "b", HINT, 1.0)

    router.released("1", 2.0, replica_id="a")  # The late end of the first call.
    assert router.replica_of("1") == "b"
    assert router.table.requests.sum() == 1

    router.released("1", 2.0, replica_id="b")
    assert router.table.requests.sum() == 0


def test_the_cost_is_learnt_after_the_release() -> None:
    router = router_of("a")
    for index in range(50):
        send(router, str(index))
        router.released(str(index), 1.0)
        router.ended(str(index), FORKED, 1.1)

    assert router.forecaster.forecast(HINT).threads > 6


def test_requests_at_a_removed_replica_are_no_longer_counted() -> None:
    router = router_of("a", "b")
    first = send(router, "1")
    survivor = "b" if first == "a" else "a"
    router.replicas_changed({survivor: 64})

    assert router.num_sent == 0
    assert send(router, "2") == survivor
    router.ended("1", None, 2.0)
    assert router.table.requests.sum() == 1


def test_an_idle_report_removes_requests_that_never_arrived() -> None:
    router = router_of("a")
    send(router, "1", now_s=101.0)
    router.reported("a", replace(IDLE, taken_at_s=102.0), 102.0)
    assert router.num_sent == 1

    router.reported("a", replace(IDLE, taken_at_s=160.0), 160.0)
    assert router.num_sent == 0
    assert router.table.requests.sum() == 0


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_equal_seeds_choose_equally(policy: RoutingPolicy) -> None:
    def places() -> list[str]:
        router = router_of(*"abcdef", policy=policy)
        return [send(router, str(index)) for index in range(50)]

    assert places() == places()


def built(policy: RoutingPolicy) -> Router:
    return build_router(RoutingSettings(policy=policy), seed=3)


def test_every_policy_of_the_configuration_can_be_built() -> None:
    assert set(POLICIES) == set(RoutingPolicy)
    assert {type(built(policy)) for policy in RoutingPolicy} == set(POLICIES.values())


def test_round_robin_takes_the_replicas_in_turn_and_skips_full_ones() -> None:
    router = built(RoutingPolicy.ROUND_ROBIN)
    router.replicas_changed({"a": 9, "b": 9, "c": 9})
    assert [router.choose(HINT) for _ in range(4)] == ["a", "b", "c", "a"]

    router.reported("b", busy(9, 9), 0.0)
    assert [router.choose(HINT) for _ in range(3)] == ["c", "a", "c"]


def test_fewest_requests_counts_requests_and_not_threads() -> None:
    router = built(RoutingPolicy.FEWEST_REQUESTS)
    router.replicas_changed({"a": 9, "b": 9})
    router.reported("a", busy(1, 50), 0.0)
    router.reported("b", busy(2, 2), 0.0)

    assert router.choose(HINT) == "a"


def places(router: Router) -> Counter[str | None]:
    router.replicas_changed(dict.fromkeys("abcd", 99))
    for name, requests in zip("abcd", (1, 2, 3, 4), strict=True):
        router.reported(name, busy(requests, requests), 0.0)
    return Counter(router.choose(HINT) for _ in range(1200))


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    counts = places(built(RoutingPolicy.POWER_OF_TWO))

    # Of the six pairs, the least loaded replica wins three, the next one two, and so on.
    assert counts["d"] == 0
    assert 520 < counts["a"] < 680
    assert 320 < counts["b"] < 480
    assert 140 < counts["c"] < 260


def test_random_choice_takes_any() -> None:
    counts = places(built(RoutingPolicy.RANDOM))

    assert all(220 < counts[name] < 380 for name in "abcd")


@pytest.mark.parametrize(("entries", "remembered"), [(2, False), (3, True)])
def test_affinity_entries_bounds_the_prefixes_remembered(entries: int, remembered: bool) -> None:
    router = build_router(RoutingSettings(affinity_entries=entries), seed=1)
    router.replicas_changed(dict.fromkeys("abcdefgh", 9))
    for name in "abcdefgh":
        router.reported(name, IDLE, 0.0)
    for prefix in (1, 2, 3):
        router.sent(str(prefix), "c", RequestHint(500, None, (prefix,)), 1.0)
        router.ended(str(prefix), None, 1.0)

    choices = {router.choose(RequestHint(500, None, (1,))) for _ in range(20)}

    assert (choices == {"c"}) is remembered
    assert (router.decisions[Reason.AFFINITY] > 0) is remembered


@pytest.mark.parametrize(("weight", "expected"), [(1.0, "few threads"), (0.6, "few requests")])
def test_with_family_attention_further_threads_of_a_request_count_less(
    weight: float, expected: str
) -> None:
    router = router_of("few threads", "few requests")
    for name, load in (("few threads", busy(3, 6)), ("few requests", busy(2, 8))):
        router.reported(name, replace(load, thread_weight=weight), 1.0)

    # One thread in steps with 6 others, and slowing 3 requests, or with 8 and 2: in units of a
    # first thread, 10 and 11, or 8.8 and 8.6.
    assert router.choose(replace(HINT, may_fork=False)) == expected


def test_a_fit_of_step_times_to_weighted_threads_predicts_them() -> None:
    router = router_of("a")
    for number in range(400):
        requests = 1 + number % 7
        load = busy(requests, 4 * requests, step_s=0.01 + 0.001 * requests * (1 + 0.6 * 3))
        report = replace(load, thread_weight=0.6, taken_at_s=float(number))
        router.reported("a", report, float(number))

    # The prior makes the slope a tenth less. Per thread without weights it would be 0.0007.
    assert router.table.step_time.per_thread_s == pytest.approx(0.001, rel=0.12)
    assert router.table.step_time.base_s == pytest.approx(0.01, rel=0.12)


def test_a_request_with_a_deadline_goes_where_it_meets_it() -> None:
    """A few large requests make its steps long; many small ones would be delayed by it."""
    router = router_of("few", "many")
    for second in range(5):
        router.reported("few", busy(1, 40, step_s=0.060, at_s=second), second)
        router.reported("many", busy(20, 20, step_s=0.040, at_s=second), second)
    for _ in range(300):
        router.forecaster.learn(HINT, FORKED)
    assert router.choose(HINT) == "few"
    assert isinstance(router, ThreadRouter)
    slots = [router.table.slots[name] for name in ("few", "many")]
    durations = router._durations(router.forecaster.forecast(HINT), HINT.prompt_tokens)
    first_s, answer_s = (times[slots] for times in durations)
    assert answer_s[1] < answer_s[0]
    between_s = float(answer_s.mean())

    assert router.choose(replace(HINT, answer_s=between_s)) == "many"
    assert router.choose(replace(HINT, answer_s=2 * float(answer_s[0]))) == "few"
    # Neither is in time: the answer ends first at "many".
    assert router.choose(replace(HINT, answer_s=0.001)) == "many"
    assert router.choose(replace(HINT, first_token_s=float(first_s.mean()))) == "many"
