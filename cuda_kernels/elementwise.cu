// Elementwise arithmetic of two broadcast tensors, its gradients, and sums to the shape of an operand.
#include "broadcast.cuh"
#include "errors.cuh"
#include "sums.cuh"

// A function of two operands of one shape, or along the result.
#define ALONG(NAME, OP, S, T, R)                                                                              \
  extern "C" __global__ void NAME##_fwd_##S(const T* a, const T* b, R* c, int64 n) { map2(a, b, c, n, OP()); } \
  extern "C" __global__ void NAME##_along_##S(const T* a, const T* b, R* c, GPUNET_ALONG_PARAMETERS) {        \
    map_along(a, b, c, GPUNET_ALONG, OP());                                                                   \
  }
// And at any strides.
#define STRIDED(NAME, OP, S, T, R)                                                                            \
  ALONG(NAME, OP, S, T, R)                                                                                    \
  extern "C" __global__ void NAME##_strided_##S(const T* a, const T* b, R* c, GPUNET_STRIDED_PARAMETERS) {    \
    map_strided(a, b, c, GPUNET_STRIDED, OP());                                                               \
  }
#define ARITHMETIC(NAME, S, T) STRIDED(NAME, NAME##_op, S, T, T)

GPUNET_BINARY_OP(add, a, b, (C)(a + b))
GPUNET_BINARY_OP(sub, a, b, (C)(a - b))
GPUNET_BINARY_OP(mul, a, b, (C)(a * b))
GPUNET_BINARY_OP(div, a, b, a / b)
GPUNET_BINARY_OP(pow, a, b, pow(a, b))

// Towards zero; all that C++ leaves undefined has a value. A divisor of 0 is reported by quotient_check.
struct quotient_op {
  template <typename C>
  __device__ C operator()(C a, C b) const {
    if (b == 0) return 0;
    return b == (C)-1 && (C)-1 < 0 ? (C)(0 - (uint64)a) : (C)(a / b);
  }
};

template <typename T>
__device__ inline void quotient_check(const T* b, uint64* errors, uint64 code, int64 n) {
  GPUNET_LOOP(i, n) {
    if (b[i] == 0) report_error(errors, code, i, 0);
  }
}

#define WHOLE(S, T)                                                                                             \
  ARITHMETIC(quotient, S, T)                                                                                    \
  extern "C" __global__ void quotient_check_##S(const T* b, uint64* errors, uint64 code, int64 n) {            \
    quotient_check(b, errors, code, n);                                                                         \
  }
GPUNET_INTEGERS(WHOLE)

#define EXACT(S, T) ARITHMETIC(add, S, T) ARITHMETIC(sub, S, T) ARITHMETIC(mul, S, T)
#define ROUNDED(S, T) ARITHMETIC(div, S, T) ALONG(pow, pow_op, S, T, T)  // exponents lie along bases
GPUNET_SIGNLESS(EXACT)
GPUNET_FLOATS(ROUNDED)

// What is summed afterwards is not rounded to half types before.
// y = a b, where a may be y.
template <typename T, typename R>
__device__ void mul_unrounded(const float* a, const T* b, R* y, int64 n) {
  GPUNET_LOOP(i, n) store(y, i, a[i] * load(b, i));
}
#define UNROUNDED(S, T)                                                                              \
  STRIDED(mul_wide, mul_op, S, T, float)                                                             \
  STRIDED(div_wide, div_op, S, T, float)                                                             \
  extern "C" __global__ void mul_into_wide_##S(const float* a, const T* b, float* y, int64 n) {      \
    mul_unrounded(a, b, y, n);                                                                       \
  }                                                                                                  \
  extern "C" __global__ void mul_into_narrow_##S(const float* a, const T* b, T* y, int64 n) {        \
    mul_unrounded(a, b, y, n);                                                                       \
  }
GPUNET_HALVES(UNROUNDED)

// Powers with one exponent; the common ones in their own way, which is also faster.
template <typename C>
struct Power {
  C exponent;
  __device__ C operator()(C x) const {
    if (exponent == 2) return x * x;
    if (exponent == 1) return x;
    if (exponent == (C)0.5) return sqrt(x);
    if (exponent == -1) return 1 / x;
    return pow(x, exponent);
  }
};

// da = dc b, db = dc a for operands of one shape. da or db may be dc.
template <typename T>
__device__ void mul_bwd(const T* dc, const T* a, const T* b, T* da, T* db, int64 n) {
  typedef typename Accumulate<T>::type C;
  const T* const x[] = {dc, a, b};
  T* const y[] = {da, db};
  map_all(x, y, n, [=](const C(&in)[3], C(&out)[2]) {
    out[0] = (C)(in[0] * in[2]);
    out[1] = (C)(in[0] * in[1]);
  });
}

// da = dc / b, db = -dc c / b for operands of one shape. Outputs may be inputs.
template <typename T>
__device__ void div_bwd(const T* dc, const T* b, const T* c, T* da, T* db, int64 n) {
  typedef typename Accumulate<T>::type C;
  const T* const x[] = {dc, b, c};
  T* const y[] = {da, db};
  map_all(x, y, n, [=](const C(&in)[3], C(&out)[2]) {
    out[0] = in[0] / in[1];
    out[1] = -(out[0] * in[2]);
  });
}

// Of T, in A, to R.
#define SUMS_TO(S, T, A, R)                                                                                            \
  extern "C" __global__ void sum_strided_##S(const T* x, R* y, uint8* partial, int64 kept, int64 reduced, int64 slices,\
                                             int64 k1, int64 k2, int64 p0, int64 p1, int64 p2, int64 r1, int64 r2,     \
                                             int64 q0, int64 q1, int64 q2, int32 negate) {                             \
    const SumShape shape = {kept, reduced, slices, {0, k1, k2}, {p0, p1, p2}, {0, r1, r2}, {q0, q1, q2}};              \
    sum_strided<T, R, A>(x, y, partial, shape, negate);                                                                \
  }                                                                                                                    \
  extern "C" __global__ void sum_columns_##S(const T* x, R* y, uint8* partial, int64 rows, int64 columns,              \
                                             int64 slices, int32 negate) {                                             \
    sum_columns<T, R, A>(x, y, partial, rows, columns, slices, negate);                                                \
  }
#define SUMS(S, T, A)                                                                                                  \
  SUMS_TO(S, T, A, T)                                                                                                  \
  extern "C" __global__ void sum_slices_##S(const uint8* partial, T* y, int64 kept, int64 slices, int32 negate) {      \
    sum_slices<T, A>(partial, y, kept, slices, negate);                                                                \
  }
#define GRADIENT(S, T)                                                                                                 \
  extern "C" __global__ void mul_bwd_##S(const T* dc, const T* a, const T* b, T* da, T* db, int64 n) {                 \
    mul_bwd<T>(dc, a, b, da, db, n);                                                                                   \
  }                                                                                                                    \
  SUMS(S, T, Total<T>::type)
GPUNET_SIGNLESS(GRADIENT)
// For gradients of biases: over a whole batch, and few of them.
SUMS(wide_f32, float, double)
// Of products that are not rounded. Their slices are summed as those of others.
#define NARROWED(S, T) SUMS_TO(narrowed_##S, float, float, T)
GPUNET_HALVES(NARROWED)

#define ROUNDED_GRADIENT(S, T)                                                                             \
  extern "C" __global__ void div_bwd_##S(const T* dc, const T* b, const T* c, T* da, T* db, int64 n) {    \
    div_bwd<T>(dc, b, c, da, db, n);                                                                      \
  }                                                                                                       \
  extern "C" __global__ void power_fwd_##S(const T* x, T* y, int64 n, double exponent) {                  \
    typedef Accumulate<T>::type C;                                                                        \
    map(x, y, n, Power<C>{(C)exponent});                                                                  \
  }
GPUNET_FLOATS(ROUNDED_GRADIENT)
