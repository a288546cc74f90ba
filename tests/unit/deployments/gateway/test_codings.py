"""Bodies with a `Content-Encoding`: decoded within the limits, or refused."""

import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable

import pytest
import zstandard

from deployments.config.limits import LimitsConfig
from deployments.wire.routes import ROUTES
from tests.fakes.replicas import CHAT, answering, bearer, client, key

BODY = json.dumps({"messages": [{"role": "user", "content": "é" * 400_000}]}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def streamed_zstd(data: bytes) -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "upper case": ("GZIP", gzip.compress),
    "old name": ("x-gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "zstd": ("zstd", zstandard.compress),
    "zstd without a size": ("zstd", streamed_zstd),
    "none": ("identity", bytes),
}


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("packet_bytes", [1, 1000, 10**7])
async def test_a_compressed_body_reaches_the_replica_decoded(name: str, packet_bytes: int) -> None:
    coding, compress = CODINGS[name]
    replicas = answering()
    body = BODY if packet_bytes > 1 else b'{"prompt": "short"}'
    packed = compress(body)

    async def packets() -> AsyncIterator[bytes]:
        for start in range(0, len(packed), packet_bytes):
            yield packed[start : start + packet_bytes]

    answer = await client(replicas).post(
        CHAT, content=packets(), headers={"content-encoding": coding}
    )

    assert answer.status_code == 200, answer.text
    assert replicas.requests[0].body == body
    assert b"content-encoding" not in dict(replicas.requests[0].headers)


@pytest.mark.parametrize("name", ["gzip", "deflate", "deflate without a header", "zstd"])
async def test_a_bomb_is_refused_within_the_memory_of_the_limit(name: str) -> None:
    coding, compress = CODINGS[name]
    packed = compress(bytes(2**28))
    http = client(answering(), limits=LimitsConfig(max_body_bytes=2**20))
    tracemalloc.start()

    answer = await http.post(CHAT, content=packed, headers={"content-encoding": coding})

    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert peak_bytes < 2**24


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda packed: packed[:-3], "ends before the end"),
        (lambda packed: b"", "ends before the end"),
        (lambda packed: packed + b"{}", "continues after the end"),
        (lambda packed: b"{}" + packed, "does not have the form"),
    ],
)
async def test_damaged_data_is_a_clear_error(
    name: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    coding, compress = CODINGS[name]

    answer = await client(answering()).post(
        CHAT, content=damage(compress(b"{}" * 99)), headers={"content-encoding": coding}
    )

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_compressed_data_that_decodes_to_nothing_is_limited_too() -> None:
    # zstd frames that decoders skip: a number, four bytes of length, and the content.
    skipped = b"\x50\x2a\x4d\x18" + (2**20).to_bytes(4, "little") + bytes(2**20)
    http = client(answering(), limits=LimitsConfig(max_body_bytes=2**19))

    answer = await http.post(CHAT, content=skipped, headers={"content-encoding": "zstd"})

    assert answer.status_code == 413


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "gzip,br"])
@pytest.mark.parametrize("path", [path for path, route in ROUTES.items() if route.method == "POST"])
async def test_another_coding_is_refused_with_those_that_are_supported(
    coding: str, path: str
) -> None:
    answer = await client(answering()).post(
        path, content=b"x", headers={"content-encoding": coding}
    )

    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert f"`Content-Encoding: {coding}`" in answer.json()["error"]["message"]
    assert "gzip, deflate, zstd" in answer.json()["error"]["message"]


async def test_bodies_of_the_admin_routes_may_be_compressed() -> None:
    http = client(answering(), keys=(key("boss", admin=True),))
    headers = bearer("boss") | {"content-encoding": "gzip"}
    body = b'{"name": 5}'

    plain = await http.post("/admin/keys", content=body, headers=bearer("boss"))
    packed = await http.post("/admin/keys", content=gzip.compress(body), headers=headers)

    assert plain.status_code != 401
    assert (packed.status_code, packed.json()) == (plain.status_code, plain.json())
