"""Run `apar serve` and let a test read the load of its replicas.

Whenever a file FILE.ask appears beside the configuration FILE, the load of every replica is
written to FILE.loads. Only the process that made a private Ray cluster can ask its actors.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import typer

from cluster.cli import serve

SHOWN = "what Ray Serve shows"
"""A question that asks for `shown` in place of a deployment's loads."""


def look(config: Path) -> None:
    """Answer questions for ever; stop the server when its test has ended."""
    question, answer = config.with_suffix(".ask"), config.with_suffix(".loads")
    test = os.getppid()
    while True:
        time.sleep(0.1)
        if os.getppid() != test:
            os.kill(os.getpid(), signal.SIGTERM)
            test = os.getppid()
        if question.exists():
            deployment = question.read_text()
            try:
                found: Any = shown() if deployment == SHOWN else loads(deployment)
            except Exception as error:  # noqa: BLE001  # the test asks again, and says it in the end
                found = repr(error)
            part = answer.with_suffix(".part")
            part.write_text(json.dumps(found))
            question.unlink()
            part.replace(answer)


def shown() -> list[str]:
    """Return what Ray Serve shows through its REST API and what it stores."""
    from ray.experimental import internal_kv
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    stored = [
        internal_kv._internal_kv_get(key, namespace="serve")
        for key in internal_kv._internal_kv_list(b"", namespace="serve")
    ]
    return [json.dumps(client.get_serve_details(), default=str), *map(str, stored)]


def loads(deployment: str) -> list[Any]:
    """Return the load of every running replica."""
    from ray import serve as ray_serve

    from deployments.app.ingress import APPLICATION

    handle = ray_serve.get_deployment_handle(deployment, APPLICATION)
    if not handle.is_initialized:  # Ray Serve may hand out one that it has made before.
        handle._init(_run_router_in_separate_loop=True)
    handle.load.remote().result(timeout_s=20)  # by then the handle knows its replicas
    return list(handle.broadcast("load").results(timeout_s=20))


if __name__ == "__main__":
    path = Path(sys.argv[sys.argv.index("--config") + 1])
    threading.Thread(target=look, args=(path,), daemon=True).start()
    typer.run(serve.serve)
