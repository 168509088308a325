"""gpunet: a GPU-first tensor runtime with Caffe2's programming model."""

import importlib as _importlib
import os as _os
import typing as _typing

# In a checkout, gpunet.proto, gpunet.cpu_fallback and their neighbours are folders beside this one, so the
# checkout's root joins the places where submodules are looked up. An installed package has them inside.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if _os.path.isfile(_os.path.join(_root, "proto", "gpunet.proto")) and _os.path.isfile(
    _os.path.join(_root, "cpu_fallback", "__init__.py")
):
    __path__.append(_root)

import gpunet.operators as _operators  # noqa: E402, F401  (registers the schemas)
from gpunet import proto  # noqa: E402
from gpunet._version import __version__  # noqa: E402
from gpunet.blobs import QuantizedTensor  # noqa: E402
from gpunet.definitions import make_operator  # noqa: E402
from gpunet.gradient_maker import GradientSlice  # noqa: E402
from gpunet.gradients import gradient_ops  # noqa: E402
from gpunet.inference import infer  # noqa: E402
from gpunet.model import Model  # noqa: E402
from gpunet.net import Net  # noqa: E402
from gpunet.schema import registered_types as operator_types  # noqa: E402
from gpunet.scope import device_scope, name_scope  # noqa: E402
from gpunet.workspace import Workspace  # noqa: E402

if _typing.TYPE_CHECKING:
    from gpunet.export import LoadedModel, Predictor, load_model, save_model

__all__ = [
    "GradientSlice",
    "LoadedModel",
    "Model",
    "Net",
    "Predictor",
    "QuantizedTensor",
    "Workspace",
    "__version__",
    "device_scope",
    "gradient_ops",
    "infer",
    "load_model",
    "make_operator",
    "name_scope",
    "operator_types",
    "optimizers",
    "proto",
    "save_model",
    "schedules",
]

# Imported when first used, so that `import gpunet` stays quick.
_LAZY_MODULES = (
    "custom",
    "data",
    "drawing",
    "export",
    "mixed_precision",
    "nan_check",
    "optimizers",
    "profiler",
    "schedules",
    "timeline",
    "training",
    "zoo",
)
_LAZY_NAMES = ("LoadedModel", "Predictor", "load_model", "save_model")


def __getattr__(name: str) -> _typing.Any:
    if name in _LAZY_MODULES:
        return _importlib.import_module(f"gpunet.{name}")
    if name in _LAZY_NAMES:
        return getattr(_importlib.import_module("gpunet.export"), name)
    raise AttributeError(f"module 'gpunet' has no attribute {name!r}")
