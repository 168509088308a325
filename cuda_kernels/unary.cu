// Elementwise functions of one tensor and their gradients.
#include "vector.cuh"

GPUNET_UNARY(sqr_fwd, x * x)
GPUNET_UNARY(sqrt_fwd, sqrt(x))
GPUNET_UNARY(exp_fwd, exp(x))
GPUNET_UNARY(abs_fwd, fabs(x))
// 0 where x is 0, whatever dy; a NaN in x goes by its sign.
GPUNET_BINARY(abs_bwd, x, dy, x == 0 ? 0 : copysign((C)1, x) * dy)

GPUNET_UNARY_OP(negative_fwd, (C)(0 - x))
GPUNET_UNARY_OP(sign_fwd, (C)((x > 0) - (x < 0)))

// A zero changes its sign too where there is one.
struct negate_float {
  template <typename C>
  __device__ C operator()(C x) const {
    return -x;
  }
};
#define NEGATE_FLOAT(S, T) \
  extern "C" __global__ void negative_fwd_##S(const T* x, T* y, int64 n) { map(x, y, n, negate_float()); }
#define NEGATE(S, T) GPUNET_UNARY_KERNEL(negative_fwd, S, T)
#define SIGN(S, T) GPUNET_UNARY_KERNEL(sign_fwd, S, T)
GPUNET_FLOATS(NEGATE_FLOAT)
NEGATE(i8, int8) NEGATE(i16, int16) NEGATE(i32, int32) NEGATE(i64, int64)
GPUNET_NUMBERS(SIGN)

template <typename C>
struct Scale {
  C factor;
  __device__ C operator()(C x) const { return x * factor; }
};

// A NaN passes through.
template <typename C>
struct GuardedLog {
  C low;
  __device__ C operator()(C x) const { return log(x < low ? low : x); }
};

template <typename C>
struct Raised {
  C low;
  __device__ C operator()(C x) const { return x < low ? low : x; }
};

// What is divided by it is 0 where x is near 0.
template <typename C>
struct Apart {
  C epsilon, infinity;
  __device__ C operator()(C x) const { return fabs(x) <= epsilon ? infinity : x; }
};

template <typename C>
struct Clip {
  C low, high;
  // A NaN passes through; high wins where the limits are crossed.
  __device__ C operator()(C x) const {
    const C raised = x < low ? low : x;
    return raised > high ? high : raised;
  }
};

template <typename C>
struct ClipGradient {
  C low, high;
  __device__ C operator()(C y, C dy) const { return y > low && y < high ? dy : 0; }
};

#define LIMITED(S, T)                                                                                              \
  extern "C" __global__ void scale_fwd_##S(const T* x, T* y, int64 n, double factor) {                             \
    typedef Accumulate<T>::type C;                                                                                 \
    map(x, y, n, Scale<C>{(C)factor});                                                                             \
  }                                                                                                                \
  extern "C" __global__ void log_fwd_##S(const T* x, T* y, int64 n, double epsilon) {                              \
    typedef Accumulate<T>::type C;                                                                                 \
    map(x, y, n, GuardedLog<C>{(C)epsilon});                                                                       \
  }                                                                                                                \
  extern "C" __global__ void raised_fwd_##S(const T* x, T* y, int64 n, double epsilon) {                           \
    typedef Accumulate<T>::type C;                                                                                 \
    map(x, y, n, Raised<C>{(C)epsilon});                                                                           \
  }                                                                                                                \
  extern "C" __global__ void apart_fwd_##S(const T* x, T* y, int64 n, double epsilon, double infinity) {           \
    typedef Accumulate<T>::type C;                                                                                 \
    map(x, y, n, Apart<C>{(C)epsilon, (C)infinity});                                                               \
  }                                                                                                                \
  extern "C" __global__ void clip_fwd_##S(const T* x, T* y, int64 n, double low, double high) {                    \
    typedef Accumulate<T>::type C;                                                                                 \
    map(x, y, n, Clip<C>{(C)low, (C)high});                                                                        \
  }                                                                                                                \
  extern "C" __global__ void clip_bwd_##S(const T* y, const T* dy, T* dx, int64 n, double low, double high) {      \
    typedef Accumulate<T>::type C;                                                                                 \
    map2(y, dy, dx, n, ClipGradient<C>{(C)low, (C)high});                                                          \
  }
GPUNET_FLOATS(LIMITED)
