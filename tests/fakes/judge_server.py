"""An OpenAI-compatible server on a real port whose answers follow a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What one request gets; a `text` is wrapped into a chat completion, a `body` sent as it is."""

    status: int = 200
    text: str = ""
    body: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def content(self) -> str:
        if self.body is not None:
            return self.body
        if self.status != 200:
            return json.dumps({"error": {"message": self.text or "no", "type": "error"}})
        message = {"role": "assistant", "content": self.text}
        return json.dumps(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "judge",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
            }
        )


# Called with the request's JSON body and its number (from 0).
Script = Callable[[dict[str, Any], int], Reply]


@dataclass
class JudgeServer:
    """The requests received, and the peak of concurrent requests."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def judge_server(script: Script) -> Iterator[JudgeServer]:
    """Serve the script on a free local port."""
    seen = JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with seen.lock:
                number = len(seen.requests)
                seen.requests.append(body)
                seen.keys.append(self.headers["authorization"])
                seen.under_way += 1
                seen.most_under_way = max(seen.most_under_way, seen.under_way)
            reply = script(body, number)
            content = reply.content().encode()
            with seen.lock:
                seen.under_way -= 1
            self.send_response(reply.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
