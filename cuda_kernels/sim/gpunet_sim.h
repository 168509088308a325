// CUDA's device language for a host compiler: included by include/gpunet.cuh in place of CUDA's own headers.
//
// Offers what NVRTC offers of: thread indices, shared memory, barriers, warp shuffles and votes, atomics, half types, vector
// types, intrinsics. Not offered: textures, cooperative groups, asynchronous copies, tensor cores, inline PTX.
#pragma once

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime.h"

typedef signed char int8;
typedef unsigned char uint8;
typedef short int16;
typedef unsigned short uint16;
typedef int int32;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;

// Kernels are hidden symbols, so that they are inlined into the loop over threads; launchers are exported.
#define __global__
#define __device__
#define __host__
#define __constant__ static
// Declarations of the usual forms are rewritten before the compiler sees them (toolchain.py); this is for the others.
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (gpunet_sim_state.thread)
#define blockIdx (gpunet_sim_state.block)
#define blockDim (gpunet_sim_state.block_dim)
#define gridDim (gpunet_sim_state.grid_dim)
#define warpSize 32

#define GPUNET_SIM_SHARED(type, name, dims)                                                         \
  typedef type gpunet_sim_type_##name dims;                                                         \
  static gpunet_sim::Shared<gpunet_sim_type_##name> gpunet_sim_shared_##name = {                    \
      {#name, sizeof(gpunet_sim_type_##name), 0, nullptr}};                                         \
  gpunet_sim_type_##name& name = gpunet_sim_shared_##name.enter()
#define GPUNET_SIM_DYNAMIC_SHARED(type, name) type* name = (type*)gpunet_sim_state.dynamic_shared

#define __syncthreads() ((void)gpunet_sim_barrier(gpunet_sim::kNone, 0, __FILE__, __LINE__))
#define __syncthreads_count(p) gpunet_sim_barrier(gpunet_sim::kCount, !!(p), __FILE__, __LINE__)
#define __syncthreads_and(p) gpunet_sim_barrier(gpunet_sim::kAnd, !!(p), __FILE__, __LINE__)
#define __syncthreads_or(p) gpunet_sim_barrier(gpunet_sim::kOr, !!(p), __FILE__, __LINE__)
// Threads of all blocks run in one thread of the host: memory is always in order.
#define __threadfence() __asm__ volatile("" ::: "memory")
#define __threadfence_block() __asm__ volatile("" ::: "memory")
#define __threadfence_system() __asm__ volatile("" ::: "memory")
#define __trap() gpunet_sim_trap("trap", __FILE__, __LINE__)
#undef assert
#define assert(condition) \
  ((condition) ? (void)0 : gpunet_sim_trap("assertion failed: " #condition, __FILE__, __LINE__))

#include "half.h"
#include "intrinsics.h"
#include "vectors.h"

#include "half_math.h"

namespace gpunet_sim {

template <typename T>
inline T shuffle(unsigned mask, T value, int source, const char* file, int line) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "shuffles move values of 2, 4 or 8 bytes");
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = gpunet_sim_warp(kShuffle, mask, bits, source, file, line);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

inline int lane() { return gpunet_sim_state.thread.linear & 31; }

// Lane that a lane reads from, within its segment of `width` lanes; its own where the segment ends.
inline int shuffle_index(int source, int width) { return (lane() & ~(width - 1)) | (source & (width - 1)); }
inline int shuffle_up(unsigned delta, int width) {
  return (lane() & (width - 1)) < (int)delta ? lane() : lane() - (int)delta;
}
inline int shuffle_down(unsigned delta, int width) {
  return (lane() & (width - 1)) + (int)delta >= width ? lane() : lane() + (int)delta;
}
inline int shuffle_xor(int bits, int width) {
  int source = lane() ^ bits;
  return (source & ~(width - 1)) > (lane() & ~(width - 1)) ? lane() : source;
}

inline int width_of(int width = 32) { return width; }

}  // namespace gpunet_sim

#define __shfl_sync(mask, value, source, ...)                                                                     \
  gpunet_sim::shuffle(mask, value, gpunet_sim::shuffle_index(source, gpunet_sim::width_of(__VA_ARGS__)), __FILE__, \
                      __LINE__)
#define __shfl_up_sync(mask, value, delta, ...)                                                                 \
  gpunet_sim::shuffle(mask, value, gpunet_sim::shuffle_up(delta, gpunet_sim::width_of(__VA_ARGS__)), __FILE__, \
                      __LINE__)
#define __shfl_down_sync(mask, value, delta, ...)                                                                 \
  gpunet_sim::shuffle(mask, value, gpunet_sim::shuffle_down(delta, gpunet_sim::width_of(__VA_ARGS__)), __FILE__, \
                      __LINE__)
#define __shfl_xor_sync(mask, value, bits, ...)                                                                 \
  gpunet_sim::shuffle(mask, value, gpunet_sim::shuffle_xor(bits, gpunet_sim::width_of(__VA_ARGS__)), __FILE__, \
                      __LINE__)
#define __ballot_sync(mask, p) \
  ((unsigned)gpunet_sim_warp(gpunet_sim::kBallot, mask, !!(p), 0, __FILE__, __LINE__))
#define __all_sync(mask, p) ((int)gpunet_sim_warp(gpunet_sim::kAll, mask, !!(p), 0, __FILE__, __LINE__))
#define __any_sync(mask, p) ((int)gpunet_sim_warp(gpunet_sim::kAny, mask, !!(p), 0, __FILE__, __LINE__))
#define __match_any_sync(mask, value)                                                                         \
  ((unsigned)gpunet_sim_warp(gpunet_sim::kMatch, mask, (unsigned long long)(value), 0, __FILE__, __LINE__))
#define __syncwarp(...) \
  ((void)gpunet_sim_warp(gpunet_sim::kSync, gpunet_sim::mask_of(__VA_ARGS__), 0, 0, __FILE__, __LINE__))
#define __activemask() gpunet_sim_active_mask()

namespace gpunet_sim {
inline unsigned mask_of(unsigned mask = 0xffffffffu) { return mask; }
}  // namespace gpunet_sim

// Atomics: threads run one at a time, so plain reads and writes do. Only for the types that CUDA has them for. The compiler must
// not take one out of a loop.
#define GPUNET_SIM_ATOMIC(name, type, expression) \
  inline type name(type* address, type value) {   \
    __asm__ volatile("" ::: "memory");            \
    type old = *address;                          \
    *address = (type)(expression);                \
    return old;                                   \
  }
GPUNET_SIM_ATOMIC(atomicAdd, int, (unsigned)old + (unsigned)value)
GPUNET_SIM_ATOMIC(atomicAdd, unsigned, old + value)
GPUNET_SIM_ATOMIC(atomicAdd, unsigned long long, old + value)
GPUNET_SIM_ATOMIC(atomicAdd, float, old + value)
GPUNET_SIM_ATOMIC(atomicAdd, double, old + value)
GPUNET_SIM_ATOMIC(atomicAdd, float16, __half2float(old) + __half2float(value))
GPUNET_SIM_ATOMIC(atomicAdd, bfloat16, __bfloat162float(old) + __bfloat162float(value))
GPUNET_SIM_ATOMIC(atomicSub, int, (unsigned)old - (unsigned)value)
GPUNET_SIM_ATOMIC(atomicSub, unsigned, old - value)
#define GPUNET_SIM_ATOMICS(type)                                   \
  GPUNET_SIM_ATOMIC(atomicMax, type, old > value ? old : value)    \
  GPUNET_SIM_ATOMIC(atomicMin, type, old < value ? old : value)    \
  GPUNET_SIM_ATOMIC(atomicAnd, type, old & value)                  \
  GPUNET_SIM_ATOMIC(atomicOr, type, old | value)                   \
  GPUNET_SIM_ATOMIC(atomicXor, type, old ^ value)                  \
  GPUNET_SIM_ATOMIC(atomicExch, type, value)
GPUNET_SIM_ATOMICS(int)
GPUNET_SIM_ATOMICS(unsigned)
GPUNET_SIM_ATOMICS(unsigned long long)
GPUNET_SIM_ATOMIC(atomicMax, long long, old > value ? old : value)
GPUNET_SIM_ATOMIC(atomicMin, long long, old < value ? old : value)
GPUNET_SIM_ATOMIC(atomicExch, float, value)
GPUNET_SIM_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
GPUNET_SIM_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
#define GPUNET_SIM_CAS(type)                                            \
  inline type atomicCAS(type* address, type compare, type value) {      \
    __asm__ volatile("" ::: "memory");                                  \
    type old = *address;                                                \
    if (old == compare) *address = value;                               \
    return old;                                                         \
  }
GPUNET_SIM_CAS(int)
GPUNET_SIM_CAS(unsigned)
GPUNET_SIM_CAS(unsigned long long)
GPUNET_SIM_CAS(unsigned short)
