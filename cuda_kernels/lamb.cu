// The LAMB update: the direction, sums of squares (optimizer.cu), and the step; and norms of segments, for parts of parameters that
// are shared between ranks. Rates and iteration numbers are read from device
// memory. Outputs may be the inputs of their in-place pairs: every thread reads its elements before it writes them.
#include "gpunet.cuh"
#include "optimizer.cuh"
#include "sums.cuh"
#include "vector.cuh"

template <typename T>
__device__ inline void lamb_direction(const T* w, const T* m, const T* v, const T* g, const int64* iteration, T* new_m,
                                      T* new_v, T* direction, int64 n, double beta1, double beta2, double epsilon,
                                      double decay) {
  __shared__ double correction[2];
  if (threadIdx.x == 0) {
    const double t = (double)(iteration[0] < 1 ? 1 : iteration[0]);
    correction[0] = 1 / (1 - pow(beta1, t));
    correction[1] = 1 / (1 - pow(beta2, t));
  }
  __syncthreads();
  const T first = (T)correction[0], second = (T)correction[1];
  const T* const x[] = {w, m, v, g};
  T* const y[] = {new_m, new_v, direction};
  map_all(x, y, n, [=](const T(&in)[4], T(&out)[3]) {
    out[0] = in[1];
    out[1] = in[2];
    adam_moments(in[3], &out[0], &out[1], beta1, beta2);
    out[2] = out[0] / (sqrt(out[1] * second) + (T)epsilon) * first + in[0] * (T)decay;
  });
}

// Each block adds up the sums of squares by itself, in the same order.
template <typename T, typename L>
__device__ inline void lamb_step(const T* w, const T* direction, const T* squares, const T* direction_squares, const L* lr,
                                 T* new_w, int64 n, int64 count) {
  __shared__ T scratch[32];
  __shared__ double rate[1];
  T total = 0, direction_total = 0;
  for (int64 i = threadIdx.x; i < count; i += blockDim.x) {
    total += squares[i];
    direction_total += direction_squares[i];
  }
  total = block_reduce(total, scratch, (T)0, Sum());
  __syncthreads();
  direction_total = block_reduce(direction_total, scratch, (T)0, Sum());
  if (threadIdx.x == 0) {
    const double norm = sqrt((double)total), length = sqrt((double)direction_total);
    rate[0] = (double)lr[0] * (norm > 0 && length > 0 ? norm / length : 1.0);
  }
  __syncthreads();
  const T by = (T)rate[0];
  map2(w, direction, new_w, n, [=](T parameter, T along) { return parameter + along * by; });
}

// A row of the sums of squares: a block for each segment.
template <typename T>
__device__ inline void segment_squares(const int64* starts, const T* x, T* squares, int64 n, int64 segments, int64 row) {
  __shared__ T scratch[32];
  for (int64 s = blockIdx.x; s < segments; s += gridDim.x) {
    const int64 begin = starts[s] < 0 ? 0 : starts[s], end = starts[s + 1] > n ? n : starts[s + 1];
    T total = 0;
    for (int64 i = begin + threadIdx.x; i < end; i += blockDim.x) total += x[i] * x[i];
    total = block_reduce(total, scratch, (T)0, Sum());
    if (threadIdx.x == 0) squares[row * segments + s] = total;
    __syncthreads();
  }
}

// The last block has the elements that are in no segment.
template <typename T>
__device__ inline void scale_by_norms(const T* x, const int64* starts, const T* squares, T* y, int64 n, int64 segments,
                                      double trust, double offset, double lowest, double highest) {
  for (int64 s = blockIdx.x; s <= segments; s += gridDim.x) {
    if (s == segments) {
      for (int64 i = threadIdx.x; i < starts[0] && i < n; i += blockDim.x) y[i] = x[i];
      for (int64 i = (starts[s] < 0 ? 0 : starts[s]) + threadIdx.x; i < n; i += blockDim.x) y[i] = x[i];
      continue;
    }
    const double norm = sqrt((double)squares[s]), length = sqrt((double)squares[segments + s]);
    double factor = norm > 0 ? trust / (length / norm + offset) : 1.0;
    factor = factor > highest ? highest : factor;
    factor = factor < lowest ? lowest : factor;
    const int64 begin = starts[s] < 0 ? 0 : starts[s], end = starts[s + 1] > n ? n : starts[s + 1];
    for (int64 i = begin + threadIdx.x; i < end; i += blockDim.x) y[i] = x[i] * (T)factor;
  }
}

#define LAMB_STEP(S, T, LS, L)                                                                                      \
  extern "C" __global__ void lamb_step_##S##_##LS(const T* w, const T* direction, const T* squares,                 \
                                                  const T* direction_squares, const L* lr, T* new_w, int64 n,       \
                                                  int64 count) {                                                    \
    lamb_step(w, direction, squares, direction_squares, lr, new_w, n, count);                                       \
  }
#define LAMB(S, T)                                                                                                  \
  extern "C" __global__ void segment_squares_##S(const int64* starts, const T* x, T* squares, int64 n,              \
                                                 int64 segments, int64 row) {                                       \
    segment_squares(starts, x, squares, n, segments, row);                                                          \
  }                                                                                                                 \
  extern "C" __global__ void scale_by_norms_##S(const T* x, const int64* starts, const T* squares, T* y, int64 n,   \
                                                int64 segments, double trust, double offset, double lowest,         \
                                                double highest) {                                                   \
    scale_by_norms(x, starts, squares, y, n, segments, trust, offset, lowest, highest);                             \
  }                                                                                                                 \
  LAMB_STEP(S, T, f32, float)                                                                                       \
  LAMB_STEP(S, T, f64, double)                                                                                      \
  extern "C" __global__ void lamb_direction_##S(const T* w, const T* m, const T* v, const T* g,                     \
                                                const int64* iteration, T* new_m, T* new_v, T* direction, int64 n,  \
                                                double beta1, double beta2, double epsilon, double decay) {         \
    lamb_direction(w, m, v, g, iteration, new_m, new_v, direction, n, beta1, beta2, epsilon, decay);                \
  }
LAMB(f32, float)
LAMB(f64, double)
