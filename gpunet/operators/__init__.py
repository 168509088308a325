"""Operator schemas, one module a family; importing this package registers all of them."""

from gpunet.operators import activation as activation
from gpunet.operators import fill as fill
from gpunet.operators import shaping as shaping
