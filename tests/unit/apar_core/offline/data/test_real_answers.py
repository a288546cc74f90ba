"""Structure of the real answers in the shared data, compared with the recorded figures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from apar_core.offline.data.records import count_forks, flat_text
from apar_core.offline.data.structure import StructureRules, extract_tree

DATA = Path(__file__).resolve().parents[6] / "shared" / "data"
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="the shared data does not lie beside the repository"
)

# Share of forkable answers and mean threads: SOURCES.md, vicuna-7b and 13b v1.3 on MT-Bench.
EXPECTED = {
    "humanities": (0.85, 5.6),
    "stem": (0.82, 3.8),
    "roleplay": (0.65, 3.6),
    "writing": (0.40, 2.9),
    "reasoning": (0.40, 2.0),
    "coding": (0.15, 1.4),
    "extraction": (0.03, 1.0),
    "math": (0.0, 1.0),
}


def lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def answer_texts() -> Iterator[str]:
    files = [*DATA.glob("*_answers/*.jsonl"), *DATA.glob("fastchat/*/reference*.jsonl")]
    for path in files:
        for line in lines(path):
            yield from [line["text"]] if "text" in line else line["choices"][0]["turns"]
    for path in DATA.glob("traces/*.jsonl"):
        for line in lines(path):
            yield line["response"]


@pytest.fixture(scope="module")
def forks_by_category() -> dict[str, list[int]]:
    questions = lines(DATA / "fastchat/mt_bench/question.jsonl")
    categories = {question["question_id"]: question["category"] for question in questions}
    forks: dict[str, list[int]] = defaultdict(list)
    for model in ("vicuna-7b-v1.3", "vicuna-13b-v1.3"):
        for line in lines(DATA / f"mt_bench_answers/{model}.jsonl"):
            for answer in line["choices"][0]["turns"]:
                forks[categories[line["question_id"]]].append(
                    count_forks(extract_tree(answer).tree)
                )
    return forks


def test_the_tree_of_each_real_answer_restores_its_text() -> None:
    texts = list(answer_texts())

    for text in texts:
        for unordered in (False, True):
            tree = extract_tree(text, StructureRules(unordered_lists=unordered)).tree
            assert flat_text(tree).encode() == text.encode()
    assert len(texts) > 2000


def test_the_share_of_forkable_answers_is_as_recorded(
    forks_by_category: dict[str, list[int]],
) -> None:
    counts = [count for category in forks_by_category.values() for count in category]

    assert len(counts) == 320
    assert mean(count > 0 for count in counts) == pytest.approx(0.41, abs=0.03)
    assert 1 + mean(counts) == pytest.approx(2.7, abs=0.15)


@pytest.mark.parametrize("category", EXPECTED)
def test_forks_of_each_category_are_as_recorded(
    forks_by_category: dict[str, list[int]], category: str
) -> None:
    share, threads = EXPECTED[category]
    counts = forks_by_category[category]

    assert mean(count > 0 for count in counts) == pytest.approx(share, abs=0.08)
    assert 1 + mean(counts) == pytest.approx(threads, abs=0.4)


def test_the_traces_agree_with_an_independent_implementation_of_the_rules() -> None:
    names = {"ordered_list": "list", "paragraphs": "para", "unstructured": None}
    traces = [line for path in DATA.glob("traces/*.jsonl") for line in lines(path)]
    extracted = [extract_tree(trace["response"]) for trace in traces]
    pairs = list(zip(traces, extracted, strict=True))
    lists = [
        (trace["n_forks_paper"], count_forks(answer.tree))
        for trace, answer in pairs
        if trace["kind_paper"] == "list" and answer.kind == "ordered_list"
    ]

    assert mean(trace["kind_paper"] == names[answer.kind] for trace, answer in pairs) > 0.97
    assert mean(theirs == ours for theirs, ours in lists) > 0.99
