"""The questions, reference answers and judge prompts of Vicuna-Bench and MT-Bench, fetched once.

Source: lm-sys/FastChat (Apache-2.0), fastchat/llm_judge/data, at one commit. A file is accepted by
its checksum only, so the branch can stand in where the commit's short name is not understood.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from apar_core.errors import EvaluationError

FASTCHAT_URLS = tuple(
    f"https://raw.githubusercontent.com/lm-sys/FastChat/{revision}/fastchat/llm_judge/data"
    for revision in ("0e6d3e4b", "main")
)
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class BenchmarkFile:
    """One file: its path under the public home and in the folder here, and what it must hold."""

    path: str
    num_bytes: int
    sha256: str


BENCHMARK_FILES = (
    BenchmarkFile(
        "vicuna_bench/question.jsonl",
        13125,
        "c248c5c98ba45bb0c2aadae2f270e643bd32679c6c306a3b2a503ac4254cdaa5",
    ),
    BenchmarkFile(
        "vicuna_bench/reference_answer/gpt-4.jsonl",
        11301,
        "f7542dc25a5a869b32197486f5699a14eb5682ab3c7264518402399ec09ab470",
    ),
    BenchmarkFile(
        "mt_bench/question.jsonl",
        48929,
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    BenchmarkFile(
        "mt_bench/reference_answer/gpt-4.jsonl",
        51109,
        "f957a5bc977badb66885ec970e6cd08527845780313f0995764260e5777b9b3f",
    ),
    BenchmarkFile(
        "judge_prompts.jsonl",
        10449,
        "fd283293406d024f44c174b094ef48031d0687a4682fd3a56b29b138f80281b6",
    ),
)

# Called with a file and the number of its bytes that have arrived since the last call.
ShowBytes = Callable[[BenchmarkFile, int], None]


def cache_folder() -> Path:
    """Return where fetched files are kept: under XDG_CACHE_HOME, or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "apar-serve" / "fastchat"


def fetch_benchmark_files(
    folder: Path,
    *,
    base_urls: Sequence[str] = FASTCHAT_URLS,
    show: ShowBytes = lambda _file, _bytes: None,
) -> list[Path]:
    """Download the files that the folder lacks or holds damaged; return the paths of all.

    Raises EvaluationError if a file cannot be had or is not the expected one; nothing of such a
    file is kept.
    """
    paths = []
    with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as client:
        for file in BENCHMARK_FILES:
            path = folder / file.path
            paths.append(path)
            if path.is_file() and _sha256(path.read_bytes()) == file.sha256:
                show(file, file.num_bytes)
                continue
            content = _download(client, base_urls, file, show)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_bytes(content)
            partial.replace(path)
    return paths


def find_benchmark_file(name: str, folder: Path | None) -> Path:
    """Return a file of the given folder, or of the cache folder where none is given.

    `name` is as in BENCHMARK_FILES; a reference may also be named as `BENCH/reference_gpt-4.jsonl`.
    Raises EvaluationError if it is not there.
    """
    home = folder if folder is not None else cache_folder()
    for candidate in (home / name, home / name.replace("reference_answer/", "reference_")):
        if candidate.is_file():
            return candidate
    advice = (
        f"{folder} has no {name}"
        if folder is not None
        else "fetch the benchmark once with: apar evaluate fetch"
    )
    raise EvaluationError(f"{home / name} is missing: {advice}")


def _download(
    client: httpx.Client, base_urls: Sequence[str], file: BenchmarkFile, show: ShowBytes
) -> bytes:
    """Return a file from the first home that knows it."""
    for base_url in base_urls:
        url = f"{base_url}/{file.path}"
        content = _get(client, url, file, show)
        if content is None:
            continue
        if _sha256(content) != file.sha256:
            raise EvaluationError(
                f"{url}: {len(content)} bytes with SHA-256 {_sha256(content)[:12]}..., expected "
                f"{file.num_bytes} bytes with {file.sha256[:12]}..."
            )
        return content
    raise EvaluationError(f"HTTP 404 from all of {', '.join(base_urls)} for {file.path}")


def _get(client: httpx.Client, url: str, file: BenchmarkFile, show: ShowBytes) -> bytes | None:
    """Return what a URL answers, or None where it knows no such file."""
    content = bytearray()
    try:
        with client.stream("GET", url) as response:
            if response.status_code == httpx.codes.NOT_FOUND:
                return None
            response.raise_for_status()
            for part in response.iter_bytes():
                content.extend(part)
                show(file, len(part))
    except httpx.HTTPStatusError as error:
        raise EvaluationError(f"{url}: HTTP {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise EvaluationError(
            f"{url} cannot be reached ({type(error).__name__}: {error}); without a network, give "
            "a folder that has the files with --benchmark-files"
        ) from error
    return bytes(content)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
