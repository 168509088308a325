"""CUDA kernels: ``.cu`` sources by operator family, their launchers, cuDNN, GEMM, and the simulated device.

Importing this package registers the kernels for the device kind ``cuda``, which the real and the simulated device share.
It needs no GPU, no CUDA and no compiler.
"""

from gpunet.cuda_kernels import activation as activation
