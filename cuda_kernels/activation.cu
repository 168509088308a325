// Activation functions and their gradients.
#include "vector.cuh"

// A NaN passes through, as in the reference.
GPUNET_UNARY(relu_fwd, x < 0 ? 0 : x)
GPUNET_BINARY(relu_bwd, y, dy, y > 0 ? dy : 0)

GPUNET_UNARY(sigmoid_fwd, 1 / (1 + exp(-x)))
GPUNET_BINARY(sigmoid_bwd, y, dy, (1 - y) * y * dy)

GPUNET_UNARY(tanh_fwd, tanh(x))
GPUNET_BINARY(tanh_bwd, y, dy, (1 - y * y) * dy)
