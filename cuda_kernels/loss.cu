// Losses and metrics of a batch. A block works on the row of an example at a time.
#include "errors.cuh"

// x, but not below the smallest probability that has a logarithm here; NaN stays.
template <typename A>
__device__ inline A at_least_tiny(A x) {
  return x < (A)1e-20 ? (A)1e-20 : x;
}

template <typename T, typename I>
__device__ void label_cross_entropy_fwd(const T* x, const I* label, T* y, uint64* errors, uint64 code, int64 examples,
                                        int64 classes) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(i, examples) {
    A loss = 0;
    if (is_class(label[i], classes))
      loss = -log(at_least_tiny(load(x, i * classes + label[i])));
    else
      report_error(errors, code, i, error_bits((int64)label[i]));
    store(y, i, loss);
  }
}

template <typename T, typename I>
__device__ void label_cross_entropy_bwd(const T* x, const I* label, const T* dy, T* dx, uint64* errors, uint64 code,
                                        int64 examples, int64 classes) {
  typedef typename Accumulate<T>::type A;
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x) {
    const int64 chosen = label[i], begin = i * classes;
    for (int64 j = threadIdx.x; j < classes; j += blockDim.x)
      store(dx, begin + j, j == chosen ? -load(dy, i) / at_least_tiny(load(x, begin + j)) : (A)0);
    if (threadIdx.x == 0 && !is_class(chosen, classes)) report_error(errors, code, i, error_bits(chosen));
  }
}

// y[i] = finish(f(0) + ...) of the terms f(at) of row i.
template <typename T, typename F, typename G>
__device__ inline void sum_rows(T* y, int64 examples, int64 columns, F f, G finish) {
  typedef typename Accumulate<T>::type A;
  __shared__ A scratch[32];
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x) {
    A total = 0;
    for (int64 at = i * columns + threadIdx.x; at < (i + 1) * columns; at += blockDim.x) total += f(at);
    total = block_reduce(total, scratch, (A)0, Sum());
    if (threadIdx.x == 0) store(y, i, finish(total));
  }
}

// dx[at] = f(at, row).
template <typename T, typename F>
__device__ inline void map_rows(T* dx, int64 examples, int64 columns, F f) {
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x)
    for (int64 at = i * columns + threadIdx.x; at < (i + 1) * columns; at += blockDim.x) store(dx, at, f(at, i));
}

template <typename T>
__device__ void cross_entropy_fwd(const T* x, const T* label, T* y, int64 examples, int64 classes) {
  typedef typename Accumulate<T>::type A;
  sum_rows(
      y, examples, classes, [=](int64 at) { return log(at_least_tiny(load(x, at))) * load(label, at); },
      [=](A total) { return -total; });
}

template <typename T>
__device__ void cross_entropy_bwd(const T* x, const T* label, const T* dy, T* dx, int64 examples, int64 classes) {
  map_rows(dx, examples, classes,
           [=](int64 at, int64 i) { return -load(dy, i) * load(label, at) / at_least_tiny(load(x, at)); });
}

template <typename T>
__device__ void averaged_loss_bwd(const T* dy, T* dx, int64 n) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(i, n) store(dx, i, load(dy, 0) / (A)n);
}

template <typename T>
__device__ void squared_l2_distance_fwd(const T* x, const T* y, T* z, int64 examples, int64 columns) {
  typedef typename Accumulate<T>::type A;
  sum_rows(
      z, examples, columns,
      [=](int64 at) {
        const A difference = load(x, at) - load(y, at);
        return difference * difference;
      },
      [=](A total) { return total * (A)0.5; });
}

template <typename T>
__device__ void squared_l2_distance_bwd(const T* x, const T* y, const T* dz, T* dx, T* dy, int64 examples, int64 columns) {
  typedef typename Accumulate<T>::type A;
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x)
    for (int64 at = i * columns + threadIdx.x; at < (i + 1) * columns; at += blockDim.x) {
      const A value = (load(x, at) - load(y, at)) * load(dz, i);
      store(dx, at, value);
      store(dy, at, -value);
    }
}

// Binary cross-entropy of scores. With s = log(1 + exp(-|x|)), log sigmoid(x) = min(x, 0) - s and log(1 - sigmoid(x)) =
// -max(x, 0) - s: no exponential overflows. `kind`: the plain loss (0), log_D_trick (1), unjoined_lr_loss (2).
template <typename T>
__device__ void sigmoid_cross_entropy_fwd(const T* x, const T* t, T* y, int64 examples, int64 columns, int32 kind) {
  typedef typename Accumulate<T>::type A;
  sum_rows(
      y, examples, columns,
      [=](int64 at) {
        const A score = load(x, at), wanted = load(t, at), soft = log1p(exp(-fabs(score)));
        const A above = score > 0 ? score : (A)0, below = score < 0 ? score : (A)0;
        if (kind == 1) return (2 * wanted - 1) * (below - soft);
        if (kind == 2) return wanted * score - (1 - wanted) * (above + soft);
        return wanted * score - above - soft;
      },
      [=](A total) { return columns ? total / (A)-columns : (A)0; });
}

template <typename T>
__device__ void sigmoid_cross_entropy_bwd(const T* dy, const T* x, const T* t, T* dx, int64 examples, int64 columns,
                                          int32 kind) {
  typedef typename Accumulate<T>::type A;
  map_rows(dx, examples, columns, [=](int64 at, int64 i) {
    const A wanted = load(t, at), sigmoid = (A)0.5 * tanh((A)0.5 * load(x, at)) + (A)0.5;
    const A slope = kind == 1   ? (1 - 2 * wanted) * (1 - sigmoid)
                    : kind == 2 ? (1 - wanted) * sigmoid - wanted
                                : sigmoid - wanted;
    return slope * (load(dy, i) / (A)columns);
  });
}

// Whether the class of an example is among the `top_k` best scores; of equal scores the lower class is the better one.
template <typename T, typename I>
__device__ void accuracy_fwd(const T* x, const I* label, int32* right, uint64* errors, uint64 code, int64 examples,
                             int64 classes, int64 top_k) {
  __shared__ int64 scratch[32];
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x) {
    const int64 wanted = label[i], begin = i * classes;
    const bool good = is_class(wanted, classes);
    int64 better = 0;
    if (good) {
      const auto chosen = load(x, begin + wanted);
      for (int64 j = threadIdx.x; j < classes; j += blockDim.x) {
        const auto score = load(x, begin + j);
        better += score > chosen || (score == chosen && j < wanted);
      }
    }
    better = block_reduce(better, scratch, (int64)0, Sum());
    if (threadIdx.x != 0) continue;
    if (!good) report_error(errors, code, i, error_bits(wanted));
    right[i] = good && better < top_k;
  }
}

// The share of the right ones, by one block; it does not exist without examples.
extern "C" __global__ void accuracy_share(const int32* right, float* y, int64 examples) {
  __shared__ int64 scratch[32];
  int64 total = 0;
  for (int64 i = threadIdx.x; i < examples; i += blockDim.x) total += right[i];
  total = block_reduce(total, scratch, (int64)0, Sum());
  if (threadIdx.x == 0) *y = (float)((double)total / (double)examples);
}

#define LOSS_INDEXED(S, T, J, I)                                                                                              \
  extern "C" __global__ void label_cross_entropy_fwd_##S##_##J(const T* x, const I* label, T* y, uint64* errors, uint64 code, \
                                                               int64 examples, int64 classes) {                               \
    label_cross_entropy_fwd(x, label, y, errors, code, examples, classes);                                                    \
  }                                                                                                                           \
  extern "C" __global__ void label_cross_entropy_bwd_##S##_##J(const T* x, const I* label, const T* dy, T* dx,                \
                                                               uint64* errors, uint64 code, int64 examples, int64 classes) {  \
    label_cross_entropy_bwd(x, label, dy, dx, errors, code, examples, classes);                                               \
  }                                                                                                                           \
  extern "C" __global__ void accuracy_fwd_##S##_##J(const T* x, const I* label, int32* right, uint64* errors, uint64 code,    \
                                                    int64 examples, int64 classes, int64 top_k) {                             \
    accuracy_fwd(x, label, right, errors, code, examples, classes, top_k);                                                    \
  }
#define LOSS(S, T)                                                                                                          \
  extern "C" __global__ void cross_entropy_fwd_##S(const T* x, const T* label, T* y, int64 examples, int64 classes) {       \
    cross_entropy_fwd(x, label, y, examples, classes);                                                                      \
  }                                                                                                                         \
  extern "C" __global__ void cross_entropy_bwd_##S(const T* x, const T* label, const T* dy, T* dx, int64 examples,          \
                                                   int64 classes) {                                                         \
    cross_entropy_bwd(x, label, dy, dx, examples, classes);                                                                 \
  }                                                                                                                         \
  extern "C" __global__ void averaged_loss_bwd_##S(const T* dy, T* dx, int64 n) { averaged_loss_bwd(dy, dx, n); }           \
  extern "C" __global__ void squared_l2_distance_fwd_##S(const T* x, const T* y, T* z, int64 examples, int64 columns) {     \
    squared_l2_distance_fwd(x, y, z, examples, columns);                                                                    \
  }                                                                                                                         \
  extern "C" __global__ void squared_l2_distance_bwd_##S(const T* x, const T* y, const T* dz, T* dx, T* dy, int64 examples, \
                                                         int64 columns) {                                                   \
    squared_l2_distance_bwd(x, y, dz, dx, dy, examples, columns);                                                           \
  }                                                                                                                         \
  extern "C" __global__ void sigmoid_cross_entropy_fwd_##S(const T* x, const T* t, T* y, int64 examples, int64 columns,     \
                                                           int32 kind) {                                                    \
    sigmoid_cross_entropy_fwd(x, t, y, examples, columns, kind);                                                            \
  }                                                                                                                         \
  extern "C" __global__ void sigmoid_cross_entropy_bwd_##S(const T* dy, const T* x, const T* t, T* dx, int64 examples,      \
                                                           int64 columns, int32 kind) {                                     \
    sigmoid_cross_entropy_bwd(dy, x, t, dx, examples, columns, kind);                                                       \
  }                                                                                                                         \
  LOSS_INDEXED(S, T, i32, int32)                                                                                            \
  LOSS_INDEXED(S, T, i64, int64)
GPUNET_FLOATS(LOSS)
