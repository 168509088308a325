"""CUDA kernels: ``.cu`` sources by operator family, their launchers, cuDNN, GEMM, and the simulated device.

Importing this package registers the kernels for the device kind ``cuda``, which the real and the simulated
device share. It needs no GPU, no CUDA and no compiler.
"""

from gpunet.cuda_kernels import activation as activation
from gpunet.cuda_kernels import bucket as bucket
from gpunet.cuda_kernels import collective as collective
from gpunet.cuda_kernels import comparison as comparison
from gpunet.cuda_kernels import conv_direct as conv_direct
from gpunet.cuda_kernels import conv_transpose as conv_transpose
from gpunet.cuda_kernels import convolution as convolution
from gpunet.cuda_kernels import copying as copying
from gpunet.cuda_kernels import cudnn_layer_norm as cudnn_layer_norm
from gpunet.cuda_kernels import cudnn_normalization as cudnn_normalization
from gpunet.cuda_kernels import dropout as dropout
from gpunet.cuda_kernels import elementwise as elementwise
from gpunet.cuda_kernels import fill as fill
from gpunet.cuda_kernels import folding as folding
from gpunet.cuda_kernels import function as function
from gpunet.cuda_kernels import fused as fused
from gpunet.cuda_kernels import fused_convolution as fused_convolution
from gpunet.cuda_kernels import fused_update as fused_update
from gpunet.cuda_kernels import gradient_compression as gradient_compression
from gpunet.cuda_kernels import indexing as indexing
from gpunet.cuda_kernels import joining as joining
from gpunet.cuda_kernels import lamb as lamb
from gpunet.cuda_kernels import layer_norm as layer_norm
from gpunet.cuda_kernels import learning_rate as learning_rate
from gpunet.cuda_kernels import loss as loss
from gpunet.cuda_kernels import loss_scaling as loss_scaling
from gpunet.cuda_kernels import matmul as matmul
from gpunet.cuda_kernels import multi_tensor as multi_tensor
from gpunet.cuda_kernels import normalization as normalization
from gpunet.cuda_kernels import optimizer as optimizer
from gpunet.cuda_kernels import pooling as pooling
from gpunet.cuda_kernels import quantization as quantization
from gpunet.cuda_kernels import reduction as reduction
from gpunet.cuda_kernels import shaping as shaping
from gpunet.cuda_kernels import softmax as softmax
from gpunet.cuda_kernels import sparse_optimizer as sparse_optimizer
from gpunet.cuda_kernels import sync_batch_norm as sync_batch_norm
from gpunet.cuda_kernels import total as total
from gpunet.cuda_kernels import unary as unary
from gpunet.cuda_kernels import variadic as variadic
