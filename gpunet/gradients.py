"""Gradients, graph to graph: operator definitions that compute the gradients of a net's operators.

Names and accumulation follow Caffe2: the gradient of blob ``X`` is ``X_grad``; where several operators use
one version of ``X``, the first gradient made keeps that name, the others become ``_X_grad_autosplit_0``,
``_1``, ... and a Sum puts the total into ``X_grad``. Sparse gradients are concatenated instead
(``X_grad_indices_concat``, ``X_grad_values_concat``). Seeds are ``Y_autogen_grad``, filled with 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpunet.definitions import make_operator
from gpunet.errors import GpunetError, GradientError
from gpunet.gradient_maker import Gradient, GradientBuilder, GradientSlice, gradient_name
from gpunet.operator import Operator
from gpunet.proto import DeviceOption, OperatorDef
from gpunet.schema import NO_GRADIENT, GradientRule

#: Operators whose gradient exists even where nothing flows back into their outputs.
_ALWAYS_DIFFERENTIATED = frozenset(["ZeroGradient"])


def gradient_ops(
    op: OperatorDef, output_gradients: Mapping[str, Gradient]
) -> tuple[list[OperatorDef], dict[str, str | GradientSlice]]:
    """The gradient of one operator.

    Args:
        op: the forward operator.
        output_gradients: for each output, the name of its gradient blob (or a :class:`GradientSlice`);
            outputs without one may be left out.

    Returns:
        The gradient operators, and for each input that has a gradient the blob that holds it (or a
        :class:`GradientSlice`).

    Raises:
        GradientError: the operator type has no gradient, or one that is needed is not given.
        SchemaError, ArgumentError: the operator does not fit its schema.
    """
    operator = Operator(op)
    definitions, grads = _differentiate(operator, [output_gradients.get(name) for name in operator.outputs])
    return definitions, {
        name: grad for name, grad in zip(operator.inputs, grads, strict=False) if grad is not None
    }


def _differentiate(
    op: Operator, output_grads: Sequence[Gradient]
) -> tuple[list[OperatorDef], list[Gradient]]:
    rule = op.schema.gradient
    if rule is NO_GRADIENT:
        return [], [None] * len(op.inputs)
    if isinstance(rule, GradientRule):
        raise GradientError(
            "this operator is not differentiable, wanted a path to the loss without it"
        ).locate(op.where)
    builder = GradientBuilder(op, output_grads)
    try:
        definitions = list(rule(builder))
    except GpunetError as error:
        raise error.locate(op.where) from None
    for definition in definitions:
        if op.definition.HasField("device_option"):
            definition.device_option.CopyFrom(op.definition.device_option)
        if op.definition.engine:
            definition.engine = op.definition.engine
        if builder.copy_arguments:
            definition.arg.extend(op.definition.arg)
        definition.is_gradient_op = True
    return definitions, builder.input_grads


@dataclass
class _Source:
    """Where one contribution to a blob's gradient comes from: output slots of gradient operators, or a name
    passed through.
    """

    gradient: str | GradientSlice
    device: DeviceOption
    #: (operator, index of its output) of the dense gradient, or of indices and values; ``None`` for a name
    #: that was passed through.
    slots: tuple[tuple[OperatorDef, int] | None, ...]


class _Backward:
    """The walk over a list of forward operators, last to first."""

    def __init__(self, definitions: Sequence[OperatorDef]) -> None:
        self.operators = [Operator(definition, index=i) for i, definition in enumerate(definitions)]
        self.made: list[OperatorDef] = []
        self.gradients: dict[str, Gradient] = {}
        self.results: dict[str, str | GradientSlice] = {}
        self._version: dict[str, int] = defaultdict(int)
        self._before: list[dict[str, int]] = []
        self._after: list[dict[str, int]] = []
        self._uses: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._gradient_version: dict[str, int] = {}
        self._sources: dict[tuple[str, int], list[_Source]] = defaultdict(list)
        for index, op in enumerate(self.operators):
            self._before.append({name: self._version[name] for name in op.inputs})
            for name in op.inputs:
                self._uses[name, self._version[name]].append(index)
            for name in op.outputs:
                self._version[name] += 1
            self._after.append({name: self._version[name] for name in op.outputs})
        self._check_orphans()

    def _check_orphans(self) -> None:
        for op, after in zip(self.operators, self._after, strict=False):
            if op.type == "StopGradient" and not self._uses.get((op.outputs[0], after[op.outputs[0]])):
                raise GradientError(
                    f"output {op.outputs[0]!r} is used by no operator, wanted one that reads it (mostly, "
                    "StopGradient is used in place)"
                ).locate(op.where)

    def seed(self, seeds: Mapping[str, Gradient]) -> None:
        for blob, grad in seeds.items():
            if blob not in self._version:
                raise GradientError(f"cannot differentiate {blob!r}: no operator reads or makes it")
            version = self._version[blob]
            if grad is None:
                grad = f"{blob}_autogen_grad"
                fill = make_operator("ConstantFill", [blob], [grad], value=1.0)
                maker = next((op for op in reversed(self.operators) if blob in op.outputs), None)
                if maker is not None and maker.definition.HasField("device_option"):
                    fill.device_option.CopyFrom(maker.definition.device_option)
                self.made.append(fill)
                self._sources[blob, version].append(_Source(grad, fill.device_option, ((fill, 0),)))
            self._set(blob, grad, version)

    def run(self) -> None:
        for index in reversed(range(len(self.operators))):
            op = self.operators[index]
            output_grads = [self._current(name, self._after[index][name]) for name in op.outputs]
            if any(g is not None for g in output_grads) or op.type in _ALWAYS_DIFFERENTIATED:
                self._differentiate(index, output_grads)
            else:
                for name in op.outputs:
                    self._forget(name)
            self._accumulate(index)

    def _current(self, blob: str, version: int) -> Gradient:
        return self.gradients.get(blob) if self._gradient_version.get(blob) == version else None

    def _set(self, blob: str, gradient: Gradient, version: int) -> None:
        self.gradients[blob] = gradient
        self._gradient_version[blob] = version
        if gradient is not None and version == self._version[blob]:
            self.results[blob] = gradient

    def _forget(self, blob: str) -> None:
        self.gradients.pop(blob, None)
        self._gradient_version.pop(blob, None)

    def _differentiate(self, index: int, output_grads: list[Gradient]) -> None:
        op, before = self.operators[index], self._before[index]
        definitions, input_grads = _differentiate(op, output_grads)
        self._check_inputs(index, definitions, output_grads)
        for name in op.outputs:
            self._forget(name)
        self._record_sources(op, before, definitions, input_grads)
        self.made.extend(definitions)
        for name, grad in zip(op.inputs, input_grads, strict=False):
            # An input without a gradient keeps what later operators contributed.
            if grad is not None:
                self._set(name, grad, before[name])

    def _record_sources(
        self,
        op: Operator,
        before: dict[str, int],
        definitions: list[OperatorDef],
        input_grads: list[Gradient],
    ) -> None:
        slots: dict[str, list[tuple[OperatorDef, int]]] = defaultdict(list)
        for definition in definitions:
            for i, name in enumerate(definition.output):
                slots[name].append((definition, i))

        def take(name: str) -> tuple[OperatorDef, int] | None:
            found = slots.get(name)
            # An operator that uses one blob twice writes the same gradient name twice: one slot for each use.
            return None if not found else found.pop(0) if len(found) > 1 else found[0]

        for name, grad in zip(op.inputs, input_grads, strict=False):
            if grad is None:
                continue
            parts = [grad] if isinstance(grad, str) else [grad.indices, grad.values]
            places = tuple(take(part) for part in parts)
            device = next((p[0].device_option for p in places if p), op.definition.device_option)
            self._sources[name, before[name]].append(_Source(grad, device, places))

    def _check_inputs(self, index: int, definitions: list[OperatorDef], output_grads: list[Gradient]) -> None:
        op, before, after = self.operators[index], self._before[index], self._after[index]
        upstream = {
            part for g in output_grads if g is not None for part in ([g] if isinstance(g, str) else g)
        }
        local: set[str] = set()
        for definition in definitions:
            for name in definition.input:
                role, wanted = ("output", after.get(name)) if name in after else ("input", before.get(name))
                if (
                    name not in upstream
                    and name not in local
                    and wanted is not None
                    and wanted != self._version[name]
                ):
                    raise GradientError(
                        f"the gradient needs {role} {name!r} as this operator left it, but a later operator "
                        "overwrote it "
                        f"(version {wanted} is needed, version {self._version[name]} is there), wanted "
                        "another output name there"
                    ).locate(op.where)
            local.update(definition.output)

    def _accumulate(self, index: int) -> None:
        before = self._before[index]
        for name in sorted(before):
            version = before[name]
            sources = self._sources.get((name, version), [])
            if self._uses[name, version][0] != index or len(sources) < 2:
                continue
            kinds = {isinstance(s.gradient, GradientSlice) for s in sources}
            if len(kinds) > 1:
                raise GradientError(
                    f"blob {name!r} gets both sparse and dense gradients, which cannot be added, wanted one "
                    "kind"
                ).locate(self.operators[index].where)
            device = _common_device(name, sources)
            made, total = _concat(name, sources) if kinds == {True} else _sum(name, sources)
            for definition in made:
                definition.device_option.CopyFrom(device)
            self.made.extend(made)
            self._set(name, total, version)


def _common_device(name: str, sources: Sequence[_Source]) -> DeviceOption:
    options = [s.device for s in sources]
    places = {(o.device_type, o.device_id) for o in options}
    if len(places) > 1:
        found = ", ".join(f"type {t} number {i}" for t, i in sorted(places))
        raise GradientError(f"gradients of blob {name!r} are made on different devices ({found}), wanted one")
    device = DeviceOption()
    device.CopyFrom(options[0])
    # Caffe2 marks the sums that it adds itself this way.
    device.extra_info.append("is_auto_gen_sum_ops:1")
    return device


def _rename(slot: tuple[OperatorDef, int], name: str) -> str:
    definition, index = slot
    definition.output[index] = name
    return name


def _sum(blob: str, sources: Sequence[_Source]) -> tuple[list[OperatorDef], str]:
    """A Sum of dense gradients.

    Contributions after the first get names of their own; the total keeps the first one's.
    """
    total = next((s.slots[0][0].output[s.slots[0][1]] for s in sources if s.slots[0]), gradient_name(blob))
    terms: list[str] = []
    renamed = 0
    kept = False
    for source in sources:
        slot = source.slots[0]
        if slot is None:
            if source.gradient == total:
                raise GradientError(
                    f"the gradient {total!r} of blob {blob!r} is both passed through and written, wanted "
                    "other names"
                )
            terms.append(str(source.gradient))
        elif not kept:
            kept = True
            terms.append(slot[0].output[slot[1]])
        else:
            terms.append(_rename(slot, f"_{slot[0].output[slot[1]]}_autosplit_{renamed}"))
            renamed += 1
    if total in terms:
        # Sum works in place on its first input only.
        at = terms.index(total)
        terms[0], terms[at] = terms[at], terms[0]
    return [make_operator("Sum", terms, [total])], total


def _concat(blob: str, sources: Sequence[_Source]) -> tuple[list[OperatorDef], GradientSlice]:
    """Concatenates sparse gradients along their first dimension; equal indices stay apart."""
    made = []
    names = []
    for part, label in enumerate(("indices", "values")):
        terms = []
        for number, source in enumerate(sources):
            slot = source.slots[part]
            name = source.gradient[part]
            terms.append(name if slot is None else _rename(slot, f"_{name}_autosplit_{number}"))
        total = f"{gradient_name(blob)}_{label}_concat"
        made.append(make_operator("Concat", terms, [total, f"{total}_split"], axis=0))
        names.append(total)
    return made, GradientSlice(*names)


def backward(
    definitions: Sequence[OperatorDef], targets: Iterable[str] | Mapping[str, Gradient]
) -> tuple[list[OperatorDef], dict[str, str | GradientSlice]]:
    """Gradient operators for a list of forward operators.

    Args:
        definitions: the forward operators, in order.
        targets: blobs to differentiate, each seeded with ones; or a mapping from such blobs to blobs that
            hold their gradients (``None`` seeds with ones).

    Returns:
        The operators to append, and the gradient of each blob (as last written) that has one.

    Raises:
        GradientError: an operator on the way is not differentiable; a blob that a gradient needs is
            overwritten later; sparse and dense gradients of one blob meet.
    """
    seeds = targets if isinstance(targets, Mapping) else dict.fromkeys(targets)
    walk = _Backward(definitions)
    walk.seed({str(blob): grad for blob, grad in seeds.items()})
    walk.run()
    return walk.made, walk.results
