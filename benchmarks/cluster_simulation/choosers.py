"""Who chooses the replica: the product's own routers, and an oracle to measure them by."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Protocol

from benchmarks.cluster_simulation.replica import SimReplica
from benchmarks.cluster_simulation.step_times import StepTimes
from benchmarks.cluster_simulation.threads import Outcome, SimRequest
from benchmarks.cluster_simulation.trees import AnswerTree
from cluster.config.routing import RoutingPolicy, RoutingSettings
from deployments.routing.policies import Router, build_router
from deployments.wire.answer import AnswerEnd
from deployments.wire.load import ReplicaLoad

ORACLE = "oracle"
MOST_COMPARED = 64
CHOOSERS = (*(policy.value for policy in RoutingPolicy), ORACLE)


class Chooser(Protocol):
    """What a simulated gateway asks and tells."""

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """The replica for a request; None where every one is at its cap."""

    def sent(self, request: SimRequest, replica_id: str, now_s: float) -> None:
        """The request goes there."""

    def ended(self, outcome: Outcome, now_s: float) -> None:
        """The request is over."""

    def reported(self, replica_id: str, load: ReplicaLoad, now_s: float) -> None:
        """A report has arrived, late as they are."""

    def replicas_changed(self, replicas: Mapping[str, SimReplica]) -> None:
        """The replicas that serve now."""


class RouterChooser:
    """One of the product's routers, driven as its gateway drives it."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """Ask the router; all that it sees of the request is its hint."""
        return self.router.choose(request.hint)

    def sent(self, request: SimRequest, replica_id: str, now_s: float) -> None:
        """Count it in the router."""
        self.router.sent(request.request_id, replica_id, request.hint, now_s)

    def ended(self, outcome: Outcome, now_s: float) -> None:
        """Tell the router what the request brought."""
        tree = outcome.request.tree
        end = AnswerEnd(
            prompt_tokens=outcome.request.prompt_tokens,
            generated_tokens=tree.generated_tokens,
            threads=len(tree.threads),
            forks=len(tree.threads) - 1,
            critical_path_tokens=tree.critical_steps,
        )
        self.router.ended(outcome.request.request_id, end, now_s)

    def reported(self, replica_id: str, load: ReplicaLoad, now_s: float) -> None:
        """Pass the report on."""
        self.router.reported(replica_id, load, now_s)

    def replicas_changed(self, replicas: Mapping[str, SimReplica]) -> None:
        """Pass the names and caps on."""
        caps = {name: replica.model.max_requests for name, replica in replicas.items()}
        self.router.replicas_changed(caps)


class OracleChooser:
    """Knows every tree and every replica's state at this moment; takes the least time lost.

    Lost is the request's own time there, over all steps of its longest path with the work that is
    really left, and the time by which it holds up the requests there; where its blocks do not fit,
    the time until others have ended. Work is what a request adds to steps: rows, attended tokens
    and prompt, less what the prefix cache really holds. Of more than 64 replicas it looks at 64,
    drawn at random for each request, as looking at 512 takes longer than all else.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._replicas: list[SimReplica] = []
        self._slots: dict[str, int] = {}
        self._sent_s: list[float] = []

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """Compare all replicas as they are now."""
        del now_s
        open_replicas = [
            replica
            for replica in self._replicas
            if replica.num_requests < replica.model.max_requests
        ]
        if not open_replicas:
            return None
        if len(open_replicas) > MOST_COMPARED:
            open_replicas = self._random.sample(open_replicas, MOST_COMPARED)
        steps = request.tree.critical_steps
        added_s = work_s(request, self._replicas[0].model.times)
        best = min(
            open_replicas, key=lambda replica: self._lost_s(replica, request, steps, added_s)
        )
        return best.replica_id

    def _lost_s(
        self, replica: SimReplica, request: SimRequest, steps: int, added_s: float
    ) -> float:
        model, engine = replica.model, replica.engine
        times, cached = model.times, engine.cached_tokens(request)
        added_s -= times.prefill_token_s * cached
        left_s = max(0.0, self._sent_s[self._slots[replica.replica_id]] - replica.work_done_s())
        now_s = times.step_s(engine.num_threads, engine.attended_tokens()) - times.base_s
        lost_s = steps * times.base_s + min(steps * now_s, left_s) + added_s
        lost_s += added_s * replica.num_requests
        wanted = (request.prompt_tokens - cached + request.tree.generated_tokens) / model.block_size
        short = wanted - engine.free_blocks_ahead()
        if short > 0 and engine.num_threads:
            step_s = times.base_s + now_s
            lost_s += short * model.block_size * step_s / engine.num_threads
        return lost_s * replica.slowness

    def sent(self, request: SimRequest, replica_id: str, now_s: float) -> None:
        """Add the request's work to what the replica has been given."""
        del now_s
        slot = self._slots[replica_id]
        replica = self._replicas[slot]
        saved_s = replica.model.times.prefill_token_s * replica.engine.cached_tokens(request)
        self._sent_s[slot] += work_s(request, replica.model.times) - saved_s

    def ended(self, outcome: Outcome, now_s: float) -> None:
        """Nothing: the replica's own count of its work has it."""

    def reported(self, replica_id: str, load: ReplicaLoad, now_s: float) -> None:
        """Nothing: it knows already."""

    def replicas_changed(self, replicas: Mapping[str, SimReplica]) -> None:
        """Take the replicas; made for a cluster that stays as it is."""
        self._replicas = list(replicas.values())
        self._slots = {name: slot for slot, name in enumerate(replicas)}
        self._sent_s = [0.0] * len(replicas)


def work_s(request: SimRequest, times: StepTimes) -> float:
    """Seconds that a request adds to the steps of its replica, all threads together."""
    return (
        times.prefill_token_s * request.prompt_tokens
        + times.row_s * request.tree.generated_tokens
        + times.attended_token_s * attended_tokens(request.tree, request.prompt_tokens)
    )


def attended_tokens(tree: AnswerTree, prompt_tokens: int) -> int:
    """Tokens of KV cache that all decoding rows of an answer read, summed over its steps."""
    begun = [prompt_tokens] * len(tree.threads)
    total = 0
    for index, thread in enumerate(tree.threads):
        for generated, child in thread.forks:
            begun[child] = begun[index] + generated + 1
        # The first token comes with the prompt; each other row reads one token more.
        rows = thread.num_tokens - 1
        total += rows * begun[index] + rows * (rows + 1) // 2
    return total


def build_choosers(name: str, gateways: int, seed: int) -> list[Chooser]:
    """One a gateway: the product's routers of that policy with default settings, or the oracle.

    There is one oracle for all gateways: it would know what the others send.
    """
    if name == ORACLE:
        return [OracleChooser()] * gateways
    settings = RoutingSettings(policy=RoutingPolicy(name))
    return [RouterChooser(build_router(settings, 1000 * seed + n)) for n in range(gateways)]
