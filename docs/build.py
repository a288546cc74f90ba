"""Build the documentation site: generate the references, collect the pages, run Zensical.

`python -m docs.build` checks every link between files of the repository, copies the pages into
`out/docs`, and builds `out/site` strictly. `python -m docs.build --generate` only rewrites
`docs/configuration.md`, `docs/cli.md`, `docs/recipes.md` and `docs/thread-stream.schema.json`,
which a test keeps current.

Pages that live elsewhere in the repository (`PAGES`) become pages of the site. In the copies, links
to files that are not pages turn into plain text.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from apar_core.errors import TrainingError
from apar_core.offline.training.recipe import (
    RECIPES,
    MedusaRecipe,
    PromptRecipe,
    TinySettings,
    TinyTrainingSettings,
    TrainingRecipe,
    load_recipe,
    shipped_recipes,
)
from cluster.cli.main import app
from deployments.config import ClusterConfig
from deployments.wire.thread_stream import schema

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
STAGED = ROOT / "out" / "docs"

# Documents outside docs/, and the pages that they become.
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "dashboards/METRICS.md": "metrics.md",
    "dashboards/README.md": "dashboards.md",
    "dashboards/RUNBOOK.md": "runbook.md",
    "k8s/README.md": "kubernetes.md",
    "k8s/SIZING.md": "plans.md",
}
# Checked for dead links, but no pages of the site.
CHECKED = (
    "README.md",
    "apar_core/models/apar_tiny/README.md",
    "apar_core/models/apar_tiny_threadweaver/README.md",
)

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^( *```.*?^ *```)", re.DOTALL | re.MULTILINE)
_IMAGES = (".png", ".svg", ".webp")


class DeadLinkError(Exception):
    """A link of a document leads nowhere."""


# ---- links -------------------------------------------------------------------------------------


def slugs(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub and Zensical name them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", _without_fences(text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())
        candidate, number = slug, 1
        while candidate in found:
            candidate, number = f"{slug}_{number}", number + 1
        found.add(candidate)
    return found


def _without_fences(text: str) -> str:
    return _FENCE.sub("", text)


class Link(NamedTuple):
    """One relative link of a document; `target` is absolute, `anchor` is empty where absent."""

    target: Path
    anchor: str


def resolve(source: Path, target: str) -> Link | None:
    """The file that a link leads to; None for addresses elsewhere. Raises DeadLinkError."""
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    file = (source.parent / path).resolve() if path else source
    if not file.exists():
        raise DeadLinkError(f"{source.relative_to(ROOT)}: {target} does not exist")
    if anchor and file.suffix == ".md" and anchor not in slugs(file.read_text()):
        raise DeadLinkError(f"{source.relative_to(ROOT)}: {target} names no heading")
    return Link(file, anchor)


def documents() -> list[Path]:
    """Every document whose links are checked."""
    return [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in (*PAGES, *CHECKED))]


def dead_links() -> list[str]:
    """What is wrong with the links of all documents."""
    problems: list[str] = []
    for source in documents():
        for _, _, target in _LINK.findall(_without_fences(source.read_text())):
            try:
                resolve(source, target)
            except DeadLinkError as error:
                problems.append(str(error))
    return problems


# ---- pages -------------------------------------------------------------------------------------


def page_of(source: Path) -> str | None:
    """The page, relative to the site's root, that a file of the repository becomes."""
    if source.suffix != ".md":
        return None
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS).as_posix()
    return PAGES.get(source.relative_to(ROOT).as_posix())


def staged(source: Path) -> str:
    """A document with its links as the site needs them."""
    page = page_of(source)
    assert page is not None, source

    def replaced(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        link = resolve(source, target)
        if link is None or link.target == source:
            return match[0]
        if link.target.suffix in _IMAGES:
            return f"{mark}[{text}]({_relative(page, f'images/{link.target.name}')})"
        to = page_of(link.target)
        if to is not None:
            anchor = f"#{link.anchor}" if link.anchor else ""
            return f"{mark}[{text}]({_relative(page, to)}{anchor})"
        name = link.target.relative_to(ROOT).as_posix()
        return text if name in text else f"{text} (`{name}`)"

    pieces = _FENCE.split(source.read_text())
    return "".join(
        piece if index % 2 else _LINK.sub(replaced, piece) for index, piece in enumerate(pieces)
    )


def _relative(page: str, to: str) -> str:
    return os.path.relpath(to, Path(page).parent)


def stage() -> None:
    """Copy all pages and their images into `out/docs`."""
    shutil.rmtree(STAGED, ignore_errors=True)
    for source in documents():
        page = page_of(source)
        if page is None:
            continue
        (STAGED / page).parent.mkdir(parents=True, exist_ok=True)
        (STAGED / page).write_text(staged(source))
        for mark, _, target in _LINK.findall(source.read_text()):
            if mark and (link := resolve(source, target)) is not None:
                (STAGED / "images").mkdir(exist_ok=True)
                shutil.copy(link.target, STAGED / "images")


# ---- configuration reference -------------------------------------------------------------------


def configuration_page() -> str:
    """The reference of `apar serve --config` files, from the pydantic models."""
    lines = [
        "# Configuration reference",
        "",
        "Every field of the YAML file of `apar serve --config`. Generated from the schema by",
        "`make docs-references`; do not edit. Unknown fields are refused. `apar config check FILE`",
        "names what is wrong in a file, `apar config show FILE` prints it with all defaults, and",
        "`apar config schema` prints the JSON schema for your editor.",
        "",
    ]
    _section(lines, "Top level", "", ClusterConfig, {})
    return "\n".join(lines).rstrip() + "\n"


def _section(
    lines: list[str],
    title: str,
    path: str,
    model: type[BaseModel],
    anchors: dict[type[BaseModel], str],
    base: type[BaseModel] = BaseModel,
) -> None:
    """Append the table of a model and those of the models in it, each once.

    The fields of `base`, which have a table of their own, are left out.
    """
    lines += [f"## {title}", "", _one_line(inspect.getdoc(model) or ""), ""]
    if base in anchors:
        lines += [f"The fields [of the base recipe](#{anchors[base]}), and:", ""]
    lines += ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    nested: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        if name in base.model_fields:
            continue
        kind, inner, is_list = _kind(field.annotation)
        if inner is not None:
            inner_path = f"{path}{name}{'[]' if is_list else ''}"
            if inner not in anchors:
                anchors[inner] = re.sub(r"[^\w-]", "", inner_path.lower())
                nested.append((inner_path, inner))
            kind = f"[{kind}](#{anchors[inner]})"
        lines.append(
            f"| `{name}` | {kind}{_bounds(field)} | {_default(field)} "
            f"| {_cell(field.description or '')} |"
        )
    lines.append("")
    for inner_path, inner in nested:
        _section(lines, f"`{inner_path}`", f"{inner_path}.", inner, anchors)


def _kind(annotation: Any) -> tuple[str, type[BaseModel] | None, bool]:
    """The name of a type, the model in it if any, and whether it is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping", annotation, False
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{arg}`" for arg in args), None, False
    if origin in (Union, UnionType):
        kinds = [_kind(arg) for arg in args if arg is not type(None)]
        inner = next((kind for kind in kinds if kind[1] is not None), (None, None, False))
        return " or ".join(kind[0] for kind in kinds), inner[1], inner[2]
    if origin is tuple:
        name, inner_model, _ = _kind(args[0])
        return f"list of {name}", inner_model, inner_model is not None
    if origin is dict:
        return "mapping", None, False
    if origin is not None and args:  # Annotated
        return _kind(args[0])
    values = [member.value for member in annotation] if hasattr(annotation, "__members__") else []
    if values:
        return " or ".join(f"`{value}`" for value in values), None, False
    names = {"str": "text", "int": "integer", "float": "number", "bool": "boolean", "Path": "path"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, name), None, False


def _bounds(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    # `PositiveInt | None` has its bounds one level down.
    inner = [
        bound for each in get_args(field.annotation) for bound in getattr(each, "__metadata__", ())
    ]
    found = [
        f"{sign} {getattr(bound, name)}"
        for bound in (*field.metadata, *inner)
        for name, sign in signs.items()
        if getattr(bound, name, None) is not None
    ]
    return f", {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel) or value in ((), {}):
        return ""
    if isinstance(value, tuple):
        names = ["apar-tiny" if isinstance(item, BaseModel) else str(item) for item in value]
        return ", ".join(f"`{name}`" for name in names)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{getattr(value, 'value', value)}`"


# ---- recipe reference --------------------------------------------------------------------------

# A command, the model of its recipes, and the model whose fields its table leaves out.
_RECIPES: tuple[tuple[str, type[BaseModel], type[BaseModel]], ...] = (
    ("apar train", TrainingRecipe, BaseModel),
    ("apar train-medusa", MedusaRecipe, TrainingRecipe),
    ("apar train-prompts", PromptRecipe, TrainingRecipe),
    ("apar train-tiny", TinyTrainingSettings, BaseModel),
    ("apar train-tiny --medusa", TinySettings[MedusaRecipe], BaseModel),
    ("apar train-tiny --prompts", TinySettings[PromptRecipe], BaseModel),
)


def recipes_page() -> str:
    """The reference of training recipes, from the pydantic models and the built-in files."""
    rows = []
    for name in shipped_recipes():
        number = next(number for number, row in enumerate(_RECIPES) if _takes(row[1], name))
        text = (RECIPES / f"{name}.yaml").read_text().splitlines()
        comment = " ".join(line[2:] for line in takewhile(lambda line: line[:1] == "#", text))
        rows.append((number, name, f"| `{name}` | `{_RECIPES[number][0]}` | {_cell(comment)} |"))
    lines = [
        "# Recipe reference",
        "",
        "Every field of the YAML file of `--recipe`. Generated from the schema by",
        "`make docs-references`; do not edit. Unknown fields are refused. To change a built-in",
        f"recipe, copy its file from `{RECIPES.relative_to(ROOT)}`.",
        "",
        "## Built-in recipes",
        "",
        "| Recipe | Command | What it trains |",
        "|---|---|---|",
        *(row for *_, row in sorted(rows)),
        "",
    ]
    anchors = {model: command.replace(" ", "-") for command, model, _ in _RECIPES}
    for command, model, base in _RECIPES:
        _section(lines, f"`{command}`", "", model, anchors, base)
    return "\n".join(lines).rstrip() + "\n"


def _takes(model: type[BaseModel], recipe: str) -> bool:
    try:
        load_recipe(recipe, model)
    except TrainingError:
        return False
    return True


# ---- command-line reference --------------------------------------------------------------------


def cli_page() -> str:
    """The reference of the `apar` command, from typer."""
    lines = [
        "# Command-line reference",
        "",
        "Every command and option of `apar`. Generated from the code by `make docs-references`; do",
        "not edit. Each command also prints this with `--help`.",
        "",
    ]
    _command(lines, "apar", typer.main.get_command(app), depth=0)
    return "\n".join(lines).rstrip() + "\n"


def _command(lines: list[str], name: str, command: Any, depth: int) -> None:
    subcommands: dict[str, Any] = getattr(command, "commands", {})
    parameters = [each for each in command.params if not getattr(each, "hidden", False)]
    if depth or parameters:
        lines += [f"## {name}", "", _plain(command.help or ""), ""]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    if arguments:
        lines += ["| Argument | Meaning |", "|---|---|"]
        for each in arguments:
            optional = "" if each.required else " (optional)"
            meaning = _plain(each.help or "")
            if isinstance(each.show_default, str):
                meaning += f" Default: {each.show_default}."
            lines.append(f"| `{each.name.upper()}`{optional} | {_cell(meaning)} |")
        lines.append("")
    if options:
        lines += ["| Option | Default | Meaning |", "|---|---|---|"]
        for each in options:
            names = ", ".join(f"`{option}`" for option in (*each.opts, *each.secondary_opts))
            lines.append(
                f"| {names} | {_option_default(each)} | {_cell(_plain(each.help or ''))} |"
            )
        lines.append("")
    for sub, inner in subcommands.items():
        _command(lines, f"{name} {sub}", inner, depth + 1)


def _option_default(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return f"`{option.show_default}`"
    value = option.default
    if value is None or value is False or callable(value) or value in ((), []):
        return ""
    if isinstance(value, list | tuple):
        value = ",".join(str(getattr(item, "value", item)) for item in value)
    return f"`{getattr(value, 'value', value)}`"


def _plain(text: str) -> str:
    """Help without rich's markup, one line for each paragraph."""
    text = re.sub(r"\[(bold|i|italic|b)\](.+?)\[/\1\]", r"`\2`", inspect.cleandoc(text), flags=re.S)
    return "\n\n".join(_one_line(part) for part in text.split("\n\n"))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


# ---- the command -------------------------------------------------------------------------------


def references() -> dict[Path, str]:
    """The generated pages and what they have to contain."""
    return {
        DOCS / "configuration.md": configuration_page(),
        DOCS / "cli.md": cli_page(),
        DOCS / "recipes.md": recipes_page(),
        DOCS / "thread-stream.schema.json": json.dumps(schema(), indent=1) + "\n",
    }


def main() -> int:
    """Generate, check, stage and build; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generate", action="store_true", help="Only rewrite the references.")
    only_generate = parser.parse_args().generate
    for file, text in references().items():
        if only_generate:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.stderr.write(f"{file.relative_to(ROOT)} is out of date: make docs-references\n")
            return 1
    if only_generate:
        return 0
    if problems := dead_links():
        sys.stderr.write("\n".join(problems) + "\n")
        return 1
    stage()
    zensical = Path(sys.executable).with_name("zensical")
    return subprocess.run(
        [zensical, "build", "--strict", "--clean"], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
