"""Models: an init net that makes parameters, a main net that uses them, and what training must know of
both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final

from gpunet.dtypes import DTypeLike, as_dtype, is_float
from gpunet.errors import GradientError, NetError, ShapeError
from gpunet.gradient_maker import Gradient, GradientSlice
from gpunet.gradients import backward
from gpunet.inference import infer_operator
from gpunet.layers import Layers
from gpunet.net import Net
from gpunet.operator import Operator
from gpunet.operators.convolution import CONVOLUTIONS
from gpunet.proto import NetDef, OperatorDef
from gpunet.scope import scoped
from gpunet.specs import BlobSpec, Shape, TensorSpec


@dataclass
class Parameter:
    """A blob that training changes.

    Attributes:
        name: the blob.
        decay: whether weight decay applies (to weights; not to biases and the scales of normalisation).
        gradient: the blob of its gradient, a sparse pair, or ``None`` before :meth:`Model.add_gradients`.
    """

    name: str
    decay: bool = True
    gradient: Gradient = None


class Model(Layers):
    """A network under construction, with its parameters.

    Shapes and types of all blobs are inferred as operators are added (:attr:`specs`), so that a layer that
    does not fit fails where it is added, and layers need not be told how many channels come in.

    Attributes:
        init_net: makes parameters, running statistics and training state; run once.
        net: the forward pass, and, once added, gradients and updates; run once a step.
        params: what training changes, in the order of creation.
        statistics: blobs that the forward pass itself updates (running means), saved with a model.
        state: blobs of optimizers, saved in checkpoints only.
    """

    def __init__(self, name: str = "model") -> None:
        self.name = name
        self.init_net = Net(f"{name}_init")
        self.net = Net(name)
        self.params: list[Parameter] = []
        self.statistics: list[str] = []
        self.state: list[str] = []
        self.inputs: list[str] = []
        self.specs: dict[str, BlobSpec | None] = {}
        self._forward_length: int | None = None

    # Building

    def input(self, name: str, shape: Shape, dtype: DTypeLike = "float32") -> str:
        """Declares a blob that is fed before each run.

        Args:
            name: the blob.
            shape: a shape for inference; its first dimension, the batch, may differ at run time.
            dtype: element type.

        Raises :class:`ShapeError` for what is no shape, :class:`NetError` for a name that the model has.
        """
        if not isinstance(shape, Sequence) or not all(isinstance(n, Integral) and n >= 0 for n in shape):
            raise ShapeError(
                f"input {name!r} of model {self.name!r} has shape {shape!r}, wanted whole numbers, 0 or more "
                "(batches of another size run too)"
            )
        if self.specs.get(name) is not None:
            raise NetError(
                f"model {self.name!r} has a blob {name!r} already, wanted another name for an input"
            )
        self.specs[name] = TensorSpec(tuple(map(int, shape)), as_dtype(dtype))
        self.inputs.append(name)
        self.net.add_external_input(name)
        return name

    def add(
        self,
        type: str,
        inputs: str | Sequence[str] = (),
        outputs: str | Sequence[str] | None = None,
        **args: Any,
    ) -> Any:
        """Appends any operator to the main net and returns its output name, or a tuple of names.

        Raises SchemaError, ArgumentError, ShapeError or DataTypeError, located at the operator, where it does
        not fit; the net is unchanged then.
        """
        self._check_open()
        trial = Net(self.net.name)
        if outputs is None:
            outputs = self._fresh(type)
        trial.add(type, inputs, outputs, **args)
        definition = trial.proto.op[0]
        self._infer(definition, self.net)
        self.net.append(definition)
        names = tuple(definition.output)
        return names[0] if len(names) == 1 else names

    def add_parameter(
        self, name: str, shape: Shape, filler: str = "XavierFill", *, decay: bool = True, **args: Any
    ) -> str:
        """Makes a parameter with a fill operator in the init net, and returns its (scoped) name.

        A parameter that exists is used again if the shape is the same; another shape raises
        :class:`ShapeError`.
        """
        name = self._fill(name, shape, filler, **args)
        if all(p.name != name for p in self.params):
            self.params.append(Parameter(name, decay))
        return name

    def add_statistic(self, name: str, shape: Shape, value: float) -> str:
        """Makes a blob that the forward pass updates, like a running mean, and returns its (scoped) name."""
        name = self._fill(name, shape, "ConstantFill", value=value)
        if name not in self.statistics:
            self.statistics.append(name)
        return name

    def add_state(
        self,
        name: str,
        shape: Shape | None = None,
        like: str | None = None,
        value: Any = 0.0,
        dtype: DTypeLike = "float32",
    ) -> str:
        """Makes a blob of training state with ConstantFill in the init net, of a given shape or that of blob
        ``like``.

        Returns the name, which is not scoped. The same name again is the same blob.
        """
        if name in self.state:
            return name
        if like is not None:
            self.init_net.add("ConstantFill", [like], [name], value=float(value))
        else:
            kind = as_dtype(dtype)
            number = float(value) if is_float(kind) else int(value)
            self.init_net.add("ConstantFill", [], [name], shape=list(shape or ()), value=number, dtype=kind)
        self._infer(self.init_net.proto.op[-1], self.init_net)
        self.state.append(name)
        return name

    def add_blob(self, name: str, shape: Shape, filler: str = "ConstantFill", **args: Any) -> str:
        """Makes a blob in the init net that is neither saved nor in checkpoints, and returns its name, which
        is not scoped. The same name again is the same blob.
        """
        if not self.init_net.makes(name):
            self.init_net.add(filler, [], [name], shape=list(shape), **args)
            self._infer(self.init_net.proto.op[-1], self.init_net)
        return name

    def shape_of(self, blob: str) -> Shape:
        """The inferred shape of a blob; raises :class:`ShapeError` where it is not known."""
        found = self.specs.get(blob)
        if not isinstance(found, TensorSpec):
            raise ShapeError(
                f"the shape of blob {blob!r} is not known, wanted Model.input() for it or an operator that "
                "makes it"
            )
        return found.shape

    # Training

    def add_gradients(
        self, loss: str | Sequence[str] | Mapping[str, Gradient], *, input_gradients: bool = False
    ) -> dict[str, Gradient]:
        """Appends the operators that compute the gradients of ``loss`` (seeded with ones) and fills in those
        of the parameters.

        Args:
            loss: blobs to differentiate, or a mapping from them to the blobs that hold their gradients.
            input_gradients: whether gradients of the model's inputs are wanted. Training has no use for
                them, so the first layer leaves them out unless this is set.

        Returns the gradient of every blob that has one. Raises :class:`GradientError` if it was called
        before, if an operator has no gradient, or if no parameter gets one.
        """
        if self._forward_length is not None:
            raise GradientError(
                f"model {self.name!r} has its gradients already, wanted one call with all losses"
            )
        targets = [loss] if isinstance(loss, str) else loss
        length = len(self.net.proto.op)
        definitions, gradients = backward(list(self.net.proto.op), targets)
        if not input_gradients:
            _drop_gradients(self.inputs, definitions, gradients)
        for definition in definitions:
            self._infer(definition, self.net)
        self.net.extend(definitions)
        self._forward_length = length
        for parameter in self.params:
            parameter.gradient = gradients.get(parameter.name)
        if self.params and all(p.gradient is None for p in self.params):
            raise GradientError(
                f"no parameter of model {self.name!r} gets a gradient from {targets!r}, wanted a loss that "
                "depends on one"
            )
        return dict(gradients)

    def forward_operators(self) -> list[OperatorDef]:
        """The operators of the main net before gradients and updates."""
        return list(self.net.proto.op[: self._forward_length])

    def insert_operators(self, after: Mapping[int, Sequence[OperatorDef]]) -> None:
        """Puts operators behind positions of the main net; shapes of what they make are inferred.

        Raises :class:`NetError` for a position within the forward pass, or outside the net.
        """
        first, length = self._forward_length or 0, len(self.net.proto.op)
        for position in after:
            if not first <= position < length:
                raise NetError(
                    f"operators were to be inserted behind position {position} of model {self.name!r}, "
                    f"wanted {first} to {length - 1}: behind an operator of its backward pass"
                )
        old = list(self.net.proto.op)
        self._restart_net()
        for position, op in enumerate(old):
            self.net.append(op)
            for definition in after.get(position, ()):
                self._infer(definition, self.net)
                self.net.append(definition)

    def rewrite_forward(self, rewrite: Callable[[OperatorDef], Sequence[OperatorDef]]) -> None:
        """Replaces each operator of the forward pass by those that ``rewrite`` gives for it, in order; shapes
        are inferred anew.

        Raises :class:`NetError` once the model has its gradients.
        """
        self._check_open()
        made = [op for definition in self.net.proto.op for op in rewrite(definition)]
        kept = {n: s for n, s in self.specs.items() if n in self.inputs or self.init_net.makes(n)}
        self.specs = kept
        self._restart_net()
        for definition in made:
            self._infer(definition, self.net)
            self.net.append(definition)

    def predict_net(self, outputs: str | Sequence[str]) -> NetDef:
        """The part of the forward pass that ``outputs`` need, in test mode: no dropout, running statistics in
        batch norm, and no labels for the probabilities of a ``SoftmaxWithLoss`` whose loss is not asked for.

        External inputs are the model's inputs first, then parameters and statistics.
        """
        wanted = [outputs] if isinstance(outputs, str) else list(outputs)
        needed, chosen = set(wanted), []
        for op in reversed(self.forward_operators()):
            if needed.intersection(op.output):
                op = _without_loss(op, needed)
                needed.difference_update(set(op.output) - set(op.input))
                op = _test_mode(op)
                needed.update(op.input)
                chosen.append(op)
        unknown = [name for name in wanted if not any(name in op.output for op in chosen)]
        if unknown:
            raise NetError(
                f"model {self.name!r} has no operator that makes {unknown[0]!r}, wanted outputs of its "
                "forward pass"
            )
        net = Net(f"{self.name}_predict")
        net.add_external_input(*(name for name in self.inputs if name in needed))
        net.add_external_input(*(name for name in self.saved_blobs() if name in needed))
        net.extend(reversed(chosen))
        net.add_external_output(*wanted)
        return net.proto

    def saved_blobs(self) -> list[str]:
        """Blobs that make up the trained model: parameters and statistics."""
        return [p.name for p in self.params] + self.statistics

    def training_blobs(self) -> list[str]:
        """Blobs that a checkpoint must hold: the trained model and the state of the optimizer."""
        return self.saved_blobs() + self.state

    # Inside

    def _fill(self, name: str, shape: Shape, filler: str, **args: Any) -> str:
        name = scoped(name)
        known = self.specs.get(name)
        if known is not None:
            if not isinstance(known, TensorSpec) or known.shape != tuple(shape):
                raise ShapeError(
                    f"parameter {name!r} exists as {known}, wanted the same shape {tuple(shape)} to share it"
                )
            return name
        self.init_net.add(filler, [], [name], shape=list(shape), **args)
        self._infer(self.init_net.proto.op[-1], self.init_net)
        return name

    def _infer(self, definition: OperatorDef, net: Net) -> None:
        # Blobs that nobody declared have unknown shapes; what depends on them stays unknown.
        for name in definition.input:
            self.specs.setdefault(name, None)
        infer_operator(Operator(definition, net.name, len(net.proto.op)), self.specs)

    def _restart_net(self) -> None:
        """Takes all operators from the main net; what else it says stays."""
        proto = NetDef()
        proto.CopyFrom(self.net.proto)
        del proto.op[:]
        self.net = Net(self.net.name, proto)

    def _fresh(self, type: str) -> str:
        number = 0
        while True:
            name = scoped(type.lower() + (f"_{number}" if number else ""))
            if name not in self.specs:
                return name
            number += 1

    def _check_open(self) -> None:
        if self._forward_length is not None:
            raise NetError(
                f"model {self.name!r} has its gradients already, wanted all forward operators before them"
            )

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {len(self.net.proto.op)} operators, {len(self.params)} parameters)"


#: Gradient operators that may leave out their last output, the gradient of their first input.
_OPTIONAL_LAST: Final = frozenset(
    f"{type}Gradient" for type in (*CONVOLUTIONS, "ConvTranspose", "FC", "FCTransposed")
)


def _drop_gradients(
    inputs: Sequence[str], definitions: Sequence[OperatorDef], gradients: dict[str, str | GradientSlice]
) -> None:
    """Leaves out gradients of inputs that one operator makes, and may leave out, and none reads."""
    read = {name for definition in definitions for name in definition.input}
    for blob in inputs:
        gradient = gradients.get(blob)
        makers = [d for d in definitions if gradient in d.output]
        if gradient in read or len(makers) != 1:
            continue
        (maker,) = makers
        if maker.type in _OPTIONAL_LAST and maker.input[0] == blob and maker.output[-1] == gradient:
            maker.output.pop()
            del gradients[blob]


def _without_loss(op: OperatorDef, needed: Set[str]) -> OperatorDef:
    """The Softmax in a SoftmaxWithLoss of whose outputs only the probabilities are needed."""
    probabilities, others = op.output[:1], op.output[1:]
    if op.type != "SoftmaxWithLoss" or needed.isdisjoint(probabilities) or not needed.isdisjoint(others):
        return op
    result = OperatorDef(type="Softmax", name=op.name, input=op.input[:1], output=op.output[:1])
    result.arg.extend(arg for arg in op.arg if arg.name in Operator(result).schema.arg_table)
    if op.HasField("device_option"):
        result.device_option.CopyFrom(op.device_option)
    return result


def _test_mode(op: OperatorDef) -> OperatorDef:
    """The definition as it is used for inference."""
    result = OperatorDef()
    result.CopyFrom(op)
    if op.type == "SyncBatchNorm":
        # With the running statistics it is SpatialBN; what the ranks have in common is not needed.
        result.type = "SpatialBN"
        del result.input[5:]
    schema = Operator(op).schema
    if result.type == op.type and "is_test" not in schema.arg_table:
        return op
    kept = [arg for arg in op.arg if arg.name != "is_test"]
    del result.arg[:], result.output[1:]
    result.arg.extend(kept)
    result.arg.add(name="is_test", i=1)
    return result
