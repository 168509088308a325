// Many tensors in one launch, found through tables in device memory (multi_tensor.py).
//
// Tensors are cut into chunks; chunk c is `lengths[c]` elements from `starts[c]` on of tensor `tensors[c]`.
#include "sums.cuh"

struct Chunks {
  const uint64* addresses;
  const int32* tensors;
  const int64 *starts, *lengths;

  template <typename T>
  __device__ T* data(int64 chunk) const {
    return (T*)addresses[tensors[chunk]] + starts[chunk];
  }
};

#define GPUNET_CHUNK_PARAMETERS \
  const uint64* addresses, const int32* tensors, const int64* starts, const int64* lengths, int64 chunks
#define GPUNET_CHUNKS \
  Chunks { addresses, tensors, starts, lengths }

// A block for each chunk.
#define GPUNET_CHUNK_LOOP(c) for (int64 c = blockIdx.x; c < chunks; c += gridDim.x)

// Calls f(element) for all of a chunk. Which of them a thread gets does not depend on whether 16 bytes can be read at once, so
// neither do sums.
template <typename T, typename F>
__device__ inline void each_of_chunk(const T* x, int64 n, F f) {
  constexpr int N = pack_size<T, T>();
  const bool wide = aligned<N>(x);
  for (int64 i = threadIdx.x; i < n / N; i += blockDim.x) {
    if (wide) {
      const Pack<T, N> pack = load_pack<N>(x, i);
      for (int k = 0; k < N; ++k) f(load(pack.v, k));
    } else {
      for (int k = 0; k < N; ++k) f(load(x, i * N + k));
    }
  }
  for (int64 i = n / N * N + threadIdx.x; i < n; i += blockDim.x) f(load(x, i));
}

template <typename T, typename A>
__device__ inline void put(T* y, int64 i, A value) {
  store(y, i, (typename Accumulate<T>::type)value);
}
// Rounded once.
__device__ inline void put(float16* y, int64 i, double value) { y[i] = __double2half(value); }

// y[i] = f(x[i]) by the threads of a block. y may be x.
template <typename T, typename R, typename F>
__device__ inline void map_chunk(const T* x, R* y, int64 n, F f) {
  constexpr int N = pack_size<T, R>();
  const int64 packs = aligned<N>(x) && aligned<N>(y) ? n / N : 0;
  for (int64 i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack<T, N> from = load_pack<N>(x, i);
    Pack<R, N> to;
    for (int k = 0; k < N; ++k) put(to.v, k, f(load(from.v, k)));
    store_pack<N>(y, i, to);
  }
  for (int64 i = packs * N + threadIdx.x; i < n; i += blockDim.x) put(y, i, f(load(x, i)));
}

template <typename T>
__device__ inline void square_chunks(const Chunks& table, int64 chunks, double* partial) {
  typedef typename Accumulate<T>::type A;
  __shared__ A scratch[32];
  GPUNET_CHUNK_LOOP(c) {
    A total = 0;
    each_of_chunk(table.data<const T>(c), table.lengths[c], [&](A value) { total += value * value; });
    total = block_reduce(total, scratch, (A)0, Sum());
    if (threadIdx.x == 0) partial[c] = (double)total;
  }
}

// The sums of the chunks firsts[t] .. firsts[t + 1] - 1: a block for each tensor.
template <typename R>
__device__ inline void sum_chunks(const double* partial, const int64* firsts, R* y, int64 count) {
  __shared__ double scratch[32];
  for (int64 t = blockIdx.x; t < count; t += gridDim.x) {
    double total = 0;
    for (int64 c = firsts[t] + threadIdx.x; c < firsts[t + 1]; c += blockDim.x) total += partial[c];
    total = block_reduce(total, scratch, 0.0, Sum());
    if (threadIdx.x == 0) y[t] = (R)total;
  }
}

template <typename T>
__device__ inline void scale_chunks(const Chunks& table, int64 chunks, const float* factor) {
  typedef typename Accumulate<T>::type A;
  const A by = (A)factor[0];
  GPUNET_CHUNK_LOOP(c) {
    T* x = table.data<T>(c);
    map_chunk(x, x, table.lengths[c], [=](A value) { return value * by; });
  }
}

// Whether any element is infinite or no number: such a difference with itself is not 0.
template <typename T>
__device__ inline void check_chunks(const Chunks& table, int64 chunks, int32* found) {
  typedef typename Accumulate<T>::type A;
  GPUNET_CHUNK_LOOP(c) {
    int bad = 0;
    each_of_chunk(table.data<const T>(c), table.lengths[c], [&](A value) { bad |= value - value != 0; });
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicMax(found, 1);
  }
}

// Divides by the scale of the loss; what is not finite clears the flag.
template <typename T>
__device__ inline void unscale_chunks(const Chunks& table, int64 chunks, const float* scale, int32* finite) {
  typedef typename Accumulate<T>::type A;
  const A divisor = (A)scale[0];
  GPUNET_CHUNK_LOOP(c) {
    T* x = table.data<T>(c);
    bool good = true;
    map_chunk(x, x, table.lengths[c], [&](A value) {
      value /= divisor;
      good = good && value - value == 0;
      return value;
    });
    // All threads that write at all write the same.
    if (!good) finite[0] = 0;
  }
}

// Chunk c lies at places[c] in the buffer.
template <typename T, typename R>
__device__ inline void pack_chunks(const Chunks& table, int64 chunks, const int64* places, const float* factor, R* buffer) {
  typedef typename Accumulate<T>::type A;
  const float by = factor == nullptr ? 1.0f : factor[0];
  GPUNET_CHUNK_LOOP(c) {
    // A factor of 0 makes zeros of infinite and NaN values too.
    map_chunk(table.data<const T>(c), buffer + places[c], table.lengths[c],
              [=](A value) { return factor == nullptr ? value : by == 0 ? (A)0 : value * by; });
  }
}

template <typename T, typename R>
__device__ inline void unpack_chunks(const Chunks& table, int64 chunks, const int64* places, const float* factor,
                                     const R* buffer) {
  typedef typename Accumulate<R>::type A;
  const float by = factor == nullptr ? 1.0f : factor[0];
  GPUNET_CHUNK_LOOP(c) {
    map_chunk(buffer + places[c], table.data<T>(c), table.lengths[c],
              [=](A value) { return factor == nullptr ? value : value * by; });
  }
}

extern "C" __global__ void multi_sum_f32(const double* partial, const int64* firsts, float* y, int64 count) {
  sum_chunks(partial, firsts, y, count);
}
extern "C" __global__ void multi_sum_f64(const double* partial, const int64* firsts, double* y, int64 count) {
  sum_chunks(partial, firsts, y, count);
}

#define PACK(S, T, RS, R)                                                                                            \
  extern "C" __global__ void multi_pack_##S##_##RS(GPUNET_CHUNK_PARAMETERS, const int64* places, const float* factor, \
                                                   R* buffer) {                                                     \
    pack_chunks<T>(GPUNET_CHUNKS, chunks, places, factor, buffer);                                                  \
  }                                                                                                                 \
  extern "C" __global__ void multi_unpack_##S##_##RS(GPUNET_CHUNK_PARAMETERS, const int64* places,                  \
                                                     const float* factor, const R* buffer) {                        \
    unpack_chunks<T>(GPUNET_CHUNKS, chunks, places, factor, buffer);                                                \
  }
#define MULTI(S, T)                                                                                                  \
  extern "C" __global__ void multi_square_##S(GPUNET_CHUNK_PARAMETERS, double* partial) {                           \
    square_chunks<T>(GPUNET_CHUNKS, chunks, partial);                                                               \
  }                                                                                                                 \
  extern "C" __global__ void multi_scale_##S(GPUNET_CHUNK_PARAMETERS, const float* factor) {                        \
    scale_chunks<T>(GPUNET_CHUNKS, chunks, factor);                                                                 \
  }                                                                                                                 \
  extern "C" __global__ void multi_unscale_##S(GPUNET_CHUNK_PARAMETERS, const float* scale, int32* finite) {        \
    unscale_chunks<T>(GPUNET_CHUNKS, chunks, scale, finite);                                                        \
  }                                                                                                                 \
  extern "C" __global__ void multi_check_##S(GPUNET_CHUNK_PARAMETERS, int32* found) {                               \
    check_chunks<T>(GPUNET_CHUNKS, chunks, found);                                                                  \
  }                                                                                                                 \
  PACK(S, T, f32, float) PACK(S, T, f16, float16) GPUNET_IF_BFLOAT16(PACK(S, T, bf16, bfloat16)) PACK(S, T, f64, double)
GPUNET_FLOATS(MULTI)
