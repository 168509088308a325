// Reductions over any dimensions, in an order that depends on shapes only, and their gradients.
//
// A result has `reduced` elements; the offsets of results and of their elements follow from sizes and strides of up to four
// dimensions each, innermost first. Where there are few results their elements are cut into slices, whose totals go to
// partial[slice][result] and are reduced by a second kernel.
#include "errors.cuh"
#include "sums.cuh"

// A list of dimensions, innermost first. The size of the last one is not needed.
struct Dimensions {
  int32 count;
  int64 size[3], stride[4];
  __device__ int64 offset(int64 index) const {
    if (count <= 1) return index * stride[0];
    // Divisions of 32 bits are several times as fast.
    return index <= GPUNET_NARROW ? split((uint32)index) : split(index);
  }
  template <typename I>
  __device__ int64 split(I rest) const {
    // Written out: a loop over arrays would put them into memory of the thread.
    I next = rest / (I)size[0];
    int64 result = (rest - next * (I)size[0]) * stride[0];
    rest = next;
    if (count == 2) return result + rest * stride[1];
    next = rest / (I)size[1];
    result += (rest - next * (I)size[1]) * stride[1];
    rest = next;
    if (count == 3) return result + rest * stride[2];
    next = rest / (I)size[2];
    result += (rest - next * (I)size[2]) * stride[2];
    return result + next * stride[3];
  }
};

#define REDUCE_PARAMETERS                                                                                              \
  int32 kind, double divisor, int64 kept, int64 reduced, int64 slices, int32 kept_dims, int64 k0, int64 k1, int64 k2,   \
      int64 ks0, int64 ks1, int64 ks2, int64 ks3, int32 reduced_dims, int64 r0, int64 r1, int64 r2, int64 rs0, int64 rs1, \
      int64 rs2, int64 rs3
struct ReduceShape {
  int64 kept, reduced, slices;
  Dimensions outer, inner;
};
#define REDUCE_SHAPE                                                       \
  ReduceShape {                                                            \
    kept, reduced, slices, {kept_dims, {k0, k1, k2}, {ks0, ks1, ks2, ks3}}, { \
      reduced_dims, {r0, r1, r2}, { rs0, rs1, rs2, rs3 }                   \
    }                                                                      \
  }

__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }
__device__ inline int64 root(int64 x) { return x; }  // whole numbers have no norm

template <typename T>
struct Limits {
  static constexpr bool is_signed = (T)-1 < (T)0;
  __device__ static T highest() { return (T)(is_signed ? ~0ull >> (65 - 8 * sizeof(T)) : ~0ull >> (64 - 8 * sizeof(T))); }
  __device__ static T lowest() { return is_signed ? (T)(-highest() - 1) : 0; }
  // No value lies beyond.
  __device__ static T above() { return highest(); }
  __device__ static T below() { return lowest(); }
};
template <>
struct Limits<float> {
  __device__ static float highest() { return 0x1.fffffep127f; }
  __device__ static float lowest() { return -highest(); }
  __device__ static float above() { return __int_as_float(0x7f800000); }
  __device__ static float below() { return -above(); }
};
template <>
struct Limits<float16> {
  __device__ static float highest() { return 65504.0f; }
  __device__ static float lowest() { return -highest(); }
  __device__ static float above() { return __int_as_float(0x7f800000); }
  __device__ static float below() { return -above(); }
};
// As on the CPU, which reduces it as float.
template <>
struct Limits<bfloat16> : Limits<float> {};
template <>
struct Limits<double> {
  __device__ static double highest() { return 0x1.fffffffffffffp1023; }
  __device__ static double lowest() { return -highest(); }
  __device__ static double above() { return __longlong_as_double(0x7ff0000000000000); }
  __device__ static double below() { return -above(); }
};

// What is summed: the elements (0, and 1 for their mean), their absolute values (2), their squares (3, for the root of the sum).
template <typename T>
struct SumUp {
  typedef typename Total<T>::type A;
  int32 kind;
  double divisor;
  __device__ A identity() const { return 0; }
  __device__ A of_none() const { return 0; }
  __device__ A take(A v) const { return kind == 2 ? (v < 0 ? -v : v) : kind == 3 ? v * v : v; }
  __device__ A operator()(A a, A b) const { return a + b; }
  // `counted`: the number of elements where lengths tell it, else -1.
  __device__ A finish(A total, int64 counted) const {
    if (kind == 1) return total / (A)(counted < 0 ? divisor : counted > 0 ? (double)counted : 1.0);
    return kind == 3 ? root(total) : total;
  }
  __device__ int64 at_least() const { return 0; }
};

// The largest (0) or the smallest (1) element. NaN is larger and smaller than all. Of no elements it is the end of the range.
template <typename T>
struct Extreme {
  typedef typename Total<T>::type A;
  int32 kind;
  double divisor;
  __device__ A identity() const { return kind ? Limits<T>::above() : Limits<T>::below(); }
  __device__ A of_none() const { return kind ? Limits<T>::highest() : Limits<T>::lowest(); }
  __device__ A take(A v) const { return v; }
  __device__ A operator()(A a, A b) const { return a != a || (kind ? a < b : a > b) ? a : b; }
  __device__ A finish(A value, int64) const { return value; }
  // With lengths the first element always counts.
  __device__ int64 at_least() const { return 1; }
};

// How many elements of result k count.
template <typename Op>
__device__ inline int64 counted(const int32* lengths, int64 k, int64 reduced, bool first, const Op& op, uint64* errors,
                                uint64 code) {
  if (lengths == nullptr) return reduced;
  const int64 length = lengths[k];
  if (length >= 0 && length <= reduced) return length < op.at_least() ? op.at_least() : length;
  if (first) report_error(errors, code, k, error_bits(length));
  return 0;
}

// Reduces elements begin, begin + step, ... of one result.
template <typename Op, typename T>
__device__ inline typename Op::A reduce_run(const T* from, const Dimensions& inner, int64 begin, int64 end, int64 step,
                                            const Op& op) {
  typename Op::A total = op.identity();
  if (inner.count > 1) {
    for (int64 r = begin; r < end; r += step) total = op(total, op.take(load(from, inner.offset(r))));
    return total;
  }
  // Four at a time, whose loads do not wait for each other.
  typename Op::A second = total, third = total, fourth = total;
  const int64 stride = inner.stride[0];
  int64 r = begin;
  for (; r + 3 * step < end; r += 4 * step) {
    total = op(total, op.take(load(from, r * stride)));
    second = op(second, op.take(load(from, (r + step) * stride)));
    third = op(third, op.take(load(from, (r + 2 * step) * stride)));
    fourth = op(fourth, op.take(load(from, (r + 3 * step) * stride)));
  }
  for (; r < end; r += step) total = op(total, op.take(load(from, r * stride)));
  return op(op(total, second), op(third, fourth));
}

// A block for `across` neighbouring results and a slice of their elements; its threads one above the other share the elements of
// a result. `across` is a power of two.
template <typename Op, typename T>
__device__ inline void reduce(const T* x, T* y, uint8* partial, const int32* lengths, uint64* errors, uint64 code, int32 across,
                              const ReduceShape& s, const Op& op) {
  typedef typename Op::A A;
  __shared__ A parts[256];
  const int lane = threadIdx.x % across, depth = threadIdx.x / across, deep = blockDim.x / across;
  const int64 tiles = (s.kept + across - 1) / across, length = (s.reduced + s.slices - 1) / s.slices;
  for (int64 task = blockIdx.x; task < tiles * s.slices; task += gridDim.x) {
    const int64 slice = task / tiles, k = (task - slice * tiles) * across + lane;
    A total = op.identity();
    int64 count = 0;
    if (k < s.kept) {
      count = counted(lengths, k, s.reduced, slice == 0 && depth == 0, op, errors, code);
      const int64 end = (slice + 1) * length < count ? (slice + 1) * length : count;
      total = reduce_run(x + s.outer.offset(k), s.inner, slice * length + depth, end, deep, op);
    }
    if (across == 1) {
      total = block_reduce(total, parts, op.identity(), op);
    } else if (deep > 1) {
      __syncthreads();
      parts[threadIdx.x] = total;
      __syncthreads();
      if (depth == 0)
        for (int d = 1; d < deep; ++d) total = op(total, parts[d * across + lane]);
    }
    if (depth != 0 || k >= s.kept) continue;
    if (s.slices > 1)
      ((A*)partial)[slice * s.kept + k] = total;
    else
      store(y, k, s.reduced ? op.finish(total, lengths ? count : -1) : op.of_none());
  }
}

// A block for each result.
template <typename Op, typename T>
__device__ inline void reduce_slices(const uint8* partial, T* y, const int32* lengths, int64 kept, int64 slices, const Op& op) {
  typedef typename Op::A A;
  __shared__ A scratch[32];
  for (int64 k = blockIdx.x; k < kept; k += gridDim.x) {
    A total = op.identity();
    for (int64 i = threadIdx.x; i < slices; i += blockDim.x) total = op(total, ((const A*)partial)[i * kept + k]);
    total = block_reduce(total, scratch, op.identity(), op);
    if (threadIdx.x == 0) store(y, k, op.finish(total, lengths ? (int64)lengths[k] : -1));
  }
}

#define REDUCTION(NAME, OP, S, T)                                                                                            \
  extern "C" __global__ void NAME##_##S(const T* x, T* y, uint8* partial, const int32* lengths, uint64* errors, uint64 code, \
                                        int32 across, REDUCE_PARAMETERS) {                                                   \
    reduce(x, y, partial, lengths, errors, code, across, REDUCE_SHAPE, OP<T>{kind, divisor});                                \
  }                                                                                                                          \
  extern "C" __global__ void NAME##_slices_##S(const uint8* partial, T* y, const int32* lengths, int32 kind, double divisor, \
                                               int64 kept, int64 slices) {                                                   \
    reduce_slices(partial, y, lengths, kept, slices, OP<T>{kind, divisor});                                                  \
  }
#define REDUCTIONS(S, T)                  \
  REDUCTION(reduce_sum, SumUp, S, T)      \
  REDUCTION(reduce_extreme, Extreme, S, T)
GPUNET_NUMBERS(REDUCTIONS)

// The gradient of one element: of a sum or mean (0), of an extreme value (1), of the L1 norm (2), of the L2 norm (3).
template <typename A, typename T>
__device__ inline A reduced_gradient(int32 kind, A dy, A factor, const T* x, int64 i, const T* y, int64 k) {
  if (kind == 0) return dy * factor;
  const A v = load(x, i);
  if (kind == 2) return dy * (v > 0 ? (A)1 : v < 0 ? (A)-1 : v);
  const A whole = load(y, k);
  if (kind == 1) return v == whole ? dy : (A)0;
  return whole != 0 ? v * (dy / whole) : (A)0;
}

// Eight dimensions of X, innermost first, with the strides of Y along them: 0 where it is reduced.
#define REDUCE_BWD_PARAMETERS                                                                                        \
  int64 n, int32 kind, double factor, int64 n0, int64 n1, int64 n2, int64 n3, int64 n4, int64 n5, int64 n6, int64 s0, \
      int64 s1, int64 s2, int64 s3, int64 s4, int64 s5, int64 s6, int64 s7
struct SpreadShape {
  int64 size[7], stride[8];
};

template <typename I>
__device__ inline int64 spread_offset(I rest, const SpreadShape& s) {
  int64 k = 0;
#pragma unroll
  for (int d = 0; d < 7; ++d) {
    if (rest == 0) return k;
    const I next = rest / (I)s.size[d];
    k += (rest - next * (I)s.size[d]) * s.stride[d];
    rest = next;
  }
  return k + rest * s.stride[7];
}

template <typename T>
__device__ inline void reduce_bwd(const T* dy, const T* x, const T* y, T* dx, int64 n, int32 kind, double factor,
                                  const SpreadShape& s) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(i, n) {
    const int64 k = n <= GPUNET_NARROW ? spread_offset((uint32)i, s) : spread_offset(i, s);
    store(dx, i, reduced_gradient<A>(kind, load(dy, k), (A)factor, x, i, y, k));
  }
}

// Over the first (front) or the last dimensions, where lengths may tell how many elements count: the gradient of the sum (0), of
// the mean (1), of the largest value (2).
template <typename T>
__device__ inline void reduce_ends_bwd(const T* dy, const T* x, const T* y, const int32* lengths, T* dx, uint64* errors,
                                       uint64 code, int64 kept, int64 reduced, int32 front, int32 kind) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(i, kept * reduced) {
    const int64 row = i / (front ? kept : reduced), column = i - row * (front ? kept : reduced);
    const int64 k = front ? column : row, r = front ? row : column;
    int64 count = reduced;
    if (lengths) {
      count = lengths[k];
      if (count < 0 || count > reduced) {
        if (r == 0) report_error(errors, code, k, error_bits(count));
        count = 0;
      }
    }
    A value = 0;
    if (r < count) {
      value = load(dy, k);
      if (kind == 1) value /= (A)count;
      if (kind == 2 && load(x, i) != load(y, k)) value = 0;
    }
    store(dx, i, value);
  }
}

#define REDUCTION_GRADIENTS(S, T)                                                                                             \
  extern "C" __global__ void reduce_bwd_##S(const T* dy, const T* x, const T* y, T* dx, REDUCE_BWD_PARAMETERS) {              \
    reduce_bwd(dy, x, y, dx, n, kind, factor, SpreadShape{{n0, n1, n2, n3, n4, n5, n6}, {s0, s1, s2, s3, s4, s5, s6, s7}});    \
  }                                                                                                                           \
  extern "C" __global__ void reduce_ends_bwd_##S(const T* dy, const T* x, const T* y, const int32* lengths, T* dx,            \
                                                 uint64* errors, uint64 code, int64 kept, int64 reduced, int32 front,         \
                                                 int32 kind) {                                                                \
    reduce_ends_bwd(dy, x, y, lengths, dx, errors, code, kept, reduced, front, kind);                                         \
  }
GPUNET_FLOATS(REDUCTION_GRADIENTS)
