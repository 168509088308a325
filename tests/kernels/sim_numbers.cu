// Half types and arithmetic, for the tests of the simulated device.
#include "gpunet.cuh"

extern "C" __global__ void half_to_float(const float16* x, float* y, int64 n) {
  GPUNET_LOOP(i, n) y[i] = __half2float(x[i]);
}
extern "C" __global__ void float_to_half(const float* x, float16* y, int64 n) {
  GPUNET_LOOP(i, n) y[i] = __float2half(x[i]);
}
extern "C" __global__ void double_to_half(const double* x, float16* y, int64 n) {
  GPUNET_LOOP(i, n) y[i] = (float16)x[i];
}
extern "C" __global__ void half_sums(const float16* x, const float16* y, float16* z, int64 n) {
  GPUNET_LOOP(i, n) {
    z[4 * i] = x[i] + y[i];
    z[4 * i + 1] = x[i] - y[i];
    z[4 * i + 2] = x[i] * y[i];
    z[4 * i + 3] = x[i] / y[i];
  }
}
extern "C" __global__ void float_to_bfloat16(const float* x, uint16* y, float* back, int64 n) {
  GPUNET_LOOP(i, n) {
    bfloat16 b = __float2bfloat16(x[i]);
    y[i] = __bfloat16_as_ushort(b);
    back[i] = __bfloat162float(b);
  }
}
// No contraction: a * b is rounded before c is added.
extern "C" __global__ void multiply_add(const float* x, float* y, int64 n) {
  GPUNET_LOOP(i, n) {
    y[2 * i] = x[i] * x[i] + -x[i];
    y[2 * i + 1] = fmaf(x[i], x[i], -x[i]);
  }
}
extern "C" __global__ void intrinsics(const float* x, float* y) {
  float4 v = *reinterpret_cast<const float4*>(x);
  y[0] = rsqrtf(v.x);
  y[1] = __expf(v.y);
  y[2] = __logf(v.z);
  y[3] = __fdividef(v.w, v.x);
  y[4] = __int_as_float(__float_as_int(v.x) + 1);
  y[5] = max(v.x, __int_as_float(0x7fc00000));
  y[6] = (float)__float2int_rn(v.w);
  y[7] = (float)__umulhi(0x80000000u, 6u);
  y[8] = __ldg(x);
  y[9] = (float)__popc(0xf0f0u) + (float)__clz(1) / 64;
}
template <typename H>
__device__ void half_numbers(H a, H b, H c, float* y) {
  y[0] = __hadd(a, b);
  y[1] = __hsub(a, b);
  y[2] = __hmul(a, b);
  y[3] = __hdiv(a, b);
  y[4] = __hfma(a, b, c);
  y[5] = __hneg(__habs(c));
  y[6] = __hmax(a, c);
  y[7] = __hmin(a, c);
  y[8] = __hlt(a, b) + 2 * __hge(a, b) + 4 * __heq(a, a) + 8 * __hisnan(a);
  y[9] = hsqrt(a);
  y[10] = hexp(b);
  y[11] = hlog(a);
  y[12] = hrint(c);
}
extern "C" __global__ void half_intrinsics(const float* x, float* y) {
  half_numbers(__float2half(x[0]), __float2half(x[1]), __float2half(x[2]), y);
  half_numbers(__float2bfloat16(x[0]), __float2bfloat16(x[1]), __float2bfloat16(x[2]), y + 13);
  const __half2 a = __floats2half2_rn(x[0], x[1]), b = __half2half2(__float2half(x[2]));
  const float2 pair = __half22float2(__hfma2(a, b, __hmul2(a, a)) + b);
  y[26] = pair.x;
  y[27] = pair.y;
  const __nv_bfloat162 c = __floats2bfloat162_rn(x[0], x[1]);
  y[28] = __low2float(__hadd2(c, c));
  y[29] = __high2float(__hadd2(c, c));
}
