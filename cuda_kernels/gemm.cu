// Matrix products, out[z] = act(alpha * op(a[z]) op(b[z]) + beta * out[z] + bias), all row-major, any sizes.
//
// A block computes a tile of 64 x 64 elements, a thread 4 x 4 of them, in steps of 16 along k. The sum over k runs in one order,
// whatever the grid: results are the same from run to run. Rows of op(a) and columns of op(b) beyond the edges count as zeros.
#include "gpunet.cuh"

constexpr int kTile = 64, kDepth = 16, kThreads = 256, kEach = 4, kLoads = kTile * kDepth / kThreads;

// The compiler must not contract a*b+c elsewhere, so that results agree with the CPU's: here it is asked for.
__device__ inline float multiply_add(float a, float b, float c) {
#ifdef GPUNET_SIM
  return a * b + c;
#else
  return fmaf(a, b, c);
#endif
}
__device__ inline double multiply_add(double a, double b, double c) {
#ifdef GPUNET_SIM
  return a * b + c;
#else
  return fma(a, b, c);
#endif
}

// Position in a tile (`across` of the 64, `deep` of the 16) that a thread loads as its i-th element, so that neighbouring threads
// read neighbouring elements: k is the inner dimension in memory (Inner) or the outer one.
template <bool Inner>
__device__ inline int across(int i) {
  return Inner ? (int)threadIdx.x / kDepth + i * (kThreads / kDepth) : (int)threadIdx.x % kTile;
}
template <bool Inner>
__device__ inline int deep(int i) {
  return Inner ? (int)threadIdx.x % kDepth : (int)threadIdx.x / kTile + i * (kThreads / kTile);
}

// Loads what a thread contributes to a tile: elements `first` and on of the `count`, at `depth` of the k.
template <typename T, typename A, bool Inner>
__device__ inline void fetch(const T* p, A* values, int64 first, int64 count, int64 depth, int64 k) {
  for (int i = 0; i < kLoads; ++i) {
    int64 row = first + across<Inner>(i), at = depth + deep<Inner>(i);
    values[i] = row < count && at < k ? load(p, Inner ? row * k + at : at * count + row) : (A)0;
  }
}

template <typename T, bool TransA, bool TransB>
__device__ inline void gemm(const T* a, const T* b, T* out, const T* bias, int64 m, int64 n, int64 k, int64 batch,
                            int64 stride_a, int64 stride_b, int64 stride_out, double alpha, double beta, int32 relu) {
  typedef typename Accumulate<T>::type A;
  __shared__ A left[kDepth][kTile + 4];
  __shared__ A right[kDepth][kTile + 4];
  const int64 tiles_m = (m + kTile - 1) / kTile, tiles_n = (n + kTile - 1) / kTile;
  const int row = threadIdx.x / (kTile / kEach) * kEach, column = threadIdx.x % (kTile / kEach) * kEach;
  for (int64 job = blockIdx.x; job < batch * tiles_m * tiles_n; job += gridDim.x) {
    const int64 z = job / (tiles_m * tiles_n), tile = job % (tiles_m * tiles_n);
    const int64 row0 = tile / tiles_n * kTile, column0 = tile % tiles_n * kTile;
    const T* pa = a + z * stride_a;
    const T* pb = b + z * stride_b;
    A sum[kEach][kEach] = {};
    A next_left[kLoads], next_right[kLoads];
    fetch<T, A, !TransA>(pa, next_left, row0, m, 0, k);
    fetch<T, A, TransB>(pb, next_right, column0, n, 0, k);
    for (int64 depth = 0; depth < k; depth += kDepth) {
      __syncthreads();  // the tiles of the step before are still read
      for (int i = 0; i < kLoads; ++i) {
        left[deep<!TransA>(i)][across<!TransA>(i)] = next_left[i];
        right[deep<TransB>(i)][across<TransB>(i)] = next_right[i];
      }
      __syncthreads();
      if (depth + kDepth < k) {
        fetch<T, A, !TransA>(pa, next_left, row0, m, depth + kDepth, k);
        fetch<T, A, TransB>(pb, next_right, column0, n, depth + kDepth, k);
      }
      for (int d = 0; d < kDepth; ++d)
        for (int i = 0; i < kEach; ++i)
          for (int j = 0; j < kEach; ++j)
            sum[i][j] = multiply_add(left[d][row + i], right[d][column + j], sum[i][j]);
    }
    T* po = out + z * stride_out;
    for (int i = 0; i < kEach; ++i)
      for (int j = 0; j < kEach; ++j) {
        const int64 r = row0 + row + i, c = column0 + column + j;
        if (r >= m || c >= n) continue;
        A value = (A)alpha * sum[i][j];
        if (beta != 0) value += (A)beta * load(po, r * n + c);
        if (bias) value += load(bias, c);
        store(po, r * n + c, relu && value < 0 ? (A)0 : value);
      }
  }
}

#define GEMM(S, T, NAME, TRANS_A, TRANS_B)                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) NAME##_##S(                                                  \
      const T* a, const T* b, T* out, const T* bias, int64 m, int64 n, int64 k, int64 batch, int64 stride_a,          \
      int64 stride_b, int64 stride_out, double alpha, double beta, int32 relu) {                                      \
    gemm<T, TRANS_A, TRANS_B>(a, b, out, bias, m, n, k, batch, stride_a, stride_b, stride_out, alpha, beta, relu);    \
  }
#define GEMMS(S, T)                  \
  GEMM(S, T, gemm_nn, false, false)  \
  GEMM(S, T, gemm_nt, false, true)   \
  GEMM(S, T, gemm_tn, true, false)   \
  GEMM(S, T, gemm_tt, true, true)
GPUNET_FLOATS(GEMMS)
