"""Operator schemas, one module a family; importing this package registers all of them."""

from gpunet.operators import activation as activation
from gpunet.operators import comparison as comparison
from gpunet.operators import convolution as convolution
from gpunet.operators import copying as copying
from gpunet.operators import dropout as dropout
from gpunet.operators import elementwise as elementwise
from gpunet.operators import fill as fill
from gpunet.operators import folding as folding
from gpunet.operators import function as function
from gpunet.operators import fused as fused
from gpunet.operators import indexing as indexing
from gpunet.operators import joining as joining
from gpunet.operators import learning_rate as learning_rate
from gpunet.operators import loss as loss
from gpunet.operators import loss_scaling as loss_scaling
from gpunet.operators import matmul as matmul
from gpunet.operators import normalization as normalization
from gpunet.operators import optimizer as optimizer
from gpunet.operators import pooling as pooling
from gpunet.operators import reduction as reduction
from gpunet.operators import shaping as shaping
from gpunet.operators import softmax as softmax
from gpunet.operators import sparse_optimizer as sparse_optimizer
from gpunet.operators import total as total
from gpunet.operators import unary as unary
from gpunet.operators import variadic as variadic
