"""Private names of Ray that a pod's preStop hook relies on."""

from typing import Any

from ray import _raylet
from ray.core.generated import autoscaler_pb2, gcs_pb2

RAYLET: Any = _raylet
GCS: Any = gcs_pb2
AUTOSCALER: Any = autoscaler_pb2


def test_gcs_drains_a_node_and_knows_their_addresses() -> None:
    assert {"drain_node", "get_all_node_info"} <= set(dir(RAYLET.InnerGcsClient))
    assert {"node_id", "node_manager_address", "state"} <= set(
        GCS.GcsNodeInfo.DESCRIPTOR.fields_by_name
    )
    # Any other reason is refused while the node has work.
    assert AUTOSCALER.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION") == 2
