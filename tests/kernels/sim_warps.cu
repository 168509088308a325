// Warp shuffles, votes and atomics, for the tests of the simulated device.
#include "gpunet.cuh"

template <typename T>
__device__ void shuffles(const T* x, T* y) {
  int lane = threadIdx.x;
  T v = x[lane];
  y[lane] = __shfl_sync(0xffffffffu, v, 3);
  y[32 + lane] = __shfl_up_sync(0xffffffffu, v, 5);
  y[64 + lane] = __shfl_down_sync(0xffffffffu, v, 7);
  y[96 + lane] = __shfl_xor_sync(0xffffffffu, v, 16);
  y[128 + lane] = __shfl_sync(0xffffffffu, v, 3, 8);
  y[160 + lane] = __shfl_up_sync(0xffffffffu, v, 1, 8);
  y[192 + lane] = __shfl_down_sync(0xffffffffu, v, 1, 8);
  y[224 + lane] = __shfl_xor_sync(0xffffffffu, v, 9, 8);
}
#define SHUFFLES(S, T) \
  extern "C" __global__ void shuffles_##S(const T* x, T* y) { shuffles<T>(x, y); }
SHUFFLES(f32, float)
SHUFFLES(f64, double)
SHUFFLES(i32, int32)
SHUFFLES(i64, int64)

extern "C" __global__ void votes(const int32* x, uint32* y) {
  int lane = threadIdx.x;
  y[lane] = __ballot_sync(0xffffffffu, x[lane]);
  y[32 + lane] = __any_sync(0xffffffffu, x[lane]);
  y[64 + lane] = __all_sync(0xffffffffu, x[lane]);
  y[96 + lane] = __match_any_sync(0xffffffffu, x[lane]);
  __syncwarp();
  // Two halves, each on its own.
  if (lane < 16) {
    y[128 + lane] = __ballot_sync(0x0000ffffu, x[lane]);
  } else {
    y[128 + lane] = __ballot_sync(0xffff0000u, x[lane]);
  }
}

extern "C" __global__ void sums(const float* x, float* y) {
  __shared__ float scratch[32];
  float total = block_reduce(x[blockIdx.x * blockDim.x + threadIdx.x], scratch, 0.0f, Sum());
  if (threadIdx.x == blockDim.x - 1) y[blockIdx.x] = total;
}

// Half of the warp waits at a barrier, the other half for it in a shuffle.
extern "C" __global__ void stuck(float* y) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    y[0] = __shfl_sync(0xffffffffu, y[0], 0);
  }
}

extern "C" __global__ void left_out(float* y) { y[0] = __shfl_sync(0x0000ffffu, y[0], 0); }

extern "C" __global__ void atomics(int32* i, uint32* u, uint64* w, float* f, double* d) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(i, t);
  atomicMax(i + 1, t);
  atomicMin(i + 2, -t);
  atomicSub(i + 3, 1);
  atomicOr(u, 1u << t % 32);
  atomicAnd(u + 1, ~(1u << t % 8));
  atomicXor(u + 2, (unsigned)t);
  atomicInc(u + 3, 99);
  atomicAdd(w, (uint64)t << 32);
  atomicMax(w + 1, (uint64)t << 40);
  atomicAdd(f, 1.0f);
  atomicAdd(d, 0.5);
  int seen = i[4], assumed;
  do {
    assumed = seen;
    seen = atomicCAS(i + 4, assumed, assumed + 2);
  } while (seen != assumed);
}
