"""Let a restarted controller of Ray Serve bring everything back.

Ray Serve's controller is an actor. If it dies, Ray starts another one, which continues from a
checkpoint. Two things could then stop it for good:

- It does not remember which deployments have ever run. With `max_constructor_retry_count=1`, which
  reports a model that cannot be loaded at once, the first replica that dies before another one runs
  would count as such a model. No replica would be started again.
- It asks the node's GCS for the nodes, and gives up after 3 s. Ray does not restart an actor whose
  constructor raises.

Each process that may run the controller calls `prepare`, which SERVE_FLAGS names. These are private
names of Ray Serve, see tests/contract/test_ray_names.py.
"""

from typing import Any

GCS_TIMEOUT_S = 20.0
"""Longest time (s) that the controller waits for the nodes; its event loop waits with it."""


def prepare() -> None:
    """Change Ray Serve in this process, before its controller reads the checkpoint."""
    from ray.serve._private import cluster_node_info_cache
    from ray.serve._private.deployment_state import DeploymentState

    nodes: Any = cluster_node_info_cache
    nodes.RAY_GCS_RPC_TIMEOUT_S = GCS_TIMEOUT_S
    state: Any = DeploymentState
    recover = state.recover_target_state_from_checkpoint

    def recover_as_started(self: Any, checkpoint: Any) -> None:
        recover(self, checkpoint)
        self._replica_has_started = True

    state.recover_target_state_from_checkpoint = recover_as_started
