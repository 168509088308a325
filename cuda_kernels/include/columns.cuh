// Sums over columns by blocks that take several neighbouring ones.
#pragma once

#include "gpunet.cuh"

// Sum over the threads that are one above the other, `across` (a power of two) beside each other; all of them get it. `parts` holds
// one element for each thread.
template <typename A>
__device__ inline A column_sum(A value, A* parts, int across) {
  if (across == 1) return block_reduce(value, parts, (A)0, Sum());
  const int deep = blockDim.x / across;
  __syncthreads();
  parts[threadIdx.x] = value;
  __syncthreads();
  if (threadIdx.x < across) {
    for (int d = 1; d < deep; ++d) value += parts[d * across + threadIdx.x];
    parts[threadIdx.x] = value;
  }
  __syncthreads();
  return parts[threadIdx.x % across];
}
