"""`ray start --head --block`, which waits longer than Ray's 30 s for a node on a busy machine.

python -m tests.integration.ray_head --port PORT ...
"""

import sys
import time
from typing import Any

import ray._private.services as services
from ray.scripts import scripts

PATIENCE_S = 600.0


def wait_for_nodes() -> None:
    """Let Ray ask for its new node again, instead of giving up."""
    get_node: Any = services.get_node

    def patient(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    services.get_node = patient


if __name__ == "__main__":
    wait_for_nodes()
    sys.argv = ["ray", "start", "--head", "--block", *sys.argv[1:]]
    run: Any = scripts.main
    run()
