"""Private names and behaviour of Ray Serve's request routing that our router relies on."""

import inspect

from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve._private.replica import UserCallableWrapper
from ray.serve._private.request_router.common import PendingRequest, RequestRoutingContext
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter
from ray.serve._private.router import AsyncioRouter

from deployments.routing.ray_router import ThreadRequestRouter


def test_our_router_overrides_what_ray_serve_calls() -> None:
    for name in (
        "initialize_state",
        "update_replicas",
        "choose_replicas",
        "on_replica_actor_died",
        "on_request_completed",
        "_choose_replica_for_request",
    ):
        ours, theirs = getattr(ThreadRequestRouter, name), getattr(RequestRouter, name)
        assert ours is not theirs
        assert name == "initialize_state" or (
            list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
        )
    assert "self._deployment_id = " in inspect.getsource(RequestRouter.__init__)
    assert issubclass(ThreadRequestRouter, FIFOMixin)


def test_a_pending_request_shows_its_arguments_and_its_future() -> None:
    fields = PendingRequest.__dataclass_fields__
    assert {"args", "kwargs", "metadata", "future", "routing_context"} <= set(fields)
    assert "should_backoff" in RequestRoutingContext.__dataclass_fields__
    assert "internal_request_id" in RequestMetadata.__dataclass_fields__


def test_a_replica_shows_its_id_its_cap_and_its_report() -> None:
    assert isinstance(RunningReplica.routing_stats, property)
    assert isinstance(RunningReplica.max_ongoing_requests, property)
    assert isinstance(RunningReplica.replica_id, property)
    assert "unique_id" in ReplicaID.__dataclass_fields__
    assert "record_routing_stats" in inspect.getsource(UserCallableWrapper)


def test_a_replica_goes_to_the_oldest_request_whoever_found_it() -> None:
    ours = inspect.signature(ThreadRequestRouter._fulfill_next_pending_request)
    assert list(ours.parameters) == list(
        inspect.signature(FIFOMixin._fulfill_next_pending_request).parameters
    )
    assert "pr = self._pending_requests_to_fulfill.popleft()" in inspect.getsource(
        FIFOMixin._fulfill_next_pending_request
    )
    assert "self._fulfill_next_pending_request(\n" in inspect.getsource(
        RequestRouter._fulfill_pending_requests
    )


def test_every_way_to_a_replica_leads_through_the_choice_that_we_count_after() -> None:
    choice = "request_router._choose_replica_for_request(\n"
    assert choice in inspect.getsource(AsyncioRouter._route_and_send_request_once)
    assert "pending_request.reset_future()" in inspect.getsource(
        RequestRouter._choose_replica_for_request
    )


def test_the_end_of_every_call_is_told_with_the_same_id() -> None:
    source = inspect.getsource(AsyncioRouter._route_and_send_request_once)
    assert "on_request_completed(\n" in source
    assert "pr.metadata.internal_request_id" in source
    assert "on_request_completed(\n" in inspect.getsource(AsyncioRouter._process_finished_request)
