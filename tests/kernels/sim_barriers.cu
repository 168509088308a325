// Barriers, shared memory and their planted faults, for the tests of the simulated device.
#include "gpunet.cuh"

// Rotates the elements of each block by one, through shared memory.
extern "C" __global__ void rotate(const float* x, float* y) {
  __shared__ float tile[256];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = x[i];
  __syncthreads();
  y[i] = tile[(threadIdx.x + 1) % blockDim.x];
}

// The same with the barrier left out.
extern "C" __global__ void rotate_racing(const float* x, float* y) {
  __shared__ float tile[256];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = x[i];
  y[i] = tile[(threadIdx.x + 1) % blockDim.x];
}

// Only the first `count` threads come to the barrier; the others have exited, or wait at another.
extern "C" __global__ void partial(float* y, int32 count) {
  if ((int)threadIdx.x >= count) return;
  __syncthreads();
  y[threadIdx.x] = 1;
}

extern "C" __global__ void divergent(float* y, int32 count) {
  if ((int)threadIdx.x < count) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  y[threadIdx.x] = 1;
}

// Sums in place, with a barrier in every step, and the number of threads that hold a positive sum.
extern "C" __global__ void tree(float* y, int32* positive) {
  extern __shared__ __align__(16) float sums[];
  sums[threadIdx.x] = y[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
    float other = threadIdx.x < step ? sums[threadIdx.x + step] : 0;
    __syncthreads();
    sums[threadIdx.x] += other;
    __syncthreads();
  }
  int count = __syncthreads_count(sums[0] > 0);
  int some = __syncthreads_or(threadIdx.x == 5);
  if (threadIdx.x == 0) {
    y[blockIdx.x * blockDim.x] = sums[0];
    positive[blockIdx.x] = count + 1000 * some;
  }
}

// Reads shared memory that nothing has written.
extern "C" __global__ void unwritten(float* y) {
  __shared__ float tile[2][3], single;
  y[blockIdx.x] = tile[1][2];
  if (blockIdx.x == 1) y[1] = single;
  __syncthreads();
  tile[1][2] = single = 1.0f;
}

// A counter without an atomic: right in any order only if every thread runs to its end.
extern "C" __global__ void count_racing(int32* y) {
  int old = y[0];
  __syncthreads();
  y[0] = old + 1 + threadIdx.x;
}

// The place of each thread in three dimensions.
extern "C" __global__ void place(int32* y) {
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  y[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = 1000 * block + thread;
}
