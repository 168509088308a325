"""What commands that look at a net share: finding it, its shapes, and a workspace in which it is created."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from gpunet.export import LoadedModel
    from gpunet.program import Program
    from gpunet.proto import NetDef
    from gpunet.specs import TensorSpec
    from gpunet.workspace import Workspace

F = TypeVar("F", bound=Callable[..., Any])

ZOO: Final = "zoo:"
#: Images and classes of a model of the zoo: those of the digits that come with gpunet.
_ZOO_IMAGE: Final = (1, 8, 8)
_ZOO_CLASSES: Final = 10
_INPUT = re.compile(r"([^=]+)=(scalar|\d+(?:x\d+)*)(?::(\w+))?")

NO_INIT_NET: Final = "there is no init net beside the predict net, --init-net names one"
UNKNOWN_INIT_NET: Final = "the file's name does not tell where its init net is, --init-net does"


@dataclass(frozen=True)
class LoadedNet:
    """A net, and what it needs to run.

    Attributes:
        net: the net.
        init_net: makes the parameters; may be empty.
        inputs: shape and type of what is to be fed.
        keep: blobs that the net keeps; ``None`` for what it says itself.
        outputs: what it is run for.
        unknown: inputs whose shape is not known.
        remark: where parameters are missing, why there is no init net; else nothing.
    """

    net: NetDef
    init_net: NetDef
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    keep: Collection[str] | None = None
    outputs: Sequence[str] = ()
    unknown: Sequence[str] = ()
    remark: str = ""

    @property
    def parameters(self) -> set[str]:
        """What the net reads and is not fed."""
        return set(self.net.external_input).difference(self.inputs, self.unknown)

    def create(
        self,
        device: str = "auto",
        *,
        seed: int = 0,
        engine: str | None = None,
        workers: int | None = None,
        streams: int | None = None,
        without: Collection[str] = (),
        keep: Collection[str] = (),
        detect_nan: bool = False,
    ) -> tuple[Workspace, Program]:
        """A workspace with the parameters, with inputs of made up values, and with the net.

        Floats are drawn from 0 to 1, whole numbers are 0: a label or an index that always exists. With
        ``detect_nan`` its runs stop at the first output with a NaN or an infinity.
        """
        import numpy as np

        from gpunet import nan_check
        from gpunet.dtypes import is_float
        from gpunet.workspace import Workspace

        workspace = Workspace(device, seed=seed)
        workspace.run_once(self.init_net)
        random = np.random.default_rng(seed)
        for name, spec in self.inputs.items():
            if is_float(spec.dtype):
                workspace.feed(name, np.asarray(random.random(spec.shape)).astype(spec.dtype))
            else:
                workspace.feed(name, np.zeros(spec.shape, spec.dtype))
        name = workspace.create(
            self.net,
            engine=engine,
            workers=workers,
            streams=streams,
            keep=[*keep] or self.keep,
            without=without,
        )
        if detect_nan:
            nan_check.watch(workspace)
        return workspace, workspace.program(name)


def load_net(
    name: str,
    inputs: Sequence[str] = (),
    batch_size: int | None = None,
    init_net: Path | None = None,
    *,
    runs: bool = True,
) -> LoadedNet:
    """The net that an argument of the command line names.

    Args:
        name: the folder or the predict net of a saved model, any file with a net, or ``zoo:MODEL`` for a
            model of the zoo with its gradients and updates.
        inputs: options ``--input``.
        batch_size: samples a run; by default what the model says.
        init_net: makes the parameters; by default the file beside the predict net.
        runs: whether it is to run, which needs the shapes of all inputs.

    Raises:
        FormatError, OSError, ZooError: there is no such net.
        click.BadParameter: an input is not right, or the shape of one is not known.
    """
    if name.startswith(ZOO):
        if init_net is not None:
            raise click.BadParameter(f"{name} makes its own parameters", param_hint="--init-net")
        found = _zoo_net(name.removeprefix(ZOO), batch_size)
        return replace(found, inputs={**found.inputs, **_parse_inputs(inputs, list(found.inputs))})
    model, remark = _load_files(Path(name), init_net)
    specs = _input_specs(model, inputs, batch_size)
    unknown = [blob for blob in model.inputs if blob not in specs]
    made = {blob for op in model.init_net.op for blob in op.output}.union(specs, unknown)
    missing = unknown + [blob for blob in model.predict_net.external_input if blob not in made]
    if missing and runs:
        others = f", nor are those of {len(missing) - 1:,} others" if len(missing) > 1 else ""
        raise click.BadParameter(
            f"the shape of input {missing[0]!r} is not known{others}, wanted --input {missing[0]}=SHAPE"
            f"{' and so on' if others else ''}{f' ({remark})' if remark else ''}",
            param_hint="--input",
        )
    return LoadedNet(
        model.predict_net, model.init_net, specs, outputs=model.outputs, unknown=unknown, remark=remark
    )


def _zoo_net(name: str, batch_size: int | None) -> LoadedNet:
    from gpunet.optimizers import SGD
    from gpunet.specs import TensorSpec
    from gpunet.zoo import build, lookup

    recipe = lookup(name).recipe
    model = build(name, _ZOO_IMAGE, _ZOO_CLASSES)
    model.add_gradients("loss")
    SGD(
        learning_rate=recipe.learning_rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
    ).apply(model)
    specs = {}
    for blob in model.inputs:
        known = model.specs[blob]
        if isinstance(known, TensorSpec):
            specs[blob] = known.with_shape(batch_size or recipe.batch_size, *known.shape[1:])
    outputs = ["loss", "accuracy"]
    return LoadedNet(model.net.proto, model.init_net.proto, specs, outputs, outputs)


def _load_files(path: Path, init_net: Path | None) -> tuple[LoadedModel, str]:
    """A model, and a remark where its parameters are missing."""
    from gpunet.errors import FormatError
    from gpunet.export import load_model

    if init_net is not None:
        return load_model(path, init_net=init_net), ""
    predict_only = load_model(path, parameters=False)
    try:
        return load_model(path), ""
    except FileNotFoundError:
        return predict_only, NO_INIT_NET
    except FormatError:
        if "predict" in predict_only.path.name:
            raise
        return predict_only, UNKNOWN_INIT_NET


def _input_specs(model: LoadedModel, given: Sequence[str], batch_size: int | None) -> dict[str, TensorSpec]:
    """Shapes and types of inputs: what is given, else what the model tells, with another batch size."""
    from gpunet.specs import TensorSpec

    specs = {}
    for name, known in model.value_info.items():
        shape = (batch_size or known.shape[0], *known.shape[1:]) if known.rank else ()
        specs[name] = TensorSpec(shape, known.dtype)
    specs.update(_parse_inputs(given, model.inputs, list(model.predict_net.external_input)))
    return specs


def _parse_inputs(
    given: Sequence[str], inputs: Sequence[str], allowed: Sequence[str] | None = None
) -> dict[str, TensorSpec]:
    """Options ``--input NAME=SHAPE[:TYPE]`` as specs.

    Args:
        given: the options.
        inputs: the inputs of the net, for messages.
        allowed: what may be given; by default the inputs.
    """
    from gpunet.dtypes import as_dtype
    from gpunet.errors import DataTypeError
    from gpunet.specs import spec

    specs = {}
    for text in given:
        match = _INPUT.fullmatch(text)
        if match is None:
            raise click.BadParameter(
                f"found {text!r}, wanted NAME=SHAPE like data=1x3x224x224, or NAME=SHAPE:TYPE",
                param_hint="--input",
            )
        name, sizes, type = match.groups()
        if name not in (inputs if allowed is None else allowed):
            raise click.BadParameter(
                f"the model has no input {name!r}, wanted one of {', '.join(inputs)}", param_hint="--input"
            )
        shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
        try:
            specs[name] = spec(shape, as_dtype(type or "float32"))
        except DataTypeError as error:
            raise click.BadParameter(f"found {text!r}: {error}", param_hint="--input") from None
    return specs


_NET: Final = (
    click.argument("net"),
    click.option(
        "--input",
        "inputs",
        multiple=True,
        metavar="NAME=SHAPE[:TYPE]",
        help="Shape and type of an input, like data=1x3x224x224, where the model does not tell it.",
    ),
    click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Samples a run."),
    click.option(
        "--init-net",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The net that makes the parameters; by default beside NET, its name with init for predict.",
    ),
)
#: Of every command that runs a net.
detect_nan_option: Final = click.option(
    "--detect-nan", is_flag=True, help="Stop at the first output with NaN or infinity (slow)."
)
_OPTIONS: Final = (
    *_NET,
    click.option("--device", default="auto", show_default=True, help="cpu, cuda:N, sim:N, or auto."),
    click.option("--engine", help="simple, async_scheduling, graph, or a net type of Caffe2."),
    click.option("--workers", type=click.IntRange(min=1), metavar="N", help="CPU threads of the engine."),
    click.option("--streams", type=click.IntRange(min=1), metavar="N", help="Streams on a GPU."),
    click.option("--without", multiple=True, metavar="PASS", help="Switch a pass off; several times."),
    click.option("--keep", multiple=True, metavar="BLOB", help="Keep a blob after a run; several times."),
    detect_nan_option,
)


def net_argument(function: F) -> F:
    """Adds the argument NET, and the options that :func:`load_net` takes, to a command."""
    for option in reversed(_NET):
        function = option(function)
    return function


def net_options(function: F) -> F:
    """Adds the argument NET, and the options that :func:`created` takes, to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def created(
    net: str,
    inputs: Sequence[str],
    batch_size: int | None,
    init_net: Path | None,
    device: str,
    **options: Any,
) -> tuple[LoadedNet, Workspace, Program]:
    """The net with these options, created in a workspace; nothing of it has run."""
    loaded = load_net(net, inputs, batch_size, init_net)
    return loaded, *loaded.create(device, **options)


def count(number: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
