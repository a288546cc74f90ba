"""Send requests generated from a server's OpenAPI description; run by `test_fuzz.py`.

Usage: `python -m tests.integration.serving.fuzz_client URL EXAMPLES SEED`. Each operation gets
EXAMPLES requests. Prints JSON: the number of answers by operation and status, and what was wrong.
"""

import gzip
import json
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import requests
import schemathesis
import zstandard
from hypothesis import HealthCheck, Phase, given, seed, settings
from requests.adapters import HTTPAdapter
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from deployments.wire.routes import ROUTES
from tests.integration.serving.apar_process import TOKEN, authorization

ADMIN = "administrator"
MODEL, EMBEDDING, LISTS = "apar-tiny", "embedding", "lists"
ANSWER_S = 60.0
MAX_TOKENS = 16
MAX_FAILURES = 40
CHECKS = [
    status_code_conformance,
    response_schema_conformance,
    content_type_conformance,
]
PROMPT = "Give me 3 tips for sleeping well."
MESSAGES = [{"role": "user", "content": PROMPT}]
_SCORED = {"queries": PROMPT, "documents": ["Sleep.", "Eat."]}
_RANKED = {"query": PROMPT, "documents": ["Sleep.", "Eat."]}
SERVABLE: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/embeddings": {"input": PROMPT},
    "/pooling": {"input": PROMPT},
    "/score": _SCORED,
    "/v1/score": _SCORED,
    "/rerank": _RANKED,
    "/v1/rerank": _RANKED,
    "/v2/rerank": _RANKED,
}
"""Fields that make a body servable, by path; a model for `/classify` would need a head."""
UNSERVABLE = ("tools", "thinking", "thinking_token_budget")
"""Fields for which the model has no parser."""
POOLED = ("/v1/embeddings", "/pooling", "/classify", "/score", "rerank")
BATCH_PATHS = ("/v1/files", "/v1/batches")
"""Collections of the Batch API."""
DEADLINES_MS = (1, 5, 50, 60_000)
PROMPTS = (1, 2, 8, 400)
"""Numbers of prompts of a completion; with `n`, from one sequence to more than a model's cap."""
BOMB = 64 * 2**20
"""Bytes of blanks before a body; a gateway accepts 32 MiB, and gzip sends them as 64 KiB."""
LONG = 100_000
"""Number of blanks that make a body too long for HAProxy's buffer."""
ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
    "gzip, deflate": lambda body: zlib.compress(gzip.compress(body)),
    "br": bytes,
    "identity": bytes,
    "": bytes,
}
"""Codings of a body that the gateway may be sent, with what makes them."""
UPGRADES: Mapping[str, str] = {
    "websocket": "Upgrade",
    "h2c": "Upgrade, HTTP2-Settings",
    "x": "Upgrade",
}


def options(draw: random.Random) -> dict[str, Any]:
    """Return some valid fields of `apar`."""
    known: dict[str, Any] = {
        "enabled": draw.random() < 0.8,
        "max_threads": draw.choice([1, 2, 8]),
        "stream": "threads",
        "deadline_ms": draw.choice(DEADLINES_MS),
        "first_token_deadline_ms": draw.choice(DEADLINES_MS),
        "expected_tokens": draw.choice([1, 100, 2**20]),
        "parent_request_id": draw.choice(["agent-1", "agent-2"]),
        "replay": {"": [5, 6, 2]},
    }
    return {name: known[name] for name in draw.sample(sorted(known), draw.choice([0, 0, 1, 2, 3]))}


def make_servable(case: Case[Any], draw: random.Random) -> None:
    """Let most requests pass the gateway and a part of them reach the engine, with short answers.

    Few generated requests are valid, so two of three keep only some of their fields beside a valid
    prompt, and have valid options of ours.
    """
    path = case.path
    body: Any = case.body
    if not isinstance(body, dict) or path not in ROUTES:
        return
    if draw.random() < 0.67 and path in SERVABLE:
        kept = draw.sample(sorted(body), min(len(body), draw.choice([0, 0, 1, 2])))
        body = {name: body[name] for name in kept} | dict(SERVABLE[path])
        if ROUTES[path].forks:
            body["apar"] = chosen = options(draw)
            if "stream" in chosen:
                body["stream"] = True
            if draw.random() < 0.3:
                body["priority"] = draw.randrange(-1000, 1000)
            if "prompt" in body and draw.random() < 0.2:
                body["prompt"] = [PROMPT] * draw.choice(PROMPTS)
                body["n"] = draw.choice([1, 2, 32])
        for name in (*ROUTES[path].refused, *UNSERVABLE):
            body.pop(name, None)
    if draw.random() < 0.9:
        generates = draw.choice([MODEL, MODEL, LISTS])
        body["model"] = EMBEDDING if path.endswith(POOLED) else generates
    limits = ROUTES[path].shape.limits if ROUTES[path].forks else ()
    for name in limits:
        if isinstance(body.get(name), int) and body[name] > MAX_TOKENS:
            body[name] = MAX_TOKENS
    if limits and not any(body.get(name) for name in limits):
        body[limits[-1]] = MAX_TOKENS
    case.body = body


def headers_of(case: Case[Any], draw: random.Random) -> dict[str, str]:
    """Return a key, mostly one that may do what the request asks for, and now and then hints."""
    token = ADMIN if case.path.startswith("/admin") else TOKEN
    found = authorization(token if draw.random() < 0.95 else draw.choice([TOKEN, "unknown"]))
    if case.path in ROUTES and draw.random() < 0.1:
        found["x-apar-deadline-ms"] = str(draw.choice([*DEADLINES_MS, "soon"]))
        found["x-apar-expected-tokens"] = str(draw.choice([10, -1]))
    return found


class OddTransport(HTTPAdapter):
    """Compresses some bodies, breaks some of these, and asks for upgrades now and then."""

    def send(self, request: requests.PreparedRequest, *given: Any, **named: Any) -> Any:
        """Send the request, changed."""
        draw = random.Random(f"{request.url} {request.body!r}")
        body = request.body.encode() if isinstance(request.body, str) else request.body
        if isinstance(body, bytes) and draw.random() < 0.15:
            coding = draw.choice(sorted(ENCODERS))
            sent = ENCODERS[coding](bytes(BOMB) if draw.random() < 0.01 else body)
            if draw.random() < 0.1:
                sent = draw.choice([sent[:-3], sent + b"more", sent[1:], b""])
            request.prepare_body(sent, None)
            request.headers["Content-Length"] = str(len(sent))
            request.headers["Content-Encoding"] = coding
        if draw.random() < 0.05:
            upgrade = draw.choice(sorted(UPGRADES))
            request.headers.update({"Upgrade": upgrade, "Connection": UPGRADES[upgrade]})
            if isinstance(request.body, bytes) and "Content-Encoding" not in request.headers:
                # Refusals then come before the whole body has been read.
                request.prepare_body(b" " * draw.choice([0, LONG]) + request.body, None)
            if upgrade == "websocket":
                key = "dGhlIHNhbXBsZSBub25jZQ=="
                request.headers.update({"Sec-WebSocket-Key": key, "Sec-WebSocket-Version": "13"})
        return super().send(request, *given, **named)


def missed_deadline(answer: Any) -> bool:
    """Return whether a 503 says that a deadline of the request could not be met."""
    if answer.status_code != 503:
        return False
    code = answer.json()["error"].get("code")
    return code in ("deadline_exceeded", "first_token_deadline_exceeded")


class Findings:
    """Answers by operation and status, and what was wrong with some."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.num_failures = 0
        self.slowest_s = 0.0

    def failed(self, case: Case[Any], kind: str, detail: str) -> None:
        """Note a wrong answer; of equal kinds, the first."""
        self.num_failures += 1
        if len(self.failures) < MAX_FAILURES:
            sent = json.dumps(case.body, default=repr)[:1500]
            self.failures.setdefault(f"{case.method} {case.path}: {kind}", f"{detail}\n{sent}")


def batch_file(draw: random.Random) -> bytes:
    """Return the input of a batch with some lines, of which one may be wrong."""
    lines = (
        {
            "custom_id": str(draw.randrange(100)),
            "method": "POST",
            "url": draw.choice(["/v1/chat/completions", "/v1/chat/completions", "/v1/completions"]),
            "body": {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS},
        }
        for _ in range(draw.randrange(3))
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class BatchRecords:
    """Files and batches that the server has created, for later requests to name."""

    def __init__(self) -> None:
        self._ids: dict[str, list[str]] = {path: [] for path in BATCH_PATHS}

    def name_some(self, case: Case[Any], draw: random.Random) -> None:
        """Let most requests to the Batch API name what exists, and most uploads be valid."""
        files, batches = self._ids.values()
        for name, known in (("file_id", files), ("batch_id", batches)):
            if name in case.path_parameters and known and draw.random() < 0.7:
                case.path_parameters[name] = draw.choice(known)
        if draw.random() < 0.3 or case.method != "POST":
            return
        if case.path == "/v1/files":
            form: Any = {"file": batch_file(draw), "purpose": "batch"}
            case.body = form
        elif case.path == "/v1/batches" and files:
            case.body = {
                "input_file_id": draw.choice(files),
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            }

    def note(self, case: Case[Any], answer: Any) -> None:
        """Remember what was created."""
        if case.path in BATCH_PATHS and case.method == "POST" and answer.status_code == 200:
            self._ids[case.path].append(answer.json()["id"])


def sender(http: requests.Session, findings: Findings, num_seed: int) -> Callable[[Any], None]:
    """Return what sends a case and checks the answer."""
    created: list[str] = []
    records = BatchRecords()
    draw = random.Random(num_seed)

    def send(case: Case[Any]) -> None:
        if case.path == "/admin/keys/{name}" and created and draw.random() < 0.5:
            case.path_parameters["name"] = created.pop()
        if case.path == "/health/{model}" and draw.random() < 0.5:
            case.path_parameters["model"] = MODEL
        make_servable(case, draw)
        records.name_some(case, draw)
        began_s = time.monotonic()
        try:
            answer = case.call(session=http, timeout=ANSWER_S, headers=headers_of(case, draw))
        except requests.RequestException as error:
            findings.failed(case, type(error).__name__, str(error))
            return
        findings.slowest_s = max(findings.slowest_s, time.monotonic() - began_s)
        findings.statuses[f"{case.method} {case.path} {answer.status_code}"] += 1
        if case.path == "/admin/keys" and answer.status_code == 201:
            created.append(answer.json()["name"])
        records.note(case, answer)
        try:
            checks = CHECKS if missed_deadline(answer) else [not_a_server_error, *CHECKS]
            case.validate_response(answer, checks=checks)
        except FailureGroup as group:
            for failure in group.exceptions:
                kind = f"{type(failure).__name__} {answer.status_code}"
                findings.failed(case, kind, str(failure)[:1500])
        except Failure as failure:
            findings.failed(case, type(failure).__name__, str(failure)[:1500])

    return send


def main(url: str, num_examples: int, num_seed: int) -> None:
    """Fuzz every operation."""
    api = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=authorization())
    findings, began_s = Findings(), time.monotonic()
    with requests.Session() as http:
        http.mount(url, OddTransport())
        send = sender(http, findings, num_seed)
        operations = [
            found.ok()  # type: ignore[union-attr]  # an error raises
            for found in api.get_all_operations()
        ]
        # What a path names is created first, and deleted last.
        operations.sort(key=lambda each: (each.method.upper() == "DELETE", "{" in each.path))
        for operation in operations:

            @seed(num_seed)
            @settings(
                max_examples=num_examples,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @given(case=operation.as_strategy())
            def sends(case: Case[Any]) -> None:
                send(case)

            sends()
    print(  # noqa: T201
        json.dumps(
            {
                "statuses": findings.statuses,
                "failures": findings.failures,
                "num_failures": findings.num_failures,
                "seconds": time.monotonic() - began_s,
                "slowest_s": findings.slowest_s,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
