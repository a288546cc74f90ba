"""Commands whose options are the fields of a pydantic model.

A field's docstring is the option's help, its type decides how the text is read and which values
are refused, and its name is the option's: `sample_s` is a duration `--sample`. A tuple is a
comma-separated list, a list an option that may be repeated. Options that are not given are not
passed, so the model's own defaults apply.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from copy import copy
from enum import Enum
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic.types import PathType

from cluster.cli.options import CommaList, duration_option, list_option, none_of, wrong_value
from cluster.durations import format_duration

Command = TypeVar("Command", bound=Callable[..., None])


def takes_settings(
    model: type[BaseModel],
    *,
    names: Mapping[str, str] | None = None,
    shown: Mapping[str, str] | None = None,
    only: Collection[str] = (),
    leave_out: Collection[str] = (),
    panels: Mapping[str, Collection[str]] | None = None,
    defaults: Mapping[str, Any] | None = None,
    text: str | None = None,
) -> Callable[[Command], Command]:
    """Give a command the options of a model, in place of its parameter `settings`.

    names: options of fields that have another name, without dashes. shown: defaults that `--help`
    shows, where they are not the field's. only, leave_out: fields with and without an option.
    panels: fields by the title of their panel in `--help`. defaults: values of fields for this
    command, in place of the model's. text: help of the command, in place of its docstring. A value
    that the model refuses is reported with its option.
    """
    names, shown, defaults = names or {}, shown or {}, defaults or {}
    panel_of = {field: title for title, own in (panels or {}).items() for field in own}
    fields = [
        name for name in model.model_fields if name not in leave_out and (not only or name in only)
    ]

    def option_of(field: str) -> str:
        return f"--{names.get(field, field.removesuffix('_s').replace('_', '-'))}"

    def build(values: Mapping[str, Any]) -> BaseModel:
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return model.model_validate({**defaults, **given})
        except ValidationError as error:
            raise _wrong_option(error, option_of) from error

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = []
        for name in fields:
            info = model.model_fields[name]
            if name in defaults:
                info = copy(info)
                info.default = defaults[name]
            kind, option = _option(option_of(name), name, info, shown.get(name), panel_of.get(name))
            default = inspect.Parameter.empty if info.is_required() else None
            parameters.append(_parameter(name, Annotated[kind, option], default))
        # Required options first, then where the result goes.
        parameters.sort(key=lambda each: each.default is None)
        number = sum(each.default is not None for each in parameters)
        parameters[number:number] = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for each in own.values()
            if each.name != "settings"
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            others = {name: values.pop(name) for name in own if name != "settings"}
            command(settings=build(values), **others)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        del run.__wrapped__
        run.__doc__ = text or command.__doc__
        return run  # type: ignore[return-value]

    return decorate


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _wrong_option(error: ValidationError, option_of: Callable[[str], str]) -> typer.BadParameter:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return typer.BadParameter(message)
    if first["type"] == "literal_error":
        message = none_of(str(first["input"]), re.findall(r"'([^']+)'", first["ctx"]["expected"]))
    elif first["type"] != "value_error":
        # Messages of this project's own checks contain the value.
        message += f" (got {first['input']!r})"
    return wrong_value(option_of(str(first["loc"][0])), message)


def _option(
    option: str, name: str, info: FieldInfo, shown: str | None, panel: str | None
) -> tuple[Any, Any]:
    """Return the type that typer reads for a field, and its option."""
    kind: Any = info.annotation
    help_text, metadata = " ".join((info.description or "").split()), info.metadata
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        if get_origin(kind) is Annotated:
            kind, *metadata = get_args(kind)
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if shown is None:
        shown = _text(default, name)
    if get_origin(kind) is tuple and Ellipsis in get_args(kind):
        item, item_metadata = get_args(kind)[0], []
        if get_origin(item) is Annotated:
            item, *item_metadata = get_args(item)
        choices = _choices(item, info)
        item = item if item in (int, float) else str
        return CommaList[Any] | None, list_option(
            option, help=help_text, item=item, default=shown or False, panel=panel,
            minimum=_bound(item_metadata, "ge", "gt") if item is int else None,
            choices=choices,
        )  # fmt: skip
    if name.endswith("_s") and kind is float:
        minimum = format_duration(_bound(metadata, "ge") or 0.0)
        return float | None, duration_option(
            option, help=help_text, minimum=minimum, panel=panel, default=shown or False
        )
    given: dict[str, Any] = {
        "help": help_text, "rich_help_panel": panel, "show_default": shown or False,
    }  # fmt: skip
    if kind is bool:
        flag = option if default is False else f"{option}/--no-{option.removeprefix('--')}"
        return bool | None, typer.Option(flag, **given)
    if get_origin(kind) is Literal:
        return str | None, typer.Option(option, metavar="|".join(get_args(kind)), **given)
    is_repeated = get_origin(kind) is list
    if is_repeated:
        (kind,) = get_args(kind)
        if get_origin(kind) is Annotated:
            kind, *metadata = get_args(kind)
    if kind is int and not is_repeated:
        given |= {"min": _bound(metadata, "ge", "gt"), "max": _bound(metadata, "le")}
    elif kind is float and not is_repeated:
        given |= {"min": _bound(metadata, "ge"), "max": _bound(metadata, "le")}
    elif kind is Path:
        given |= {"dir_okay": False, "exists": any(isinstance(e, PathType) for e in metadata)}
    else:
        # Text that the model reads.
        kind = str
        if info.examples:
            given["autocompletion"] = lambda: list(info.examples or ())
    if is_repeated:
        kind = list[kind]
    return (kind if info.is_required() else kind | None), typer.Option(option, **given)


def _bound(metadata: Collection[Any], *names: str) -> float | None:
    """Return a limit of a number; above 0 means 1 or more of whole numbers."""
    for each in metadata:
        for name in names:
            if (value := getattr(each, name, None)) is not None:
                return value + 1 if name == "gt" else value  # type: ignore[no-any-return]
    return None


def _choices(item: Any, info: FieldInfo) -> tuple[str, ...]:
    """Return all values of a list's items: of a literal or enum, or the field's examples."""
    if get_origin(item) is Literal:
        return get_args(item)
    if isinstance(item, type) and issubclass(item, Enum):
        return tuple(each.value for each in item)
    return tuple(info.examples or ())


def _text(value: Any, name: str) -> str | None:
    """Return a default as the option takes it."""
    if value is None or value is False or value in ((), [], {}):
        return None
    if isinstance(value, tuple):
        return ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    if name.endswith("_s") and isinstance(value, float):
        return format_duration(value)
    return str(value)
