"""gpunet: a GPU-first tensor runtime with Caffe2's programming model."""

import importlib as _importlib
import os as _os
import types as _types

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
from gpunet.gradient_maker import GradientSlice  # noqa: E402
from gpunet.gradients import gradient_ops  # noqa: E402
from gpunet.inference import infer  # noqa: E402
from gpunet.model import Model  # noqa: E402
from gpunet.net import Net  # noqa: E402
from gpunet.schema import registered_types as operator_types  # noqa: E402
from gpunet.scope import device_scope, name_scope  # noqa: E402
from gpunet.workspace import Workspace  # noqa: E402

__all__ = [
    "GradientSlice",
    "Model",
    "Net",
    "QuantizedTensor",
    "Workspace",
    "__version__",
    "device_scope",
    "gradient_ops",
    "infer",
    "name_scope",
    "operator_types",
    "optimizers",
    "proto",
    "schedules",
]

# Imported when first used, so that `import gpunet` stays quick.
_LAZY = ("data", "export", "optimizers", "schedules", "training", "zoo")


def __getattr__(name: str) -> _types.ModuleType:
    if name in _LAZY:
        return _importlib.import_module(f"gpunet.{name}")
    raise AttributeError(f"module 'gpunet' has no attribute {name!r}")
