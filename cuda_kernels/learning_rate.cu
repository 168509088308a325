// Adaption of learning rates.
#include "gpunet.cuh"

// Parts of the sums of g e, g g and e e: partial[3][count].
template <typename T>
__device__ void adaption_sums(const T* g, const T* e, double* partial, int64 n, int64 count) {
  __shared__ double scratch[32];
  for (int64 part = blockIdx.x; part < count; part += gridDim.x) {
    double product = 0, of_g = 0, of_e = 0;
    for (int64 i = part * blockDim.x + threadIdx.x; i < n; i += count * blockDim.x) {
      const double a = (double)g[i], b = (double)e[i];
      product += a * b;
      of_g += a * a;
      of_e += b * b;
    }
    product = block_reduce(product, scratch, 0.0, Sum());
    of_g = block_reduce(of_g, scratch, 0.0, Sum());
    of_e = block_reduce(of_e, scratch, 0.0, Sum());
    if (threadIdx.x != 0) continue;
    partial[part] = product;
    partial[count + part] = of_g;
    partial[2 * count + part] = of_e;
  }
}

__device__ inline double sum_of_parts(const double* partial, int64 count, double* scratch) {
  double total = 0;
  for (int64 i = threadIdx.x; i < count; i += blockDim.x) total += partial[i];
  return block_reduce(total, scratch, 0.0, Sum());
}

// lr - alpha g.e, or lr (1 - alpha g.e / (|g| |e|)). One block.
template <typename L>
__device__ void adaption(const double* partial, const L* lr, L* new_lr, int64 count, double alpha, int32 normalized) {
  __shared__ double scratch[32];
  const double product = sum_of_parts(partial, count, scratch);
  const double of_g = sqrt(sum_of_parts(partial + count, count, scratch));
  const double of_e = sqrt(sum_of_parts(partial + 2 * count, count, scratch));
  if (threadIdx.x != 0) return;
  const double norms = (of_g > 1e-12 ? of_g : 1e-12) * (of_e > 1e-12 ? of_e : 1e-12);
  const double rate = (double)lr[0];
  new_lr[0] = (L)(normalized ? rate * (1 - alpha * product / norms) : rate - alpha * product);
}

#define ADAPTION(S, T)                                                                                                  \
  extern "C" __global__ void adaption_sums_##S(const T* g, const T* e, double* partial, int64 n, int64 count) {         \
    adaption_sums(g, e, partial, n, count);                                                                             \
  }                                                                                                                     \
  extern "C" __global__ void adaption_fwd_##S(const double* partial, const T* lr, T* new_lr, int64 count, double alpha, \
                                              int32 normalized) {                                                       \
    adaption(partial, lr, new_lr, count, alpha, normalized);                                                            \
  }
ADAPTION(f32, float)
ADAPTION(f64, double)
