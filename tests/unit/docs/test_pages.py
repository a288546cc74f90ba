"""The pages are complete, current, and lead to things that exist."""

import ast
import re
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from apar_core.offline.training.recipe import (
    LoraSettings,
    MedusaRecipe,
    PromptRecipe,
    TinyModelSettings,
    TinyTrainingSettings,
    shipped_recipes,
)
from deployments.config import ClusterConfig
from deployments.config.autoscaling import AutoscalingConfig
from deployments.config.limits import LimitsConfig
from deployments.config.logging import LoggingConfig
from deployments.config.metrics import MetricsConfig
from deployments.config.model import ForkLimits
from deployments.config.retries import RetryConfig
from deployments.config.routing import RoutingSettings
from deployments.config.tracing import TracingConfig
from deployments.metrics import catalogue
from docs.build import PAGES, ROOT, dead_links, documents, page_of, references
from tests.fakes.quick_start import blocks

# Entries of the log name files of their commit.
LOG = ROOT / "docs" / "experiments"
CURRENT = [page for page in documents() if LOG not in page.parents]
MAX_README_LINES = 150
MAX_FILES_OF_A_LIFE = 20


@pytest.mark.parametrize("page", sorted(references(), key=str), ids=lambda page: page.name)
def test_generated_references_are_current(page: Path) -> None:
    assert page.read_text() == references()[page], "run `make docs-references`"


def test_no_link_is_dead() -> None:
    assert dead_links() == []


def test_every_page_is_in_the_navigation() -> None:
    def pages(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            [value] = entry.values()
            if isinstance(value, list):
                yield from pages(value)
            else:
                yield value

    settings = tomllib.loads((ROOT / "zensical.toml").read_text())
    listed = set(pages(settings["project"]["nav"]))
    entries = {page_of(file) for file in LOG.glob("*.md")} - {"experiments/index.md"}
    written = {page_of(file) for file in (ROOT / "docs").rglob("*.md")} | set(PAGES.values())

    assert listed == written - entries


def test_the_recipe_reference_has_every_recipe_and_field() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    used = dict(re.findall(r"^\| `([\w-]+)` \| `(apar train.*?)` \|", page, re.MULTILINE))
    fields = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", page, re.MULTILINE)

    assert sorted(used) == shipped_recipes()
    assert (used["convert"], used["medusa"], used["ppd"]) == (
        "apar train", "apar train-medusa", "apar train-prompts"
    )  # fmt: skip
    assert used["apar-tiny-prompts"] == "apar train-tiny --prompts"
    models = (PromptRecipe, MedusaRecipe, LoraSettings, TinyTrainingSettings, TinyModelSettings)
    assert {field for model in models for field in model.model_fields} <= {
        each for each, _ in fields
    }
    assert all(meaning for _, meaning in fields)


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_the_programs_of_a_page_are_python(page: Path) -> None:
    for block in blocks("python", (str(page.relative_to(ROOT)),)):
        compile(block, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_program_for_the_vercel_ai_sdk_is_javascript(tmp_path: Path) -> None:
    [block] = blocks("javascript", ("docs/apis.md",))
    file = tmp_path / "snippet.mjs"
    file.write_text(block)

    checked = subprocess.run(
        ["node", "--check", file], capture_output=True, text=True, timeout=60, check=False
    )

    assert checked.returncode == 0, checked.stderr


def test_the_log_lists_every_entry() -> None:
    index = (LOG / "index.md").read_text()

    assert {file.name for file in LOG.glob("2*.md")} == set(re.findall(r"\((2.+?\.md)\)", index))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # It names files of older versions.
    folders = "apar_core|benchmarks|cluster|containers|dashboards|deployments|docs|k8s|tests"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text())

    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_folder_of_the_tree_exists_and_none_is_missing() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    [tree] = re.findall(r"## Folders\n\n```text\n(.*?)```", text, re.DOTALL)
    path: list[str] = []
    named: set[str] = set()
    for line in tree.splitlines():
        indent, folder = re.findall(r"^( *)(\w+)/ +\S", line)[0]
        path[len(indent) // 4 :] = [folder]
        named.add("/".join(path))
    packages = {
        folder.relative_to(ROOT).as_posix()
        for top in ("apar_core", "cluster", "deployments")
        for folder in (ROOT / top, *(ROOT / top).glob("*/"), *(ROOT / top).glob("offline/*/"))
        if (folder / "__init__.py").exists()
    }

    assert [name for name in sorted(named) if not (ROOT / name).is_dir()] == []
    assert packages - named == set()


def test_each_life_names_at_most_twenty_files() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    sections = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", text, flags=re.M)}

    for title in ("Life of a request", "Life of a fork"):
        files = set(re.findall(r"`([\w/]+\.py)`", sections[title]))
        assert 0 < len(files) <= MAX_FILES_OF_A_LIFE, (title, sorted(files))


def test_every_test_in_the_table_of_features_exists() -> None:
    named = re.findall(r"`(\S+\.py)::(\w+)`", (ROOT / "docs" / "compatibility.md").read_text())

    assert len(named) > 20
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / "tests" / file).exists()
        or f"def {name}(" not in (ROOT / "tests" / file).read_text()
    ]
    assert missing == []


def test_every_metric_that_a_page_names_exists() -> None:
    named = {
        (page.name, name)
        for page in CURRENT
        for name in re.findall(r"\bapar_[a-z_]+_(?:total|seconds|ratio)\b", page.read_text())
    }
    known = [re.escape(metric.name) for metric in catalogue.metrics()]
    exported = re.compile(rf"({'|'.join(known)})(_bucket|_sum|_count)?")

    assert [each for each in named if not exported.fullmatch(each[1])] == []


def test_every_setting_that_a_page_names_exists() -> None:
    sections: dict[str, type[BaseModel]] = {
        "limits": LimitsConfig, "routing": RoutingSettings, "retries": RetryConfig,
        "tracing": TracingConfig, "metrics": MetricsConfig, "logging": LoggingConfig,
        "forks": ForkLimits, "autoscaling": AutoscalingConfig,
    }  # fmt: skip
    names = re.compile(rf"`(?:models\[\]\.)?({'|'.join(sections)})\.([a-z_]+)[`:]")
    wrong = [
        (page.name, section, field)
        for page in CURRENT
        for section, field in names.findall(page.read_text())
        if field not in sections[section].model_fields
    ]

    assert wrong == []


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_every_configuration_on_a_page_is_valid(page: Path) -> None:
    if page.parent.name != "docs":
        return  # Others show YAML of other programs.
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        ClusterConfig.model_validate(yaml.safe_load(block))


def test_the_policy_on_the_page_is_the_one_in_the_code() -> None:
    page = (ROOT / "docs" / "change-scheduler.md").read_text()
    [shown] = re.findall(r"^    ```python\n(.*?)^    ```", page, re.DOTALL | re.MULTILINE)

    code = (ROOT / "deployments" / "routing" / "policies.py").read_text()
    assert textwrap.dedent(shown) in code


@cache
def messages() -> list[str]:
    """Every string of the source, an expression in it as a null character."""
    found: list[str] = []
    for folder in ("apar_core", "cluster", "deployments"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (
                        str(part.value) if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    )
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def quoted_messages() -> list[str]:
    """The messages in the tables of the page on troubleshooting."""
    quoted: list[str] = []
    column: int | None = None
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if "Message" in cells:
            column = cells.index("Message")
        elif column is not None and cells and not cells[0].startswith("---"):
            code = re.fullmatch(r"(`+)\s?(.+?)\s?\1", cells[column])
            assert code is not None, line
            quoted.append(code[2])
        elif not cells:
            column = None
    return quoted


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    """Its fixed parts stand in one string of the source, in order, or in one that it holds."""
    parts = [part for part in re.split(r"<[^<>]+>", message) if part.strip()]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)

    assert any(pattern.search(candidate) for candidate in messages()), message
