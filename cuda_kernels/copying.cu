// Type conversions.
#include "vector.cuh"

// A number without its fraction, as x86 cuts it: what does not fit into 32 bits (64 for int64), a NaN too, becomes the least number
// of so many bits. GPUs and hosts would make different numbers of it.
template <typename R, typename C>
__device__ inline R whole(C x) {
  if (sizeof(R) == 8) return x >= (C)-0x1p63 && x < (C)0x1p63 ? (R)(int64)x : (R)(int64)(1ull << 63);
  return x > (C)-0x1p31 && x < (C)0x1p31 ? (R)(int32)x : (R)(int32)(1u << 31);
}

// Fractions are cut off, whole numbers wrap around, any number but 0 is true.
template <typename R>
struct Convert {
  template <typename C>
  __device__ R operator()(C x) const {
    return (R)x;
  }
  __device__ R operator()(float x) const { return whole<R>(x); }
  __device__ R operator()(double x) const { return whole<R>(x); }
};
template <>
struct Convert<float> {
  template <typename C>
  __device__ float operator()(C x) const {
    return (float)x;
  }
};
template <>
struct Convert<double> {
  template <typename C>
  __device__ double operator()(C x) const {
    return (double)x;
  }
};
template <>
struct Convert<bool> {
  template <typename C>
  __device__ bool operator()(C x) const {
    return x != 0;
  }
};

template <typename T, typename R>
__device__ inline void cast(const T* x, R* y, int64 n) {
  map(x, y, n, Convert<typename Accumulate<R>::type>());
}
// Rounded once. A bfloat16 is made of a float, as on the CPU.
template <>
__device__ inline void cast<double, float16>(const double* x, float16* y, int64 n) {
  GPUNET_LOOP(i, n) y[i] = __double2half(x[i]);
}

// Numbers beyond the largest of float16 become it; a NaN stays.
struct Limit {
  template <typename C>
  __device__ float operator()(C x) const {
    return x > 65504 ? 65504.0f : x < -65504 ? -65504.0f : (float)x;
  }
};

#define CAST(S, T, RS, R) \
  extern "C" __global__ void cast_fwd_##S##_##RS(const T* x, R* y, int64 n) { cast<T, R>(x, y, n); }
// Between one type and another that is listed behind it, both ways.
#define BOTH(S, T, RS, R) CAST(S, T, RS, R) CAST(RS, R, S, T)
#define WITH_BOOL(S, T) BOTH(S, T, b8, bool)
#define WITH_I64(S, T) BOTH(S, T, i64, int64) WITH_BOOL(S, T)
#define WITH_I32(S, T) BOTH(S, T, i32, int32) WITH_I64(S, T)
#define WITH_U16(S, T) BOTH(S, T, u16, uint16) WITH_I32(S, T)
#define WITH_I16(S, T) BOTH(S, T, i16, int16) WITH_U16(S, T)
#define WITH_U8(S, T) BOTH(S, T, u8, uint8) WITH_I16(S, T)
#define WITH_I8(S, T) BOTH(S, T, i8, int8) WITH_U8(S, T)
#define WITH_F64(S, T) BOTH(S, T, f64, double) WITH_I8(S, T)
#define WITH_BF16(S, T) GPUNET_IF_BFLOAT16(BOTH(S, T, bf16, bfloat16)) WITH_F64(S, T)
#define WITH_F16(S, T) BOTH(S, T, f16, float16) WITH_BF16(S, T)
WITH_F16(f32, float)
WITH_BF16(f16, float16)
GPUNET_IF_BFLOAT16(WITH_F64(bf16, bfloat16))
WITH_I8(f64, double)
WITH_U8(i8, int8)
WITH_I16(u8, uint8)
WITH_U16(i16, int16)
WITH_I32(u16, uint16)
WITH_I64(i32, int32)
WITH_BOOL(i64, int64)

#define LIMITED(S, T) \
  extern "C" __global__ void limited_half_fwd_##S(const T* x, float16* y, int64 n) { map(x, y, n, Limit()); }
GPUNET_FLOATS(LIMITED)
