// A stable sort of whole numbers by digits of eight bits, the lowest first: counts of each digit in each part of the keys, their
// running totals, and a move of every key to its place. Deterministic: the atomics count in whole numbers.
#include "rows.cuh"

constexpr int kDigits = 256, kThreads = 256, kWarps = kThreads / 32, kPart = 2048;

__device__ inline int digit_of(uint32 key, int32 shift) { return (int)(key >> shift & (kDigits - 1)); }

// counts[digit][part]
extern "C" __global__ void sort_count(const uint32* keys, uint32* counts, int64 n, int64 parts, int32 shift) {
  __shared__ uint32 found[kDigits];
  for (int64 part = blockIdx.x; part < parts; part += gridDim.x) {
    found[threadIdx.x] = 0;
    __syncthreads();
    const int64 end = (part + 1) * kPart < n ? (part + 1) * kPart : n;
    for (int64 i = part * kPart + threadIdx.x; i < end; i += kThreads) atomicAdd(&found[digit_of(keys[i], shift)], 1u);
    __syncthreads();
    counts[threadIdx.x * parts + part] = found[threadIdx.x];
    __syncthreads();
  }
}

// Replaces numbers by the sum of those before them. One block.
extern "C" __global__ void sort_scan(uint32* counts, int64 count) {
  __shared__ uint32 totals[kThreads];
  const int64 each = (count + kThreads - 1) / kThreads, first = threadIdx.x * each;
  const int64 end = first + each < count ? first + each : count;
  uint32 total = 0;
  for (int64 i = first; i < end; ++i) total += counts[i];
  totals[threadIdx.x] = total;
  __syncthreads();
  uint32 before = 0;
  for (int t = 0; t < (int)threadIdx.x; ++t) before += totals[t];
  for (int64 i = first; i < end; ++i) {
    const uint32 own = counts[i];
    counts[i] = before;
    before += own;
  }
}

// `order` holds what moves along with the keys; without it, their positions do.
extern "C" __global__ void sort_move(const uint32* keys, const uint32* order, const uint32* counts, uint32* new_keys,
                                     uint32* new_order, int64 n, int64 parts, int32 shift) {
  __shared__ uint32 next[kDigits];
  __shared__ uint32 found[kWarps][kDigits];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64 part = blockIdx.x; part < parts; part += gridDim.x) {
    __syncthreads();
    next[threadIdx.x] = counts[threadIdx.x * parts + part];
    const int64 end = (part + 1) * kPart < n ? (part + 1) * kPart : n;
    for (int64 start = part * kPart; start < end; start += kThreads) {
      const int64 i = start + threadIdx.x;
      for (int w = 0; w < kWarps; ++w) found[w][threadIdx.x] = 0;
      __syncthreads();
      const uint32 key = i < end ? keys[i] : 0;
      const int digit = i < end ? digit_of(key, shift) : kDigits;
      const unsigned alike = __match_any_sync(0xffffffffu, digit);
      const int before = __popc(alike & ((1u << lane) - 1));
      if (before == 0 && i < end) found[warp][digit] = (uint32)__popc(alike);
      __syncthreads();
      if (i < end) {
        uint32 place = next[digit] + (uint32)before;
        for (int w = 0; w < warp; ++w) place += found[w][digit];
        new_keys[place] = key;
        new_order[place] = order == nullptr ? (uint32)i : order[i];
      }
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) next[threadIdx.x] += found[w][threadIdx.x];
      __syncthreads();
    }
  }
}

// The keys of indices; one that is out of range gets the key behind all others.
#define ROW_KEYS(S, I)                                                                                                 \
  extern "C" __global__ void row_keys_##S(const I* indices, uint32* keys, uint64* errors, uint64 code, int64 count,   \
                                          int64 picked, int64 outer_step, int64 size, int64 rows, int32 wrap) {       \
    const Picked<I> p = {indices, picked, outer_step, size, wrap};                                                    \
    GPUNET_LOOP(i, count) {                                                                                           \
      const int64 row = p.row(i, errors, code);                                                                       \
      keys[i] = (uint32)(row < 0 ? rows : row);                                                                       \
    }                                                                                                                 \
  }
ROW_KEYS(i32, int32)
ROW_KEYS(i64, int64)
