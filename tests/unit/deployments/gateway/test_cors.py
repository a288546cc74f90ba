"""Preflights and answers for pages of other origins."""

import httpx
import pytest
from pydantic import ValidationError

from deployments.config.cors import CorsConfig
from deployments.gateway.cors import Cors
from tests.fakes.replicas import CHAT, answering, bearer, client_of, gateway_of, key

PAGE = "https://chat.example.org"
ASKED = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-stainless-os,content-type",
}


def served(*origins: str) -> tuple[Cors, httpx.AsyncClient]:
    app = Cors(gateway_of(answering(), keys=(key("a"),)), CorsConfig(origins=origins), lambda: None)
    return app, client_of(app)


async def test_a_preflight_of_an_allowed_page_needs_no_key() -> None:
    _, http = served(PAGE)

    preflight = await http.options(CHAT, headers=ASKED)
    asked = await http.post(CHAT, json={}, headers={"origin": PAGE} | bearer("a"))
    refused = await http.post(CHAT, json={}, headers={"origin": PAGE})

    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    allowed = preflight.headers["access-control-allow-headers"]
    assert "authorization" in allowed
    assert "x-stainless-os" in allowed
    assert preflight.headers["access-control-max-age"] == "600"
    assert "access-control-allow-credentials" not in preflight.headers
    assert (asked.status_code, refused.status_code) == (200, 401)
    for answer in (asked, refused):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_other_pages_get_no_permission() -> None:
    _, http = served(PAGE)
    headers = {"origin": "https://evil.example.org"}

    preflight = await http.options(CHAT, headers=ASKED | headers)
    asked = await http.post(CHAT, json={}, headers=headers | bearer("a"))

    assert preflight.status_code == 400
    for answer in (preflight, asked):
        assert answer.headers.get("access-control-allow-origin") is None


async def test_without_origins_nothing_changes_and_settings_apply_at_once() -> None:
    app, http = served()
    closed = await http.options(CHAT, headers=ASKED)

    app.configure(CorsConfig(origins=("*",)))
    opened = await http.options(CHAT, headers=ASKED)

    assert (closed.status_code, closed.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "access-control-allow-origin" not in closed.headers
    assert opened.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": PAGE}, 200),
        ({"origin": "http://gateway"}, 200),
        ({"origin": "vscode-webview://abc"}, 200),
        ({"origin": "https://evil.example.org"}, 403),
        ({"origin": "http://gateway:81"}, 403),
        ({"origin": "null"}, 403),
    ],
    ids=str,
)
async def test_forms_of_other_pages_are_refused(headers: dict[str, str], status: int) -> None:
    refusals: list[int] = []
    config = CorsConfig(origins=(PAGE,))
    app = Cors(gateway_of(answering()), config, lambda: refusals.append(1))
    typed = {"content-type": "text/plain; charset=utf-8"}

    answer = await client_of(app).post(CHAT, content=b"{}", headers=typed | headers)

    assert answer.status_code == status
    assert len(refusals) == (status == 403)
    if status == 403:
        assert answer.json()["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    "origins",
    [
        ["chat.example.org"],
        ["https://chat.example.org/"],
        ["https://Chat.example.org"],
        ["ftp://chat.example.org"],
        ["https://me:pw@chat.example.org"],
        ["*", PAGE],
    ],
)
def test_an_origin_that_would_never_match_is_refused(origins: list[str]) -> None:
    with pytest.raises(ValidationError, match="origin"):
        CorsConfig(origins=tuple(origins))
