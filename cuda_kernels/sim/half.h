// float16 (IEEE binary16) and bfloat16 with conversions that round to nearest, ties to even. Included by gpunet_sim.h.
#pragma once

namespace gpunet_sim {

inline unsigned bits_of(float f) {
  unsigned bits;
  memcpy(&bits, &f, 4);
  return bits;
}
inline float float_of(unsigned bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline float half_to_float(unsigned short h) {
  unsigned sign = (unsigned)(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  // Exponent and mantissa moved into place, then scaled by the difference of the exponent biases: exact, also for subnormal numbers.
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

inline unsigned short float_to_half(float f) {
  unsigned bits = bits_of(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00 | (magnitude >> 13 & 0x1ff);
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  if (magnitude < 0x38800000) {
    // Subnormal: adding 2^-1 leaves the wanted multiple of 2^-24 in the low bits of the mantissa, rounded by the addition itself.
    return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
  }
  unsigned odd = magnitude >> 13 & 1;
  return sign | (magnitude - 0x38000000 + 0xfff + odd) >> 13;
}

inline float bfloat16_to_float(unsigned short b) { return float_of((unsigned)b << 16); }

inline unsigned short float_to_bfloat16(float f) {
  unsigned bits = bits_of(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// To float rounded to odd, so that rounding the result once more rounds the double once.
inline float double_to_odd(double d) {
  float f = (float)d;
  if (d != d || (double)f == d) return f;
  unsigned bits = bits_of(f);
  if (fabs((double)f) > fabs(d)) --bits;
  return float_of(bits | 1);
}

}  // namespace gpunet_sim

#define GPUNET_SIM_HALF(Name, decode, encode)                                                  \
  struct Name {                                                                                \
    unsigned short bits;                                                                       \
    Name() = default;                                                                          \
    Name(float f) : bits(gpunet_sim::encode(f)) {}                                             \
    Name(double d) : bits(gpunet_sim::encode(gpunet_sim::double_to_odd(d))) {}                 \
    Name(int i) : Name((double)i) {}                                                           \
    Name(unsigned i) : Name((double)i) {}                                                      \
    Name(long i) : Name((double)i) {}                                                          \
    Name(unsigned long i) : Name((double)i) {}                                                 \
    Name(long long i) : Name((double)i) {}                                                     \
    Name(unsigned long long i) : Name((double)i) {}                                            \
    operator float() const { return gpunet_sim::decode(bits); }                                \
  };                                                                                           \
  inline Name operator+(Name a, Name b) { return Name((float)a + (float)b); }                  \
  inline Name operator-(Name a, Name b) { return Name((float)a - (float)b); }                  \
  inline Name operator*(Name a, Name b) { return Name((float)a * (float)b); }                  \
  inline Name operator/(Name a, Name b) { return Name((float)a / (float)b); }                  \
  inline Name operator-(Name a) { return Name(-(float)a); }                                    \
  inline Name& operator+=(Name& a, Name b) { return a = a + b; }                               \
  inline Name& operator-=(Name& a, Name b) { return a = a - b; }                               \
  inline Name& operator*=(Name& a, Name b) { return a = a * b; }                               \
  inline Name& operator/=(Name& a, Name b) { return a = a / b; }
GPUNET_SIM_HALF(__half, half_to_float, float_to_half)
GPUNET_SIM_HALF(__nv_bfloat16, bfloat16_to_float, float_to_bfloat16)

typedef __half half;
typedef __half float16;
typedef __nv_bfloat16 bfloat16;

inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline __half __double2half(double d) { return __half(d); }
inline float __bfloat162float(__nv_bfloat16 b) { return b; }
inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __double2bfloat16(double d) { return __nv_bfloat16(d); }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(unsigned short bits) {
  __half h;
  h.bits = bits;
  return h;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 b;
  b.bits = bits;
  return b;
}
