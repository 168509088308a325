// Softmax by row, and its fusion with the cross-entropy loss. A block works on a row at a time.
#include "errors.cuh"

// The largest element of a row, and the sum of the exponentials of the distances to it. The sum is made in double, so that its order
// does not show: the CPU's kernel finds the same number.
template <typename T, typename A>
__device__ inline void row_statistics(const T* x, int64 classes, A* largest, A* sum) {
  __shared__ A scratch[32];
  A most = load(x, 0);
  for (int64 j = threadIdx.x; j < classes; j += blockDim.x) most = Maximum()(most, load(x, j));
  most = block_reduce(most, scratch, most, Maximum());
  __shared__ double wide[32];
  double total = 0;
  for (int64 j = threadIdx.x; j < classes; j += blockDim.x) total += exp(load(x, j) - most);
  *largest = most;
  *sum = (A)block_reduce(total, wide, 0.0, Sum());
}

template <typename T>
__device__ void softmax_fwd(const T* x, T* y, int64 examples, int64 classes) {
  typedef typename Accumulate<T>::type A;
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x) {
    const T* row = x + i * classes;
    A largest, sum;
    row_statistics(row, classes, &largest, &sum);
    for (int64 j = threadIdx.x; j < classes; j += blockDim.x)
      store(y, i * classes + j, exp(load(row, j) - largest) / sum);
  }
}

template <typename T>
__device__ void softmax_bwd(const T* y, const T* dy, T* dx, int64 examples, int64 classes) {
  typedef typename Accumulate<T>::type A;
  __shared__ double scratch[32];
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x) {
    const int64 begin = i * classes;
    double sum = 0;
    for (int64 j = threadIdx.x; j < classes; j += blockDim.x) sum += (double)load(y, begin + j) * load(dy, begin + j);
    const A dot = (A)block_reduce(sum, scratch, 0.0, Sum());
    for (int64 j = threadIdx.x; j < classes; j += blockDim.x)
      store(dx, begin + j, (load(dy, begin + j) - dot) * load(y, begin + j));
  }
}

// Probabilities, and the weighted loss of each example. Labels are class numbers.
template <typename T, typename I>
__device__ void softmax_loss_fwd(const T* x, const I* label, const T* weight, T* p, double* losses, uint64* errors,
                                 uint64 code, int64 examples, int64 classes) {
  typedef typename Accumulate<T>::type A;
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x) {
    const T* row = x + i * classes;
    A largest, sum;
    row_statistics(row, classes, &largest, &sum);
    for (int64 j = threadIdx.x; j < classes; j += blockDim.x)
      store(p, i * classes + j, exp(load(row, j) - largest) / sum);
    if (threadIdx.x != 0) continue;
    A loss = 0;
    if (is_class(label[i], classes))
      // From the score itself, since the probability may be 0 in this type.
      loss = log(sum) - (load(row, label[i]) - largest);
    else
      report_error(errors, code, i, error_bits((int64)label[i]));
    losses[i] = weight ? loss * load(weight, i) : loss;
  }
}

// The same, labels are the wanted probabilities of all classes.
template <typename T>
__device__ void softmax_prob_loss_fwd(const T* x, const T* label, const T* weight, T* p, double* losses, uint64* errors,
                                      uint64 code_negative, uint64 code_sum, int64 examples, int64 classes) {
  typedef typename Accumulate<T>::type A;
  __shared__ A scratch[32];
  __shared__ double wide[32];
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x) {
    const int64 begin = i * classes;
    const T* row = x + begin;
    A largest, sum, wanted = 0;
    double loss = 0;
    row_statistics(row, classes, &largest, &sum);
    for (int64 j = threadIdx.x; j < classes; j += blockDim.x) {
      const A probability = exp(load(row, j) - largest) / sum, share = load(label, begin + j);
      store(p, begin + j, probability);
      loss -= share * log(probability < (A)1e-20 ? (A)1e-20 : probability);
      wanted += share;
      if (share < 0) report_error(errors, code_negative, begin + j, error_bits((double)share));
    }
    loss = block_reduce(loss, wide, 0.0, Sum());
    wanted = block_reduce(wanted, scratch, (A)0, Sum());
    if (threadIdx.x != 0) continue;
    if (fabs(wanted - 1) > (A)1e-5) report_error(errors, code_sum, i, error_bits((double)wanted));
    losses[i] = weight ? (A)loss * load(weight, i) : (A)loss;
  }
}

// Sums in one block, in a fixed order; the result is in all threads.
template <typename F>
__device__ inline double sum_block(int64 n, F f) {
  __shared__ double scratch[32];
  double total = 0;
  for (int64 i = threadIdx.x; i < n; i += blockDim.x) total += f(i);
  return block_reduce(total, scratch, 0.0, Sum());
}

// loss = scale * sum of losses / sum of weights, by one block.
template <typename T>
__device__ void softmax_loss_sum(const double* losses, const T* weight, T* loss, int64 examples, double scale,
                                 int32 by_batch) {
  const double sum = sum_block(examples, [=](int64 i) { return losses[i]; });
  double total = examples;
  if (weight) total = sum_block(examples, [=](int64 i) { return (double)load(weight, i); });
  if (threadIdx.x == 0) store(loss, 0, total != 0 ? sum * (scale / (by_batch ? (double)examples : total)) : 0);
}

template <typename T>
__device__ void softmax_weight_sum(const T* weight, double* total, int64 examples) {
  const double sum = sum_block(examples, [=](int64 i) { return (double)load(weight, i); });
  if (threadIdx.x == 0) *total = sum;
}

// dX = factor * weight * (P - label). `total`: the sum of the weights, or null to divide by the number of examples.
template <typename T>
__device__ inline typename Accumulate<T>::type loss_factor(const T* dloss, const double* total, int64 examples, double scale) {
  typedef typename Accumulate<T>::type A;
  const double divisor = total ? *total : (double)examples;
  return divisor > 0 ? load(dloss, 0) * (A)(scale / divisor) : load(dloss, 0);
}

template <typename T, typename I>
__device__ void softmax_loss_bwd(const I* label, const T* weight, const T* p, const T* dloss, const double* total, T* dx,
                                 uint64* errors, uint64 code, int64 examples, int64 classes, double scale) {
  typedef typename Accumulate<T>::type A;
  const A factor = loss_factor(dloss, total, examples, scale);
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x) {
    const A here = weight ? load(weight, i) * factor : factor;
    const int64 begin = i * classes, chosen = label[i];
    for (int64 j = threadIdx.x; j < classes; j += blockDim.x)
      store(dx, begin + j, load(p, begin + j) * here - (j == chosen ? here : 0));
    if (threadIdx.x == 0 && !is_class(chosen, classes)) report_error(errors, code, i, error_bits(chosen));
  }
}

template <typename T>
__device__ void softmax_prob_loss_bwd(const T* label, const T* weight, const T* p, const T* dloss, const double* total, T* dx,
                                      int64 examples, int64 classes, double scale) {
  typedef typename Accumulate<T>::type A;
  const A factor = loss_factor(dloss, total, examples, scale);
  for (int64 i = blockIdx.x; i < examples; i += gridDim.x) {
    const A here = weight ? load(weight, i) * factor : factor;
    for (int64 at = i * classes + threadIdx.x; at < (i + 1) * classes; at += blockDim.x)
      store(dx, at, (load(p, at) - load(label, at)) * here);
  }
}

#define SOFTMAX_INDEXED(S, T, J, I)                                                                                       \
  extern "C" __global__ void softmax_loss_fwd_##S##_##J(const T* x, const I* label, const T* weight, T* p, double* losses, \
                                                        uint64* errors, uint64 code, int64 examples, int64 classes) {     \
    softmax_loss_fwd(x, label, weight, p, losses, errors, code, examples, classes);                                       \
  }                                                                                                                       \
  extern "C" __global__ void softmax_loss_bwd_##S##_##J(                                                                  \
      const I* label, const T* weight, const T* p, const T* dloss, const double* total, T* dx, uint64* errors,            \
      uint64 code, int64 examples, int64 classes, double scale) {                                                         \
    softmax_loss_bwd(label, weight, p, dloss, total, dx, errors, code, examples, classes, scale);                         \
  }
#define SOFTMAX(S, T)                                                                                                    \
  extern "C" __global__ void softmax_fwd_##S(const T* x, T* y, int64 examples, int64 classes) {                          \
    softmax_fwd(x, y, examples, classes);                                                                                \
  }                                                                                                                      \
  extern "C" __global__ void softmax_bwd_##S(const T* y, const T* dy, T* dx, int64 examples, int64 classes) {            \
    softmax_bwd(y, dy, dx, examples, classes);                                                                           \
  }                                                                                                                      \
  extern "C" __global__ void softmax_prob_loss_fwd_##S(const T* x, const T* label, const T* weight, T* p, double* losses, \
                                                       uint64* errors, uint64 code_negative, uint64 code_sum,            \
                                                       int64 examples, int64 classes) {                                  \
    softmax_prob_loss_fwd(x, label, weight, p, losses, errors, code_negative, code_sum, examples, classes);              \
  }                                                                                                                      \
  extern "C" __global__ void softmax_loss_sum_##S(const double* losses, const T* weight, T* loss, int64 examples,        \
                                                  double scale, int32 by_batch) {                                        \
    softmax_loss_sum(losses, weight, loss, examples, scale, by_batch);                                                   \
  }                                                                                                                      \
  extern "C" __global__ void softmax_weight_sum_##S(const T* weight, double* total, int64 examples) {                    \
    softmax_weight_sum(weight, total, examples);                                                                         \
  }                                                                                                                      \
  extern "C" __global__ void softmax_prob_loss_bwd_##S(const T* label, const T* weight, const T* p, const T* dloss,      \
                                                       const double* total, T* dx, int64 examples, int64 classes,        \
                                                       double scale) {                                                   \
    softmax_prob_loss_bwd(label, weight, p, dloss, total, dx, examples, classes, scale);                                 \
  }                                                                                                                      \
  SOFTMAX_INDEXED(S, T, i32, int32)                                                                                      \
  SOFTMAX_INDEXED(S, T, i64, int64)
GPUNET_FLOATS(SOFTMAX)
