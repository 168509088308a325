// CUDA's intrinsics of half types, and pairs of these. Each computes in float, or in double where float would round before, and
// rounds once. Included by gpunet_sim.h.
#pragma once

#define GPUNET_SIM_HALF_COMPARE(Name, name, op) \
  inline bool name(Name a, Name b) { return (float)a op(float) b; }
#define GPUNET_SIM_HALF_FUNCTION(Name, name, expression) \
  inline Name name(Name h) {                             \
    const float x = h;                                   \
    return Name(expression);                             \
  }
// The larger or smaller of a number and a NaN is the number.
#define GPUNET_SIM_HALF_MATH(Name)                                                                  \
  inline Name __hadd(Name a, Name b) { return a + b; }                                              \
  inline Name __hsub(Name a, Name b) { return a - b; }                                              \
  inline Name __hmul(Name a, Name b) { return a * b; }                                              \
  inline Name __hdiv(Name a, Name b) { return a / b; }                                              \
  inline Name __hneg(Name a) { return -a; }                                                         \
  inline Name __habs(Name a) { return Name(fabsf((float)a)); }                                      \
  inline Name __hfma(Name a, Name b, Name c) { return Name(fma((double)(float)a, (float)b, (float)c)); } \
  inline bool __hisnan(Name a) { return (float)a != (float)a; }                                     \
  inline int __hisinf(Name a) { return fabsf((float)a) != INFINITY ? 0 : (float)a < 0 ? -1 : 1; }   \
  inline Name __hmax(Name a, Name b) { return Name(fmaxf((float)a, (float)b)); }                    \
  inline Name __hmin(Name a, Name b) { return Name(fminf((float)a, (float)b)); }                    \
  GPUNET_SIM_HALF_COMPARE(Name, __heq, ==)                                                          \
  GPUNET_SIM_HALF_COMPARE(Name, __hlt, <)                                                           \
  GPUNET_SIM_HALF_COMPARE(Name, __hle, <=)                                                          \
  GPUNET_SIM_HALF_COMPARE(Name, __hgt, >)                                                           \
  GPUNET_SIM_HALF_COMPARE(Name, __hge, >=)                                                          \
  inline bool __hne(Name a, Name b) { return (float)a < (float)b || (float)a > (float)b; }          \
  GPUNET_SIM_HALF_FUNCTION(Name, hexp, expf(x))                                                     \
  GPUNET_SIM_HALF_FUNCTION(Name, hexp2, exp2f(x))                                                   \
  GPUNET_SIM_HALF_FUNCTION(Name, hlog, logf(x))                                                     \
  GPUNET_SIM_HALF_FUNCTION(Name, hlog2, log2f(x))                                                   \
  GPUNET_SIM_HALF_FUNCTION(Name, hsqrt, sqrtf(x))                                                   \
  GPUNET_SIM_HALF_FUNCTION(Name, hrsqrt, rsqrtf(x))                                                 \
  GPUNET_SIM_HALF_FUNCTION(Name, hrcp, 1.0f / x)                                                    \
  GPUNET_SIM_HALF_FUNCTION(Name, hsin, sinf(x))                                                     \
  GPUNET_SIM_HALF_FUNCTION(Name, hcos, cosf(x))                                                     \
  GPUNET_SIM_HALF_FUNCTION(Name, hfloor, floorf(x))                                                 \
  GPUNET_SIM_HALF_FUNCTION(Name, hceil, ceilf(x))                                                   \
  GPUNET_SIM_HALF_FUNCTION(Name, hrint, rintf(x))                                                   \
  GPUNET_SIM_HALF_FUNCTION(Name, htrunc, truncf(x))
GPUNET_SIM_HALF_MATH(__half)
GPUNET_SIM_HALF_MATH(__nv_bfloat16)

// Pairs.
#define GPUNET_SIM_HALF_PAIR(Name, Pair)                                                                       \
  struct __attribute__((aligned(4))) Pair {                                                                    \
    Name x, y;                                                                                                 \
  };                                                                                                           \
  inline Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }                                     \
  inline Pair operator-(Pair a, Pair b) { return {a.x - b.x, a.y - b.y}; }                                     \
  inline Pair operator*(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }                                     \
  inline Pair operator/(Pair a, Pair b) { return {a.x / b.x, a.y / b.y}; }                                     \
  inline Pair __hadd2(Pair a, Pair b) { return a + b; }                                                        \
  inline Pair __hsub2(Pair a, Pair b) { return a - b; }                                                        \
  inline Pair __hmul2(Pair a, Pair b) { return a * b; }                                                        \
  inline Pair __h2div(Pair a, Pair b) { return a / b; }                                                        \
  inline Pair __hneg2(Pair a) { return {-a.x, -a.y}; }                                                         \
  inline Pair __habs2(Pair a) { return {__habs(a.x), __habs(a.y)}; }                                           \
  inline Pair __hmax2(Pair a, Pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                         \
  inline Pair __hmin2(Pair a, Pair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                         \
  inline Pair __hfma2(Pair a, Pair b, Pair c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
GPUNET_SIM_HALF_PAIR(__half, __half2)
GPUNET_SIM_HALF_PAIR(__nv_bfloat16, __nv_bfloat162)
typedef __half2 half2;

inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline __half2 __float22half2_rn(float2 f) { return {__half(f.x), __half(f.y)}; }
inline float2 __half22float2(__half2 h) { return {h.x, h.y}; }
inline float __low2float(__half2 h) { return h.x; }
inline float __high2float(__half2 h) { return h.y; }
inline __half __low2half(__half2 h) { return h.x; }
inline __half __high2half(__half2 h) { return h.y; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return {__nv_bfloat16(f.x), __nv_bfloat16(f.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {h.x, h.y}; }
inline float __low2float(__nv_bfloat162 h) { return h.x; }
inline float __high2float(__nv_bfloat162 h) { return h.y; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 h) { return h.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 h) { return h.y; }
