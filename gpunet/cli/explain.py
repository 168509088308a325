"""``gpunet explain``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from gpunet.cli import Command
from gpunet.cli.nets import count, created, net_options

if TYPE_CHECKING:
    from gpunet.binding import Compiled
    from gpunet.graph import Graph, Node, Value
    from gpunet.program import Program
    from gpunet.storage import Storage

#: Names of what is printed besides the passes: before them, and after them.
BEFORE: Final = "inference"
AFTER: Final = ("schedule", "memory_plan")


@click.command(cls=Command)
@net_options
@click.option("--pass", "wanted", metavar="PASS", help="Print the program after this pass only.")
@click.option("--sources", is_flag=True, help="Print the CUDA source of each fused operator only.")
def command(net: str, wanted: str | None, sources: bool, **options: Any) -> None:
    """Print how NET is compiled: the program after every pass, its schedule and its memory.

    NET is the folder of a saved model, a file with a net, or zoo:MODEL. Passes that change nothing are named
    only.
    """
    from gpunet.errors import NetError
    from gpunet.passes.pipeline import PASSES

    known = [BEFORE, *(p.name for p in PASSES), *AFTER]
    if sources and wanted is not None:
        raise click.UsageError("--sources and --pass exclude each other")
    if wanted is not None and wanted not in known:
        raise NetError(f"there is no pass {wanted!r}, wanted one of {', '.join(known)}")
    _, _, program = created(net, **options)
    printed: list[tuple[str, list[str]]] = []

    def seen(name: str, graph: Graph) -> None:
        printed.append((name, list(graph_lines(graph))))

    program.seen = seen
    program.prepare()
    if sources:
        for line in source_lines(program):
            click.echo(line)
        return
    lines = explanation(program, printed, wanted)
    if wanted is not None and not lines:
        raise NetError(f"pass {wanted!r} did not run: it is switched off")
    for line in lines:
        click.echo(line)


def explanation(program: Program, passes: list[tuple[str, list[str]]], wanted: str | None) -> list[str]:
    """All lines, or those of one pass.

    ``passes`` are the name of each pass and its lines, of one segment after another.
    """
    from gpunet.program import StaticSegment

    parts: list[list[tuple[str, list[str]]]] = []
    for name, lines in passes:
        if name == BEFORE:
            parts.append([])
        parts[-1].append((name, lines))
    lines = []
    static = iter(parts)
    for segment in program.bound():
        if not isinstance(segment, StaticSegment):
            if wanted is None:
                lines += [f"== dynamic operator {program.operators[segment.start].where}", ""]
            continue
        found, compiled = next(static, []), segment.compiled
        if compiled is None:
            continue
        sections = _marked(found) if wanted is None else found
        sections = [*sections, ("schedule", list(schedule_lines(compiled)))]
        sections.append(("memory_plan", list(memory_lines(compiled))))
        for name, content in sections:
            if wanted in (None, name):
                lines += [f"== {name}", *content, ""]
    return lines[:-1] if lines else lines


def source_lines(program: Program) -> Iterator[str]:
    """The source of each fused operator once, on whatever device it runs, behind those that have it."""
    from gpunet.passes.fusion import source_of

    found: dict[str, list[Node]] = {}
    for segment in program.segments():
        for node in [] if segment.compiled is None else segment.compiled.graph.nodes:
            if node.op is not None and node.op.type == "FusedElementwise":
                found.setdefault(source_of(node), []).append(node)
    for source, nodes in found.items():
        yield from (f"// {node.where}" for node in nodes)
        yield source
    if not found:
        yield "no operators are fused"


def _marked(passes: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """The same with a remark in place of what has not changed."""
    result = []
    before: list[str] | None = None
    for name, lines in passes:
        result.append((name, ["(no change)"] if lines == before else lines))
        before = lines
    return result


def graph_lines(graph: Graph) -> Iterator[str]:
    """A line for each node: its position, what it is, its values, and which share their place."""
    width = len(str(len(graph.nodes)))
    for number, node in enumerate(graph.nodes):
        yield f"{number:{width}} {node_text(node)}"
    if not graph.nodes:
        yield "(no operators)"


def node_text(node: Node) -> str:
    """``Conv on cpu: data float32 8x3x32x32, w float32 4x3x3x3 -> y float32 8x4x30x30``, and remarks."""
    from gpunet.operators.fused import expression

    kind = "copy" if node.op is None else node.op.type
    inputs, outputs = (", ".join(map(_value_text, values)) for values in (node.inputs, node.outputs))
    text = f"{kind} on {node.device}: {inputs}{' ' if inputs else ''}-> {outputs}"
    places = [
        f"{value.name} in place" if value.name == source.name else f"{value.name} in place of {source.name}"
        for index, value in enumerate(node.outputs)
        if (source := node.aliased(index)) is not None
    ]
    fused = [expression(node.op)] if node.op is not None and node.op.type == "FusedElementwise" else []
    then = getattr(node.op.args, "epilogue", "") if node.op is not None else ""
    once = ["runs once"] if node.constant else []
    held = [f"{node.inputs[i].name} is there already" for i in node.holds]
    remarks = [*fused, *([f"then {then}"] if then else []), *once, *places, *held]
    return f"{text} ({'; '.join(remarks)})" if remarks else text


def _value_text(value: Value) -> str:
    return f"{value.name} {value.spec}"


def schedule_lines(compiled: Compiled) -> Iterator[str]:
    """A line for each step: its lane, what it waits for, and what it is."""
    schedule = compiled.schedule
    width = len(str(len(schedule.items)))
    lane_width = max((len(str(lane)) for lane in schedule.lanes), default=0)
    for number, item in enumerate(schedule.items):
        kind = "copy" if item.node.op is None else item.node.op.type
        outputs = ", ".join(v.name for v in item.node.outputs)
        after = f"  waits for {', '.join(map(str, item.waits))}" if item.waits else ""
        yield f"{number:{width}} {item.lane!s:{lane_width}}  {kind} -> {outputs}{after}"
    waits = sum(len(item.waits) for item in schedule.items)
    lanes = count(len(schedule.lanes), "lane")
    yield f"{count(len(schedule.items), 'step')} in {lanes}, {count(waits, 'wait')}"


def memory_lines(compiled: Compiled) -> Iterator[str]:
    """Where each value lies, and what the plan takes."""
    names: dict[Storage, list[str]] = {}
    for value, storage in compiled.places.items():
        names.setdefault(storage, []).append(value.name)
    places = sorted(names, key=lambda s: (str(s.device), not s.internal, _offset(compiled, s)))
    for storage in places:
        values = ", ".join(dict.fromkeys(names[storage]))
        place = _place_text(compiled, storage)
        yield f"{storage.device!s:6} {place}  {storage.nbytes:,} bytes: {values}"
    memory = compiled.memory
    for device, size in memory.arenas.items():
        bound = memory.lower_bound[device]
        ratio = f" ({size / bound:.2f} times the lower bound)" if bound else ""
        yield (
            f"arena on {device}: {size:,} bytes planned{ratio}, lower bound {bound:,}, "
            f"unplanned {memory.unplanned[device]:,}"
        )
    if not memory.arenas:
        yield "no arena: all values live in blobs that are kept"


def _offset(compiled: Compiled, storage: Storage) -> int:
    return compiled.memory.offsets.get(storage, 0)


def _place_text(compiled: Compiled, storage: Storage) -> str:
    if storage.constant:
        return "constant"
    if storage.blob:
        return f"blob {storage.blob}"
    return f"arena at {_offset(compiled, storage):,}"
