// Fills. Values that are the same for all types travel as bit patterns.
#include "philox.cuh"
#include "vector.cuh"

template <typename T>
__device__ void fill(T* y, int64 n, T value) {
  constexpr int N = 16 / sizeof(T);
  const int64 packs = aligned<N>(y) ? n / N : 0;
  Pack<T, N> pack;
  for (int k = 0; k < N; ++k) pack.v[k] = value;
  GPUNET_LOOP(i, packs) store_pack<N>(y, i, pack);
  GPUNET_LOOP(j, n - packs * N) y[packs * N + j] = value;
}

#define BITS(S, T)                                                                                             \
  extern "C" __global__ void constant_fwd_##S(T* y, int64 n, int64 bits) { fill<T>(y, n, (T)bits); }          \
  extern "C" __global__ void repeat_fwd_##S(const T* value, T* y, int64 n) { fill<T>(y, n, value[0]); }       \
  extern "C" __global__ void diagonal_fwd_##S(T* y, int64 n, int64 step, int64 bits) {                        \
    GPUNET_LOOP(i, n) y[i] = i % step == 0 ? (T)bits : (T)0;                                                  \
  }
BITS(i8, int8)
BITS(i16, int16)
BITS(i32, int32)
BITS(i64, int64)

extern "C" __global__ void range_fwd(float* y, int64 n) { GPUNET_LOOP(i, n) y[i] = (float)i; }

// A thread draws a block of four words: four numbers, or two whole numbers of 64 bits each.
extern "C" __global__ void uniform_fwd_f32(float* y, int64 n, double low, double span, double last, uint64 seed,
                                           uint32 operator_id, const uint64* step) {
  const bool wide = aligned<4>(y);
  GPUNET_LOOP(b, (n + 3) / 4) {
    const Words words = philox(b, seed, operator_id, *step);
    Pack<float, 4> values;
    for (int k = 0; k < 4; ++k) values.v[k] = uniform_value(words.w[k], (float)low, (float)span, (float)last);
    if (wide && 4 * b + 4 <= n)
      store_pack<4>(y, b, values);
    else
      for (int k = 0; k < 4 && 4 * b + k < n; ++k) y[4 * b + k] = values.v[k];
  }
}
// Rounded to T before it is limited.
template <typename T>
__device__ void uniform_rounded(T* y, int64 n, float low, float span, float last, float largest, uint64 seed,
                                uint32 operator_id, uint64 step) {
  GPUNET_LOOP(b, (n + 3) / 4) {
    const Words words = philox(b, seed, operator_id, step);
    for (int k = 0; k < 4 && 4 * b + k < n; ++k) {
      T rounded;
      store(&rounded, 0, uniform_value(words.w[k], low, span, largest));
      store(y, 4 * b + k, load(&rounded, 0) < last ? load(&rounded, 0) : last);
    }
  }
}
#define UNIFORM_ROUNDED(S, T, LARGEST)                                                                              \
  extern "C" __global__ void uniform_fwd_##S(T* y, int64 n, double low, double span, double last, uint64 seed,     \
                                             uint32 operator_id, const uint64* step) {                             \
    uniform_rounded(y, n, (float)low, (float)span, (float)last, LARGEST, seed, operator_id, *step);                \
  }
UNIFORM_ROUNDED(f16, float16, 65504.0f)
GPUNET_IF_BFLOAT16(UNIFORM_ROUNDED(bf16, bfloat16, 0x1.fep127f))

// low + floor(v range / 2^64).
extern "C" __global__ void integers_fwd(int32* y, int64 n, int64 low, uint64 range, uint64 seed, uint32 operator_id,
                                        const uint64* step) {
  GPUNET_LOOP(b, (n + 1) / 2) {
    const Words words = philox(b, seed, operator_id, *step);
    for (int k = 0; k < 2 && 2 * b + k < n; ++k)
      y[2 * b + k] = (int32)((uint64)low + __umul64hi(words.pair(k), range));
  }
}

// Computed in double and rounded once.
extern "C" __global__ void normal_fwd(float* y, int64 n, double mean, double std, uint64 seed, uint32 operator_id,
                                      const uint64* step) {
  GPUNET_LOOP(b, (n + 3) / 4) {
    const Words words = philox(b, seed, operator_id, *step);
    for (int p = 0; p < 2; ++p) {
      double first, second;
      box_muller((words.w[2 * p] + 1.0) * 0x1p-32, words.w[2 * p + 1] * 0x1p-32, mean, std, &first, &second);
      const int64 i = 4 * b + 2 * p;
      if (i < n) y[i] = (float)first;
      if (i + 1 < n) y[i + 1] = (float)second;
    }
  }
}
