"""Saved models, as Caffe2's exporters write them: an init net fills the parameters, a predict net uses them.

A folder holds

* ``init_net.pb``: one ``GivenTensor...Fill`` for each parameter and running statistic;
* ``predict_net.pb``: the network for inference, whose external inputs name what is to be fed first;
* ``value_info.json``: the type and shape of what is to be fed, as in Caffe2's model zoo: ``{"data": [1, [1,
  3, 224, 224]]}``, where the first number is a ``TensorProto.DataType`` and the first size is that of the
  batch, which may differ;
* the same nets as text, ``predict_net.pbtxt`` and ``init_net.pbtxt``, for people and diff tools. A text
  takes about five times the memory of its numbers, so that of the init net is written only where the
  parameters have at most :data:`MAX_TEXT_PARAMETER_BYTES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.definitions import make_operator
from gpunet.devices import Device
from gpunet.dtypes import dtype_from_proto, dtype_to_proto, is_half
from gpunet.errors import BlobError, DataTypeError, FormatError, NetError
from gpunet.model import Model
from gpunet.proto import NetDef, OperatorDef
from gpunet.serialization import MAX_MESSAGE_BYTES, AnyPath, atomic_write, load, read_file, save
from gpunet.specs import TensorSpec
from gpunet.workspace import Workspace

#: Parameters of more bytes are not also written as text.
MAX_TEXT_PARAMETER_BYTES: Final = 1 << 20

_MAX_VALUE_INFO_BYTES: Final = 1 << 20
_SUFFIXES: Final = (".pb", ".pbtxt", ".prototxt")
_VALUE_INFO: Final = "value_info.json"

# ---------------------------------------------------------------------------------------------------------
# Saving


def save_model(
    folder: AnyPath, model: Model, workspace: Workspace, outputs: str | Sequence[str]
) -> LoadedModel:
    """Writes a trained model into a folder. Each file is replaced atomically, the predict net last.

    Args:
        folder: where to; made if needed.
        model: the model; its forward pass is saved in test mode.
        workspace: holds the parameters and statistics.
        outputs: the blobs that the saved network is to compute.

    Returns:
        What was saved, as :func:`load_model` gives it.

    Raises:
        NetError: the model does not make an output.
        BlobError: a parameter is not in the workspace.
        DataTypeError: a parameter is of a type that no fill operator gives.
        FormatError: a net is larger than the 2 GiB of a protobuf message.
        OSError: a file cannot be written.
    """
    predict_net = model.predict_net(outputs)
    needed = set(predict_net.external_input)
    names = [name for name in model.saved_blobs() if name in needed]
    init_net = NetDef(name=f"{model.name}_init")
    size = 0
    for name in names:
        value = workspace.fetch(name)
        init_net.op.append(given_fill(name, value))
        size += value.nbytes
    init_net.external_output.extend(names)
    specs = {name: model.specs.get(name) for name in model.inputs if name in needed}
    value_info = {name: found for name, found in specs.items() if isinstance(found, TensorSpec)}
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save(path / "init_net.pb", init_net)
    if size <= MAX_TEXT_PARAMETER_BYTES:
        save(path / "init_net.pbtxt", init_net)
    else:
        (path / "init_net.pbtxt").unlink(missing_ok=True)
    described = {n: [dtype_to_proto(s.dtype), list(s.shape)] for n, s in value_info.items()}
    atomic_write(path / _VALUE_INFO, json.dumps(described).encode() + b"\n")
    save(path / "predict_net.pbtxt", predict_net)
    save(path / "predict_net.pb", predict_net)
    return LoadedModel(path / "predict_net.pb", init_net, predict_net, value_info)


_FILLS: Final = {
    np.dtype(dtype): fill
    for dtype, fill in {
        "float32": "GivenTensorFill",
        "float64": "GivenTensorDoubleFill",
        "bool": "GivenTensorBoolFill",
        "int16": "GivenTensorInt16Fill",
        "int32": "GivenTensorIntFill",
        "int64": "GivenTensorInt64Fill",
        "object": "GivenTensorStringFill",
    }.items()
}


def given_fill(name: str, value: Any) -> OperatorDef:
    """The operator that fills the blob ``name`` with ``value``.

    Raises:
        DataTypeError: no fill operator gives such a value.
    """
    if not isinstance(value, np.ndarray):
        raise DataTypeError(f"blob {name!r} is {type(value).__name__}, wanted a tensor to save")
    shape = list(value.shape)
    if value.dtype == np.uint8:
        return make_operator(
            "GivenTensorByteStringToUInt8Fill", [], [name], shape=shape, values=[value.tobytes()]
        )
    if is_half(value.dtype):
        # Each is a float32, the type of numbers in arguments.
        return make_operator(
            "GivenTensorFill", [], [name], shape=shape, values=value.ravel().tolist(), dtype=value.dtype
        )
    fill = _FILLS.get(value.dtype)
    if fill is None:
        raise DataTypeError(
            f"blob {name!r} is {value.dtype}, wanted one of {', '.join(t.name for t in _FILLS)}, float16, "
            "bfloat16, uint8 to save"
        )
    return make_operator(fill, [], [name], shape=shape, values=value.ravel().tolist())


# ---------------------------------------------------------------------------------------------------------
# Loading


@dataclass(frozen=True)
class LoadedModel:
    """A model from a file.

    Attributes:
        path: the predict net.
        init_net: fills the parameters; empty where only the predict net was asked for.
        predict_net: the network.
        value_info: type and shape of the inputs, where the model tells.
    """

    path: Path
    init_net: NetDef
    predict_net: NetDef
    value_info: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def inputs(self) -> list[str]:
        """The blobs to feed, in order: what the predict net reads and the init net does not fill.

        Caffe2's mobile exporter fills those too, each with a single 0, so that they exist; such fills do not
        count.
        """
        if not self.init_net.op and self.value_info:
            return [name for name in self.predict_net.external_input if name in self.value_info]
        made = {name for op in self.init_net.op for name in op.output}
        made -= {op.output[0] for op in self.init_net.op if self._is_placeholder(op)}
        return [name for name in self.predict_net.external_input if name not in made]

    @property
    def outputs(self) -> list[str]:
        """The predict net's external outputs, or what its last operator makes where it declares none."""
        if self.predict_net.external_output:
            return list(self.predict_net.external_output)
        return list(self.predict_net.op[-1].output[:1]) if self.predict_net.op else []

    def _is_placeholder(self, op: OperatorDef) -> bool:
        if op.type not in ("GivenTensorFill", "ConstantFill") or len(op.output) != 1 or op.input:
            return False
        args = {arg.name: arg for arg in op.arg}
        shape = list(args["shape"].ints) if "shape" in args else []
        numbers = list(args["values"].floats) if "values" in args else []
        constant = args["value"].f if "value" in args else 0.0
        if any(n != 1 for n in shape) or any(numbers) or constant != 0:
            return False
        # A parameter may be a single 0 too, but nothing takes a parameter as its first input.
        uses = [i for user in self.predict_net.op for i, n in enumerate(user.input) if n == op.output[0]]
        return bool(uses) and not any(uses)


def load_model(
    path: AnyPath, *, init_net: AnyPath | None = None, parameters: bool = True, limit: int = MAX_MESSAGE_BYTES
) -> LoadedModel:
    """Reads a model that gpunet saved, or an init net and a predict net that Caffe2 exported. Nothing runs.

    Args:
        path: the folder, or the file of the predict net, binary or text.
        init_net: the file of the init net; by default the one beside the predict net whose name has ``init``
            for ``predict``.
        parameters: whether to read the init net.
        limit: largest size in bytes of a file.

    Raises:
        FormatError: a file is malformed, too large, or holds no net.
        OSError: a file does not exist or cannot be read.
    """
    predict_path = _find(Path(path), "predict_net")
    predict_net = load(predict_path, NetDef, limit=limit)
    if not predict_net.op:
        raise FormatError(f"{predict_path}: the net has no operators, wanted a predict net")
    init = NetDef()
    if parameters:
        init = load(Path(init_net) if init_net is not None else _beside(predict_path), NetDef, limit=limit)
    return LoadedModel(predict_path, init, predict_net, _read_value_info(predict_path))


def _find(path: Path, stem: str) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(2, "there is no such model, wanted a folder or a predict net", str(path))
    for suffix in _SUFFIXES:
        if (path / (stem + suffix)).is_file():
            return path / (stem + suffix)
    wanted = " or ".join(stem + suffix for suffix in _SUFFIXES)
    raise FileNotFoundError(2, f"the folder holds no saved model, wanted {wanted}", str(path))


def _beside(predict_path: Path) -> Path:
    name = predict_path.name
    if "predict" not in name:
        raise FormatError(
            f"{predict_path}: the name does not tell where the init net is, wanted a name with 'predict', a "
            "folder, or the init net's path"
        )
    stem = predict_path.with_name(name.replace("predict", "init")).with_suffix("")
    for suffix in dict.fromkeys((predict_path.suffix, *_SUFFIXES)):
        if stem.with_name(stem.name + suffix).is_file():
            return stem.with_name(stem.name + suffix)
    raise FileNotFoundError(
        2, "the init net is missing beside the predict net", f"{stem}{predict_path.suffix}"
    )


def _read_value_info(predict_path: Path) -> dict[str, TensorSpec]:
    """Types and shapes of inputs from ``value_info.json``, or ``NAME.value_info.json`` for ``NAME.pbtxt``."""
    candidates = (
        predict_path.with_name(f"{predict_path.stem}.{_VALUE_INFO}"),
        predict_path.with_name(_VALUE_INFO),
    )
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        return {}
    wanted = 'wanted {"NAME": [TYPE, [SIZES]]}'
    try:
        content = json.loads(read_file(path, limit=_MAX_VALUE_INFO_BYTES, what="value info"))
        found = {}
        for name, (kind, sizes) in content.items():
            if not all(type(n) is int and 0 <= n < 2**31 for n in sizes):
                raise ValueError(f"sizes {sizes}")
            found[name] = TensorSpec(tuple(sizes), dtype_from_proto(kind))
    except (ValueError, TypeError, AttributeError, RecursionError, DataTypeError) as error:
        raise FormatError(f"{path}: malformed ({error}), {wanted}") from None
    return found


# ---------------------------------------------------------------------------------------------------------
# Running


class Predictor:
    """Runs a loaded model.

    Args:
        model: the model, or the path that :func:`load_model` takes.
        device: where to run it.

    Raises:
        DeviceError: there is no such device here.
        NetError, SchemaError, ArgumentError: the model is not well formed, or has operators that do not
            exist here.
    """

    def __init__(self, model: LoadedModel | AnyPath, device: str | Device = "auto") -> None:
        self.model = model if isinstance(model, LoadedModel) else load_model(model)
        self.workspace = Workspace(device)
        self.workspace.run_once(self.model.init_net)
        missing = [
            name
            for name in self.model.outputs
            if not any(name in op.output for op in self.model.predict_net.op)
        ]
        if missing or not self.model.outputs:
            raise NetError(
                f"{self.model.path}: no operator makes the output {', '.join(missing) or 'wanted'}"
            )
        self._net = self.workspace.create(self.model.predict_net, overwrite=True)

    def run(
        self, inputs: Mapping[str, npt.ArrayLike] | Sequence[npt.ArrayLike]
    ) -> dict[str, npt.NDArray[Any]]:
        """The model's outputs for these inputs.

        Args:
            inputs: arrays by the names of :attr:`LoadedModel.inputs`, or in that order. Where the model tells
                the type of an input, numbers of another type are converted; where it does not, lists become
                float32.

        Raises:
            BlobError: inputs are missing, or there is no such input.
            ShapeError, DataTypeError, KernelError: the network cannot take them.
        """
        names = self.model.inputs
        if isinstance(inputs, np.ndarray):
            raise BlobError(
                f"found an array {inputs.shape}, wanted a list of arrays, one for each of {', '.join(names)}"
            )
        if not isinstance(inputs, Mapping):
            if len(inputs) != len(names):
                raise BlobError(f"{len(inputs)} inputs, wanted {len(names)}: {', '.join(names)}")
            inputs = dict(zip(names, inputs, strict=True))
        unlike = set(inputs) ^ set(names)
        if unlike:
            raise BlobError(
                f"inputs {', '.join(sorted(inputs)) or 'none'}, wanted {', '.join(names) or 'none'}: "
                f"{min(unlike)!r} is "
                f"{'missing' if min(unlike) in names else 'not an input of the model'}"
            )
        for name, value in inputs.items():
            known = self.model.value_info.get(name)
            dtype = known.dtype if known else None if isinstance(value, np.ndarray) else np.dtype(np.float32)
            try:
                array = np.asarray(value, dtype=dtype)
            except (ValueError, TypeError) as error:
                raise DataTypeError(f"input {name!r} is no array of {dtype}: {error}") from None
            self.workspace.feed(name, array)
        self.workspace.run(self._net)
        return {name: self.workspace.fetch(name) for name in self.model.outputs}
