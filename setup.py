"""Which folder is which package; everything else is in pyproject.toml.

The top-level folders are imported under `gpunet`: `proto` and `distributed` are the names of other packages.
Subpackages are found, not listed, so that a new one cannot be left out of a wheel.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = {
    "gpunet": "gpunet",
    "gpunet.proto": "proto",
    "gpunet.cpu_fallback": "cpu_fallback",
    "gpunet.cuda_kernels": "cuda_kernels",
    "gpunet.distributed": "distributed",
    "gpunet.bench": "bench",
}
ROOT = Path(__file__).resolve().parent

package_dir = {name: folder for name, folder in FOLDERS.items() if (ROOT / folder / "__init__.py").is_file()}
packages = [
    package
    for name, folder in package_dir.items()
    for package in (name, *(f"{name}.{sub}" for sub in find_packages(str(ROOT / folder))))
]

# setuptools puts whatever an earlier build left here into the wheel, modules deleted since included.
shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)

setup(packages=packages, package_dir=package_dir)
