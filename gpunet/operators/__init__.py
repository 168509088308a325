"""Operator schemas, one module a family; importing this package registers all of them."""

from gpunet.operators import activation as activation
from gpunet.operators import dropout as dropout
from gpunet.operators import fill as fill
from gpunet.operators import joining as joining
from gpunet.operators import learning_rate as learning_rate
from gpunet.operators import loss as loss
from gpunet.operators import matmul as matmul
from gpunet.operators import normalization as normalization
from gpunet.operators import optimizer as optimizer
from gpunet.operators import shaping as shaping
from gpunet.operators import softmax as softmax
from gpunet.operators import sparse_optimizer as sparse_optimizer
