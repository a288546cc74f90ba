"""The web page's files: served without a key, cached by their content, from nowhere else."""

import hashlib
import re

import httpx
import pytest

from deployments.config import ClusterConfig
from deployments.gateway.settings import gateway_settings
from deployments.gateway.web_page import FOLDER, page_files
from tests.fakes.replicas import FakeReplicas, client, key

# From the npm package markdown-it 15.0.3, dist/browser/, unmodified.
MARKDOWN_IT = "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30"


async def get(path: str = "/", method: str = "GET", **fields: object) -> httpx.Response:
    """Ask a gateway that has a page and requires keys."""
    headers = {name.replace("_", "-"): str(value) for name, value in fields.items()}
    page = client(FakeReplicas(), page=True, keys=(key("k"),))
    return await page.request(method, path, headers=headers)


@pytest.mark.parametrize("path", sorted(page_files()))
async def test_a_file_needs_no_key_and_carries_the_strict_policy(path: str) -> None:
    answer = await get(path)

    assert answer.status_code == 200
    assert answer.content == page_files()[path].body
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "trusted-types 'none'"} < set(policy)
    assert not any("unsafe" in rule or "*" in rule or "http" in rule for rule in policy)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_the_page_does_not_open_the_api() -> None:
    assert (await get("/v1/models")).status_code == 401


async def test_a_known_file_is_not_sent_again() -> None:
    etag = (await get()).headers["etag"]

    for given in (etag, f'"other", W/{etag}'):
        known = await get(if_none_match=given)
        assert (known.status_code, known.content) == (304, b"")
        assert known.headers["etag"] == etag
    assert (await get(if_none_match='"other"')).status_code == 200


async def test_head_sends_the_length_without_the_body() -> None:
    answer = await get(method="HEAD")

    assert answer.content == b""
    assert int(answer.headers["content-length"]) == len(page_files()["/"].body)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/page/", 404),
        ("GET", "/page/index.html", 404),
        ("GET", "/page/../web_page.py", 404),
        ("GET", "/page/markdown-it.LICENSE", 404),
    ],
)
async def test_nothing_else_is_served(method: str, path: str, status: int) -> None:
    answer = await get(path, method)

    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_without_the_setting_there_is_no_page() -> None:
    answer = await client(FakeReplicas()).get("/")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("host", "page", "served"),
    [
        ("127.0.0.1", None, True),
        ("::1", None, True),
        ("0.0.0.0", None, False),
        ("0.0.0.0", True, True),
        ("127.0.0.1", False, False),
    ],
)
def test_by_default_only_this_machine_gets_the_page(
    host: str, page: bool | None, served: bool
) -> None:
    config = ClusterConfig(host=host, page=page, allow_anonymous=True)

    assert gateway_settings(config).page is served


def test_all_that_the_page_loads_is_served_with_it() -> None:
    own = [path for path in FOLDER.iterdir() if not path.name.startswith("markdown-it")]
    loaded: set[str] = set()
    for path in own:
        text = path.read_text()
        loaded |= set(re.findall(r"(?:href|src)=\"(page/[^\"]+)\"", text))
        loaded |= {f"page/{name}" for name in re.findall(r"from \"\./([^\"]+)\"", text)}
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)[a-z]", text) == [], path

    assert {f"/{name}" for name in loaded} | {"/"} == set(page_files())


def test_the_markdown_library_is_the_released_file() -> None:
    body = (FOLDER / "markdown-it.esm.min.mjs").read_bytes()

    assert hashlib.sha256(body).hexdigest() == MARKDOWN_IT
    assert body.startswith(b"/*! markdown-it 15.0.3 ")
    assert "Permission is hereby granted" in (FOLDER / "markdown-it.LICENSE").read_text()
