// Philox 4x32-10 and what is drawn from it, bit for bit as gpunet/philox.py defines it.
#pragma once

#include "gpunet.cuh"

struct Words {
  uint32 w[4];
  // The 64-bit number of words 2i and 2i + 1.
  __device__ uint64 pair(int i) const { return (uint64)w[2 * i + 1] << 32 | w[2 * i]; }
};

// Block number `block` of the draw (seed, operator, step).
__device__ inline Words philox(uint64 block, uint64 seed, uint32 operator_id, uint64 step) {
  uint32 c0 = (uint32)block, c1 = (uint32)(block >> 32), c2 = operator_id, c3 = (uint32)step;
  uint32 k0 = (uint32)seed, k1 = (uint32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64 p0 = (uint64)0xD2511F53u * c0, p1 = (uint64)0xCD9E8D57u * c2;
    c0 = (uint32)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32)p1;
    c2 = (uint32)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

// low + span * (a number in [0, 1)), at most last; every operation is rounded, none is fused.
__device__ inline float uniform_value(uint32 word, float low, float span, float last) {
  const float value = __fadd_rn(__fmul_rn(__fmul_rn((float)(word >> 8), 0x1p-24f), span), low);
  return value < last ? value : last;
}

// The pair of normal numbers for u1 in (0, 1] and u2 in [0, 1).
__device__ inline void box_muller(double u1, double u2, double mean, double std, double* first, double* second) {
  const double radius = sqrt(__dmul_rn(-2.0, log(u1))), angle = __dmul_rn(u2, 6.283185307179586);
  *first = __dadd_rn(__dmul_rn(__dmul_rn(radius, cos(angle)), std), mean);
  *second = __dadd_rn(__dmul_rn(__dmul_rn(radius, sin(angle)), std), mean);
}
