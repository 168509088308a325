// Comparisons and logic. A bool is a uint8 of 0 or 1 here.
#include "broadcast.cuh"

// How two numbers compare, as a bit: less, equal, greater, or none of these because one is no number. An operator is the set
// of bits for which it holds.
struct Compare {
  int holds;
  template <typename C>
  __device__ uint8 operator()(C a, C b) const {
    return (holds & (a < b ? 1 : a == b ? 2 : a > b ? 4 : 8)) != 0;
  }
};

// Bit 2 a + b of the truth table.
struct Logic {
  int table;
  __device__ uint8 operator()(uint8 a, uint8 b) const { return table >> (2 * a + b) & 1; }
};

struct Not {
  __device__ uint8 operator()(uint8 x) const { return x == 0; }
};

#define COMPARE(S, T)                                                                                                   \
  extern "C" __global__ void compare_fwd_##S(const T* a, const T* b, uint8* c, int64 n, int32 holds) {                 \
    map2(a, b, c, n, Compare{holds});                                                                                   \
  }                                                                                                                     \
  extern "C" __global__ void compare_along_##S(const T* a, const T* b, uint8* c, GPUNET_ALONG_PARAMETERS, int32 holds) { \
    map_along(a, b, c, GPUNET_ALONG, Compare{holds});                                                                   \
  }                                                                                                                     \
  extern "C" __global__ void compare_strided_##S(const T* a, const T* b, uint8* c, GPUNET_STRIDED_PARAMETERS,           \
                                                 int32 holds) {                                                         \
    map_strided(a, b, c, GPUNET_STRIDED, Compare{holds});                                                               \
  }
GPUNET_NUMBERS(COMPARE)

extern "C" __global__ void logic_fwd(const uint8* a, const uint8* b, uint8* c, int64 n, int32 table) {
  map2(a, b, c, n, Logic{table});
}
extern "C" __global__ void logic_along(const uint8* a, const uint8* b, uint8* c, GPUNET_ALONG_PARAMETERS, int32 table) {
  map_along(a, b, c, GPUNET_ALONG, Logic{table});
}
extern "C" __global__ void logic_strided(const uint8* a, const uint8* b, uint8* c, GPUNET_STRIDED_PARAMETERS,
                                         int32 table) {
  map_strided(a, b, c, GPUNET_STRIDED, Logic{table});
}
extern "C" __global__ void not_fwd(const uint8* x, uint8* y, int64 n) { map(x, y, n, Not()); }
