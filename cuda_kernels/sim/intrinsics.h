// CUDA's arithmetic intrinsics. The fast approximations (__expf, ...) are the exact functions here. Included by gpunet_sim.h.
#pragma once

namespace gpunet_sim {
template <typename To, typename From>
inline To as(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same number of bytes");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}
}  // namespace gpunet_sim

inline int __float_as_int(float f) { return gpunet_sim::as<int>(f); }
inline unsigned __float_as_uint(float f) { return gpunet_sim::as<unsigned>(f); }
inline float __int_as_float(int i) { return gpunet_sim::as<float>(i); }
inline float __uint_as_float(unsigned i) { return gpunet_sim::as<float>(i); }
inline long long __double_as_longlong(double d) { return gpunet_sim::as<long long>(d); }
inline double __longlong_as_double(long long i) { return gpunet_sim::as<double>(i); }

// The C library's functions of a float in terms of those of a double, which leaves the rounded results: libraries differ in the last
// bits of a float, and hardly ever in those of a double. These definitions take the place of the library's in the
// module (-Bsymbolic).
#ifndef __THROW
#define __THROW
#endif
#define GPUNET_SIM_ROUNDED(name) \
  float name##f(float x) __THROW { return (float)name((double)x); }
extern "C" {
GPUNET_SIM_ROUNDED(exp)
GPUNET_SIM_ROUNDED(exp2)
GPUNET_SIM_ROUNDED(expm1)
GPUNET_SIM_ROUNDED(log)
GPUNET_SIM_ROUNDED(log2)
GPUNET_SIM_ROUNDED(log10)
GPUNET_SIM_ROUNDED(log1p)
GPUNET_SIM_ROUNDED(sin)
GPUNET_SIM_ROUNDED(cos)
GPUNET_SIM_ROUNDED(tan)
GPUNET_SIM_ROUNDED(asin)
GPUNET_SIM_ROUNDED(acos)
GPUNET_SIM_ROUNDED(atan)
GPUNET_SIM_ROUNDED(sinh)
GPUNET_SIM_ROUNDED(cosh)
GPUNET_SIM_ROUNDED(tanh)
GPUNET_SIM_ROUNDED(asinh)
GPUNET_SIM_ROUNDED(acosh)
GPUNET_SIM_ROUNDED(atanh)
GPUNET_SIM_ROUNDED(erf)
GPUNET_SIM_ROUNDED(erfc)
GPUNET_SIM_ROUNDED(cbrt)
float powf(float x, float y) __THROW { return (float)pow((double)x, (double)y); }
float atan2f(float y, float x) __THROW { return (float)atan2((double)y, (double)x); }
}

template <typename T>
inline T __ldg(const T* p) {
  return *p;
}
template <typename T>
inline T __ldcs(const T* p) {
  return *p;
}
template <typename T>
inline void __stcs(T* p, T value) {
  *p = value;
}

// In a namespace and reached by macros, since newer C libraries declare some of them.
namespace gpunet_sim {
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float fdividef(float x, float y) { return x / y; }
inline float sinpif(float x) { return (float)sin(3.14159265358979323846 * fmod((double)x, 2.0)); }
inline float cospif(float x) { return (float)cos(3.14159265358979323846 * fmod((double)x, 2.0)); }
}  // namespace gpunet_sim
#define rsqrtf gpunet_sim::rsqrtf
#define rsqrt gpunet_sim::rsqrt
#define rcbrtf gpunet_sim::rcbrtf
#define sinpif gpunet_sim::sinpif
#define cospif gpunet_sim::cospif
#define fdividef gpunet_sim::fdividef

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

// Conversions to integers clamp to their range and take NaN to 0, as on the GPU.
#define GPUNET_SIM_TO_INTEGER(name, from, to, round, low, high)               \
  inline to name(from x) {                                                    \
    x = round(x);                                                             \
    return x != x ? 0 : x <= (from)low ? low : x >= (from)high ? high : (to)x; \
  }
#define GPUNET_SIM_TO_INT(name, from, round) \
  GPUNET_SIM_TO_INTEGER(name, from, int, round, (-2147483647 - 1), 2147483647)
#define GPUNET_SIM_TO_INT64(name, from, round) \
  GPUNET_SIM_TO_INTEGER(name, from, long long, round, (-9223372036854775807LL - 1), 9223372036854775807LL)
GPUNET_SIM_TO_INT(__float2int_rn, float, rintf)
GPUNET_SIM_TO_INT(__float2int_rz, float, truncf)
GPUNET_SIM_TO_INT(__float2int_rd, float, floorf)
GPUNET_SIM_TO_INT(__float2int_ru, float, ceilf)
GPUNET_SIM_TO_INT(__double2int_rn, double, rint)
GPUNET_SIM_TO_INT(__double2int_rz, double, trunc)
GPUNET_SIM_TO_INT64(__float2ll_rn, float, rintf)
GPUNET_SIM_TO_INT64(__float2ll_rz, float, truncf)
GPUNET_SIM_TO_INT64(__double2ll_rn, double, rint)
GPUNET_SIM_TO_INT64(__double2ll_rz, double, trunc)
GPUNET_SIM_TO_INTEGER(__float2uint_rn, float, unsigned, rintf, 0u, 4294967295u)
GPUNET_SIM_TO_INTEGER(__float2uint_rz, float, unsigned, truncf, 0u, 4294967295u)
inline float __int2float_rn(int i) { return (float)i; }
inline float __uint2float_rn(unsigned i) { return (float)i; }
inline float __ll2float_rn(long long i) { return (float)i; }
inline float __ull2float_rn(unsigned long long i) { return (float)i; }
inline float __double2float_rn(double d) { return (float)d; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
inline int __mulhi(int x, int y) { return (int)((long long)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
  return result;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline int __mul24(int x, int y) { return x * y; }

#define GPUNET_SIM_MIN_MAX(result, a, b)                                             \
  inline result min(a x, b y) { return (result)x < (result)y ? (result)x : (result)y; } \
  inline result max(a x, b y) { return (result)x > (result)y ? (result)x : (result)y; }
GPUNET_SIM_MIN_MAX(int, int, int)
GPUNET_SIM_MIN_MAX(unsigned, unsigned, unsigned)
GPUNET_SIM_MIN_MAX(unsigned, unsigned, int)
GPUNET_SIM_MIN_MAX(unsigned, int, unsigned)
GPUNET_SIM_MIN_MAX(long, long, long)
GPUNET_SIM_MIN_MAX(unsigned long, unsigned long, unsigned long)
GPUNET_SIM_MIN_MAX(long long, long long, long long)
GPUNET_SIM_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
GPUNET_SIM_MIN_MAX(unsigned long long, long long, unsigned long long)
GPUNET_SIM_MIN_MAX(unsigned long long, unsigned long long, long long)
// Of a number and a NaN the number, as fminf and fmaxf.
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
inline double min(double x, double y) { return fmin(x, y); }
inline double max(double x, double y) { return fmax(x, y); }
inline double min(float x, double y) { return fmin(x, y); }
inline double max(float x, double y) { return fmax(x, y); }
inline double min(double x, float y) { return fmin(x, y); }
inline double max(double x, float y) { return fmax(x, y); }
