"""Drain the Ray node of a pod: `python -m deployments.app.pod_drain --seconds 240`.

Kubernetes runs this as the pod's preStop hook, before it stops Ray. Ray Serve starts the node's
replicas on other nodes, if there is room, and lets the ones here finish their requests. It stops
them `drain_s` before the end of the time, whether or not others have started. A module of its own,
so that the hook starts without importing the application.
"""

import argparse
import os
import sys
import time
from typing import Any

import psutil
from ray import _raylet
from ray.core.generated import autoscaler_pb2, gcs_pb2

# These have no type information.
_RAYLET: Any = _raylet
_GCS: Any = gcs_pb2
_AUTOSCALER: Any = autoscaler_pb2

REPLICA_TITLE = "ray::ServeReplica:"
_PREEMPTION = _AUTOSCALER.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
_ALIVE = _GCS.GcsNodeInfo.GcsNodeState.Value("ALIVE")
_POLL_S = 0.5


class DrainError(RuntimeError):
    """The node could not be drained; the pod shuts down anyway."""


def drain(gcs_address: str, node_ip: str, seconds: float) -> int:
    """Drain the node with this IP address; return the replicas left after `seconds`.

    Raises DrainError if no such node is alive, or if GCS refuses.
    """
    gcs = _RAYLET.GcsClient(address=gcs_address)
    node_id = _node_id(gcs, node_ip)
    deadline_s = time.time() + seconds
    accepted, reason = gcs.drain_node(
        node_id, _PREEMPTION, "the pod is shutting down", int(deadline_s * 1000)
    )
    if not accepted:
        raise DrainError(f"node {node_id} is not drained: {reason}")
    while replicas_here() and time.time() < deadline_s:
        time.sleep(_POLL_S)
    return replicas_here()


def replicas_here() -> int:
    """Count the Ray Serve replica processes in this pod."""
    return sum(
        process.info["status"] != psutil.STATUS_ZOMBIE
        and (process.info["cmdline"] or [""])[0].startswith(REPLICA_TITLE)
        for process in psutil.process_iter(["cmdline", "status"])
    )


def _node_id(gcs: Any, node_ip: str) -> str:
    nodes = gcs.get_all_node_info().values()
    for node in nodes:
        if node.node_manager_address == node_ip and node.state == _ALIVE:
            return str(node.node_id.hex())
    raise DrainError(f"none of {len(nodes)} nodes is alive at {node_ip}")


def main() -> None:
    """Drain this pod's node, with addresses from RAY_ADDRESS and POD_IP."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="Time limit (s).")
    seconds = parser.parse_args().seconds
    try:
        left = drain(os.environ["RAY_ADDRESS"], os.environ["POD_IP"], seconds)
    except (KeyError, DrainError) as error:
        sys.exit(f"not drained: {error}")
    sys.stdout.write(f"{left} replicas left\n")


if __name__ == "__main__":
    main()
