// What is done to the output of a convolution where no library does it on the way: one pass over memory.
#include "vector.cuh"

// The tensor that is added, then the activation; the result is written over y.
GPUNET_BINARY(epilogue_add, y, r, y + r)
GPUNET_BINARY(epilogue_add_relu, y, r, y + r < 0 ? 0 : y + r)
GPUNET_BINARY(epilogue_add_sigmoid, y, r, 1 / (1 + exp(-(y + r))))
GPUNET_UNARY(epilogue_relu, x < 0 ? 0 : x)
GPUNET_UNARY(epilogue_sigmoid, 1 / (1 + exp(-x)))
