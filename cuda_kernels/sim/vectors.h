// CUDA's built-in vector types: float4, int2, ... with their alignment. Included by gpunet_sim.h.
#pragma once

#define GPUNET_SIM_VECTORS(name, type)                                                 \
  struct __attribute__((aligned(2 * sizeof(type)))) name##2 {                          \
    type x, y;                                                                         \
  };                                                                                   \
  struct name##3 {                                                                     \
    type x, y, z;                                                                      \
  };                                                                                   \
  struct __attribute__((aligned(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16))) name##4 { \
    type x, y, z, w;                                                                   \
  };                                                                                   \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                     \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }          \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
GPUNET_SIM_VECTORS(char, signed char)
GPUNET_SIM_VECTORS(uchar, unsigned char)
GPUNET_SIM_VECTORS(short, short)
GPUNET_SIM_VECTORS(ushort, unsigned short)
GPUNET_SIM_VECTORS(int, int)
GPUNET_SIM_VECTORS(uint, unsigned)
GPUNET_SIM_VECTORS(longlong, long long)
GPUNET_SIM_VECTORS(ulonglong, unsigned long long)
GPUNET_SIM_VECTORS(float, float)
GPUNET_SIM_VECTORS(double, double)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
