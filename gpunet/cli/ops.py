"""``gpunet ops``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gpunet.cli import Command

if TYPE_CHECKING:
    from gpunet.arguments import Arg
    from gpunet.schema import Input, OpSchema, Output


@click.command(cls=Command)
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """Describe the operator NAME, or list all operators."""
    from gpunet.schema import lookup, registered_types

    if name is not None:
        click.echo(describe(lookup(name)))
        return
    for type in registered_types():
        doc = " ".join(lookup(type).doc.split())
        click.echo(f"{type}  {_shortened(doc)}" if doc else type)


def describe(schema: OpSchema) -> str:
    """All that is known of an operator, as text."""
    from gpunet.schema import NO_GRADIENT, NOT_DIFFERENTIABLE

    lines = [schema.type, "", *_wrapped(schema.doc, "")] if schema.doc else [schema.type]
    sections: list[tuple[str, Sequence[Input | Output]]]
    sections = [("Inputs", schema.inputs), ("Outputs", schema.outputs)]
    for title, places in sections:
        if places:
            lines += ["", f"{title}:"]
        for index, one in enumerate(places):
            lines += _wrapped(f"{index} {_title(one)}", "  ")
    if schema.args:
        lines += ["", "Arguments:"]
        for arg in schema.args:
            lines += _wrapped(_argument(arg), "  ")
    lines += ["", f"In place: {_inplace(schema)}"]
    meaning = {
        id(NO_GRADIENT): "none: the backward pass stops here",
        id(NOT_DIFFERENTIABLE): "asking for it is an error",
    }
    lines.append(f"Gradient: {meaning.get(id(schema.gradient), 'yes')}")
    if schema.random:
        lines.append("Random: draws new numbers at each run, by the workspace's seed")
    return "\n".join(lines)


def _title(place: Input | Output) -> str:
    name = place.name + ("..." if place.variadic else "") + (" (optional)" if place.optional else "")
    return f"{name}: {place.doc}" if place.doc else name


def _argument(arg: Arg) -> str:
    from gpunet.arguments import REQUIRED

    default = "required" if arg.default is REQUIRED else f"default {_value(arg.default)}"
    choices = f", one of {', '.join(map(_value, arg.choices))}" if arg.choices else ""
    return f"{arg.name} ({arg.kind}, {default}{choices})" + (f": {arg.doc}" if arg.doc else "")


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value) if isinstance(value, (str, bytes)) else str(value)


def _inplace(schema: OpSchema) -> str:
    from gpunet.schema import ALL_INPLACE

    if schema.inplace is ALL_INPLACE:
        return "any output in place of any input"
    pairs = [f"output {o} of input {i}" for i, o in sorted(schema.inplace)]
    must = " (required)" if schema.enforce_inplace else ""
    return ", ".join(pairs) + must if pairs else "no"


def _wrapped(text: str, indent: str) -> list[str]:
    import textwrap

    return textwrap.wrap(
        " ".join(text.split()), 100, initial_indent=indent, subsequent_indent=indent + "    " * bool(indent)
    )


def _shortened(text: str, width: int = 80) -> str:
    import textwrap

    return textwrap.shorten(text, width, placeholder=" ...")
