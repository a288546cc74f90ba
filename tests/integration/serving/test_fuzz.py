"""Requests generated from the OpenAPI description get valid answers or clean errors.

`APAR_FUZZ_EXAMPLES` sets how many requests each operation gets, `APAR_FUZZ_CLIENTS` how many
processes share them, and `APAR_FUZZ_SEED` the seed of the first one.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.replica.openapi import OFFERED
from deployments.wire.own_routes import OWN_OPERATIONS
from deployments.wire.routes import ROUTES
from tests.integration.random_checkpoint import write_encoder
from tests.integration.serving.apar_process import TINY, authorization
from tests.integration.serving.fuzz_client import (
    ADMIN,
    BATCH_PATHS,
    EMBEDDING,
    LISTS,
    SERVABLE,
)
from tests.integration.serving.shared_server import KEYS, MODEL, SharedServer, key

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(0)]
EXAMPLES = int(os.environ.get("APAR_FUZZ_EXAMPLES", "25"))
CLIENTS = int(os.environ.get("APAR_FUZZ_CLIENTS", "2"))
SEED = int(os.environ.get("APAR_FUZZ_SEED", "0"))
LEAST_REACHING = 0.1
"""Least share of the requests of a servable path that must be answered by a replica."""
BATCH_OPERATIONS = [
    f"{method} {path}"
    for path, operations in OWN_OPERATIONS.items()
    for method in operations
    if path.startswith(BATCH_PATHS)
]


def test_made_up_requests_get_answers_or_clean_errors(
    shared: SharedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pooling: dict[str, Any] = {
        "checkpoint": str(write_encoder(tmp_path / "encoder")),
        "name": EMBEDDING,
        "cpu_threads": 1,
        "kv_cache_gib": 0.1,
        "engine": {"enforce_eager": True, "dtype": "float32"},
    }
    lists = TINY | {"name": LISTS, "parallel_format": "lists"}
    said = shared.roll_out(MODEL, lists, pooling, keys=(*KEYS, key(ADMIN, admin=True)))
    assert "Rolled out" in said, said
    server = shared.server
    described = server.request("GET", "/openapi.json").json()
    posted = {path for path, route in ROUTES.items() if route.method == "POST"}
    assert posted == {*SERVABLE, "/classify"}  # needs a model with a head of classes
    # Without the schema of a body, nothing would be generated for it.
    for path in SERVABLE:
        assert "requestBody" in described["paths"][path]["post"], path
    assert described["paths"].keys() == OFFERED.keys()

    clients = [
        subprocess.Popen(
            (
                *(sys.executable, "-m", "tests.integration.serving.fuzz_client", server.url),
                *(str(-(-EXAMPLES // CLIENTS)), str(SEED + number)),
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(CLIENTS)
    ]
    said_by_clients = [client.communicate()[0] for client in clients]
    assert [client.returncode for client in clients] == [0] * CLIENTS
    found = [json.loads(said.splitlines()[-1]) for said in said_by_clients]

    statuses = sum((Counter[str](each["statuses"]) for each in found), Counter[str]())
    seconds = max(each["seconds"] for each in found)
    with capsys.disabled():
        print(f"\n{statuses.total()} requests in {seconds:.0f} s")  # noqa: T201
        print(f"slowest: {max(each['slowest_s'] for each in found):.1f} s")  # noqa: T201
        print(json.dumps(dict(sorted(statuses.items())), indent=1))  # noqa: T201
    failures = {kind: text for each in found for kind, text in each["failures"].items()}
    num_failures = sum(each["num_failures"] for each in found)
    assert not failures, f"{num_failures} failures: {json.dumps(failures, indent=1)}"
    for path in SERVABLE:
        of_path = {name: number for name, number in statuses.items() if f" {path} " in name}
        assert statuses[f"POST {path} 200"] >= LEAST_REACHING * sum(of_path.values()), of_path
    for operation in BATCH_OPERATIONS:
        # A batch may have ended before it is cancelled.
        assert statuses[f"{operation} 200"] + statuses[f"{operation} 409"] > 0, operation
    assert statuses["POST /admin/keys 201"] > 0
    assert statuses["DELETE /admin/keys/{name} 200"] > 0
    assert statuses["GET /admin/usage 200"] > 0
    _revoke_all(server.url)
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.wait_until_idle()


def _revoke_all(url: str) -> None:
    """Revoke the keys that the fuzzing has created: other tests use the server, too."""
    with httpx.Client(base_url=url, headers=authorization(ADMIN), timeout=60) as client:
        keys = client.get("/admin/keys").json()["data"]
        for name in {each["name"] for each in keys if each["source"] == "store"}:
            assert client.delete(f"/admin/keys/{name}").status_code == 200
