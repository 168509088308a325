// Copies between strided places, transposes, and numbers known on the host.
#include "broadcast.cuh"

#define GPUNET_MOVED(M) M(u8, uint8) M(u16, uint16) M(i32, int32) M(i64, int64)

template <typename I, typename T>
__device__ inline void loop_copy_rows(const T* x, T* y, I n, I width, int64 x_step, int64 y_step) {
  GPUNET_LOOP(at, n) {
    const I row = (I)at / width, column = (I)at - row * width;
    y[(int64)row * y_step + column] = x[(int64)row * x_step + column];
  }
}

// Rows of `width` neighbours at any distance from each other.
template <typename T>
__device__ inline void copy_rows(const T* x, T* y, int64 n, int64 width, int64 x_step, int64 y_step) {
  if (n <= GPUNET_NARROW)
    loop_copy_rows<uint32>(x, y, n, width, x_step, y_step);
  else
    loop_copy_rows<int64>(x, y, n, width, x_step, y_step);
}

template <typename I, typename T>
__device__ inline void loop_copy_strided(const T* x, T* y, int64 n, const Strides& strides) {
  GPUNET_LOOP(at, n) {
    I rest = (I)at;
    int64 from = 0, to = 0;
    for (int d = 5; d > 0; --d) {
      const I size = (I)strides.size[d], next = rest / size, index = rest - next * size;
      from += index * strides.a[d];
      to += index * strides.b[d];
      rest = next;
    }
    y[to + rest * strides.b[0]] = x[from + rest * strides.a[0]];
  }
}

template <typename T>
__device__ inline void copy_strided(const T* x, T* y, int64 n, const Strides& strides) {
  if (n <= GPUNET_NARROW)
    loop_copy_strided<uint32>(x, y, n, strides);
  else
    loop_copy_strided<int64>(x, y, n, strides);
}

constexpr int kTile = 32;

// For each of a batch, y[column * y_step + row] = x[row * x_step + column]: by way of a tile in shared memory, so that both are
// read and written by neighbouring threads at neighbouring places.
template <typename T>
__device__ inline void transpose_tiles(const T* x, T* y, int64 batch, int64 rows, int64 columns, int64 x_batch, int64 x_step,
                                       int64 y_batch, int64 y_step) {
  __shared__ T tile[kTile][kTile + 1];
  const int lane = threadIdx.x % kTile, line = threadIdx.x / kTile, lines = blockDim.x / kTile;
  const int64 across = (columns + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
  for (int64 task = blockIdx.x; task < batch * across * down; task += gridDim.x) {
    const int64 image = task / (across * down), rest = task - image * across * down;
    const int64 row = rest / across * kTile, column = rest % across * kTile;
    const T* from = x + image * x_batch;
    T* to = y + image * y_batch;
    for (int i = line; i < kTile; i += lines)
      if (row + i < rows && column + lane < columns) tile[i][lane] = from[(row + i) * x_step + column + lane];
    __syncthreads();
    for (int i = line; i < kTile; i += lines)
      if (column + i < columns && row + lane < rows) to[(column + i) * y_step + row + lane] = tile[lane][i];
    __syncthreads();
  }
}

#define MOVES(S, T)                                                                                                    \
  extern "C" __global__ void copy_rows_##S(const T* x, T* y, int64 x_first, int64 y_first, int64 n, int64 width,      \
                                           int64 x_step, int64 y_step) {                                              \
    copy_rows(x + x_first, y + y_first, n, width, x_step, y_step);                                                    \
  }                                                                                                                   \
  extern "C" __global__ void copy_strided_##S(const T* x, T* y, int64 x_first, int64 y_first,                         \
                                              GPUNET_STRIDED_PARAMETERS) {                                            \
    copy_strided(x + x_first, y + y_first, GPUNET_STRIDED);                                                           \
  }                                                                                                                   \
  extern "C" __global__ void transpose_tiles_##S(const T* x, T* y, int64 x_first, int64 y_first, int64 batch,         \
                                                 int64 rows, int64 columns, int64 x_batch, int64 x_step,              \
                                                 int64 y_batch, int64 y_step) {                                       \
    transpose_tiles(x + x_first, y + y_first, batch, rows, columns, x_batch, x_step, y_batch, y_step);                \
  }
GPUNET_MOVED(MOVES)

// Up to eight numbers, for tensors of shapes and sizes.
template <typename T>
__device__ inline void put_numbers(T* y, int64 first, int64 count, const int64* values) {
  GPUNET_LOOP(i, count) y[first + i] = (T)values[i];
}

#define NUMBERS(S, T)                                                                                                  \
  extern "C" __global__ void put_numbers_##S(T* y, int64 first, int64 count, int64 v0, int64 v1, int64 v2, int64 v3,  \
                                             int64 v4, int64 v5, int64 v6, int64 v7) {                                \
    const int64 values[8] = {v0, v1, v2, v3, v4, v5, v6, v7};                                                         \
    put_numbers(y, first, count, values);                                                                             \
  }
NUMBERS(i32, int32)
NUMBERS(i64, int64)
