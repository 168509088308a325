// Sums in an order that depends on shapes only, so that results are the same from run to run and from device to device.
#pragma once

#include "vector.cuh"

// The type to sum in. Whole numbers wrap around as in their own type.
template <typename T>
struct Total {
  typedef int64 type;
};
template <>
struct Total<float> {
  typedef float type;
};
template <>
struct Total<float16> {
  typedef float type;
};
template <>
struct Total<bfloat16> {
  typedef float type;
};
template <>
struct Total<double> {
  typedef double type;
};

// Sums f(0) + ... + f(n-1) over the grid. One block writes finish(total) to y; more leave their totals in `partial`.
template <typename T, typename A, typename F, typename G>
__device__ inline void sum_grid(int64 n, T* y, A* partial, F f, G finish) {
  __shared__ A scratch[32];
  A total = 0;
  GPUNET_LOOP(i, n) total += f(i);
  total = block_reduce(total, scratch, (A)0, Sum());
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1)
    store(y, 0, finish(total));
  else
    partial[blockIdx.x] = total;
}

// The rest of the work: y = finish(sum of the partial totals), by one block.
template <typename T, typename A, typename G>
__device__ inline void sum_partial(const A* partial, int64 count, T* y, G finish) {
  __shared__ A scratch[32];
  A total = 0;
  for (int64 i = threadIdx.x; i < count; i += blockDim.x) total += partial[i];
  total = block_reduce(total, scratch, (A)0, Sum());
  if (threadIdx.x == 0) store(y, 0, finish(total));
}

// A sum to a shape: `kept` results of `reduced` elements each, at strides (in elements) of up to three dimensions; cut into
// `slices` of neighbouring elements, whose totals go to partial[slice][kept] where there is more than one.
struct SumShape {
  int64 kept, reduced, slices;
  int64 kept_size[3], kept_stride[3], reduced_size[3], reduced_stride[3];
};

template <typename I>
__device__ inline int64 strided_offset(I rest, const int64* size, const int64* stride) {
  const I i2 = rest % (I)size[2];
  rest /= (I)size[2];
  const I i1 = rest % (I)size[1];
  rest /= (I)size[1];
  return rest * stride[0] + i1 * stride[1] + i2 * stride[2];
}

// -total where asked for, in the type of the result: whole numbers without a sign wrap around.
template <typename A>
__device__ inline A signed_total(A total, int negate) {
  return negate ? -total : total;
}

template <typename A, typename I, typename T, typename R>
__device__ inline void loop_sum_strided(const T* x, R* y, uint8* partial, const SumShape& s, int negate) {
  __shared__ A scratch[32];
  const int64 length = (s.reduced + s.slices - 1) / s.slices;
  for (int64 task = blockIdx.x; task < s.kept * s.slices; task += gridDim.x) {
    const int64 slice = task / s.kept, k = task - slice * s.kept;
    const T* from = x + strided_offset<I>((I)k, s.kept_size, s.kept_stride);
    const int64 end = (slice + 1) * length < s.reduced ? (slice + 1) * length : s.reduced;
    A total = 0;
    for (int64 r = slice * length + threadIdx.x; r < end; r += blockDim.x)
      total += load(from, strided_offset<I>((I)r, s.reduced_size, s.reduced_stride));
    total = block_reduce(total, scratch, (A)0, Sum());
    if (threadIdx.x != 0) continue;
    if (s.slices == 1)
      store(y, k, signed_total(total, negate));
    else
      ((A*)partial)[task] = total;
  }
}

// A block for each result and slice. Here and below, sums are of type A.
template <typename T, typename R, typename A>
__device__ inline void sum_strided(const T* x, R* y, uint8* partial, const SumShape& s, int negate) {
  if (s.kept * s.reduced <= GPUNET_NARROW)
    loop_sum_strided<A, uint32>(x, y, partial, s, negate);
  else
    loop_sum_strided<A, int64>(x, y, partial, s, negate);
}

// Sums the columns of a matrix of `rows` rows: a block for 32 columns and a slice of the rows, a warp for every eighth row.
template <typename T, typename R, typename A>
__device__ inline void sum_columns(const T* x, R* y, uint8* partial, int64 rows, int64 columns, int64 slices, int negate) {
  __shared__ A parts[32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64 tiles = (columns + 31) / 32, length = (rows + slices - 1) / slices;
  for (int64 task = blockIdx.x; task < tiles * slices; task += gridDim.x) {
    const int64 slice = task / tiles, column = (task - slice * tiles) * 32 + lane;
    const int64 end = (slice + 1) * length < rows ? (slice + 1) * length : rows;
    A total = 0;
    if (column < columns)
      for (int64 r = slice * length + warp; r < end; r += warps) total += load(x, r * columns + column);
    parts[warp][lane] = total;
    __syncthreads();
    if (warp == 0 && column < columns) {
      for (int w = 1; w < warps; ++w) total += parts[w][lane];
      if (slices == 1)
        store(y, column, signed_total(total, negate));
      else
        ((A*)partial)[slice * columns + column] = total;
    }
    __syncthreads();
  }
}

// Sums the slices: a block for each result.
template <typename T, typename A>
__device__ inline void sum_slices(const uint8* partial, T* y, int64 kept, int64 slices, int negate) {
  __shared__ A scratch[32];
  for (int64 k = blockIdx.x; k < kept; k += gridDim.x) {
    A total = 0;
    for (int64 i = threadIdx.x; i < slices; i += blockDim.x) total += ((const A*)partial)[i * kept + k];
    total = block_reduce(total, scratch, (A)0, Sum());
    if (threadIdx.x == 0) store(y, k, signed_total(total, negate));
  }
}
