"""NumPy kernels: the reference for every operator. Importing this package registers all of them."""

from gpunet.cpu_fallback import activation as activation
from gpunet.cpu_fallback import fill as fill
from gpunet.cpu_fallback import shaping as shaping
