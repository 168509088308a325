"""gpunet: a GPU-first tensor runtime with Caffe2's programming model."""

import os as _os

# In a checkout, gpunet.proto, gpunet.cpu_fallback and their neighbours are folders beside this one, so the
# checkout's root joins the places where submodules are looked up. An installed package has them inside.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if _os.path.isfile(_os.path.join(_root, "proto", "gpunet.proto")) and _os.path.isfile(
    _os.path.join(_root, "cpu_fallback", "__init__.py")
):
    __path__.append(_root)

from gpunet._version import __version__  # noqa: E402

__all__ = ["__version__"]
