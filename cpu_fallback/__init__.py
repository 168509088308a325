"""NumPy kernels: the reference for every operator. Importing this package registers all of them."""

from gpunet.cpu_fallback import activation as activation
from gpunet.cpu_fallback import comparison as comparison
from gpunet.cpu_fallback import convolution as convolution
from gpunet.cpu_fallback import copying as copying
from gpunet.cpu_fallback import dropout as dropout
from gpunet.cpu_fallback import elementwise as elementwise
from gpunet.cpu_fallback import fill as fill
from gpunet.cpu_fallback import folding as folding
from gpunet.cpu_fallback import function as function
from gpunet.cpu_fallback import fused as fused
from gpunet.cpu_fallback import indexing as indexing
from gpunet.cpu_fallback import joining as joining
from gpunet.cpu_fallback import learning_rate as learning_rate
from gpunet.cpu_fallback import loss as loss
from gpunet.cpu_fallback import loss_scaling as loss_scaling
from gpunet.cpu_fallback import matmul as matmul
from gpunet.cpu_fallback import normalization as normalization
from gpunet.cpu_fallback import optimizer as optimizer
from gpunet.cpu_fallback import pooling as pooling
from gpunet.cpu_fallback import reduction as reduction
from gpunet.cpu_fallback import shaping as shaping
from gpunet.cpu_fallback import softmax as softmax
from gpunet.cpu_fallback import sparse_optimizer as sparse_optimizer
from gpunet.cpu_fallback import total as total
from gpunet.cpu_fallback import unary as unary
from gpunet.cpu_fallback import variadic as variadic
