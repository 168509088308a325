// Convolutions as products of matrices whose elements are gathered from the images as they are needed.
//
// For each group, result[row, column] = sum over depth of left[row, depth] * right[depth, column]:
//
//            row             column           depth             left     right
//   forward  filter          window           element           W        X
//   data     channel         pixel            filter and tap    W        dY
//   filter   filter          element          window            dY       X
//
// where an element is a channel and a tap (a position inside of the window), in the order of W: taps innermost with channels
// first, channels innermost with channels last.
#pragma once

#include "window.cuh"

#define GPUNET_CONVOLUTION_PARAMETERS \
  int64 batch, int32 channels, int32 filters, int32 groups, int32 channels_last, GPUNET_WINDOW_PARAMETERS
#define GPUNET_CONVOLUTION \
  Convolution { batch, channels / groups, filters / groups, groups, channels_last, GPUNET_WINDOW }

// Channels and filters are those of a group.
struct Convolution {
  int64 batch;
  int32 channels, filters, groups, channels_last;
  Window window;

  __device__ int32 elements() const { return channels * window.taps(); }
  __device__ int64 windows() const { return batch * window.positions(); }

  // Offset of a channel of a group in an image of `space` pixels of `count` channels a group, and of its pixel.
  __device__ int64 offset(int64 image, int32 group, int32 channel, int32 pixel, int32 space, int32 count) const {
    const int64 all = (int64)count * groups, c = (int64)group * count + channel;
    return channels_last ? (image * space + pixel) * all + c : (image * all + c) * space + pixel;
  }
  __device__ int64 x_offset(int64 image, int32 group, int32 channel, int32 pixel) const {
    return offset(image, group, channel, pixel, window.pixels(), channels);
  }
  __device__ int64 y_offset(int64 image, int32 group, int32 filter, int32 position) const {
    return offset(image, group, filter, position, window.positions(), filters);
  }
};

struct Element {
  int32 channel;
  Place tap;
};

__device__ inline Element element_of(const Convolution& c, int32 index) {
  const int32 taps = c.window.taps();
  if (c.channels_last) return Element{index % c.channels, place_of(index / c.channels, c.window.kernel)};
  return Element{index / taps, place_of(index % taps, c.window.kernel)};
}

// A window, or a pixel, of an image.
struct Spot {
  int64 image;
  int32 index;
  Place place;
};

__device__ inline Spot spot_of(int64 index, int32 space, const int32* size) {
  const int64 image = index / space;
  const int32 rest = (int32)(index - image * space);
  return Spot{image, rest, place_of(rest, size)};
}

// Offset of what a tap of a window reads; -1 in the padding.
__device__ inline int64 pixel_offset(const Convolution& c, int32 group, const Element& e, const Spot& window) {
  const Window& w = c.window;
  Place pixel;
  for (int d = 0; d < 3; ++d) {
    pixel.at[d] = window.place.at[d] * w.stride[d] - w.head[d] + e.tap.at[d] * w.dilation[d];
    if (pixel.at[d] < 0 || pixel.at[d] >= w.image[d]) return -1;
  }
  return c.x_offset(window.image, group, e.channel, index_of(pixel, w.image));
}

constexpr int kThreads = 256, kDepth = 16, kColumns = 64;

// The tiles of all results, a block for one after the other. A thread adds up every 16th row and column of a tile.
template <int ROWS, typename P>
__device__ inline void multiply(const P& p, int64 slices) {
  typedef typename P::A A;
  constexpr int kRows = ROWS / 16, kCols = kColumns / 16;
  __shared__ A left[kDepth][ROWS + 1];
  __shared__ A right[kDepth][kColumns + 1];
  const int t = threadIdx.x, x = t % 16, y = t / 16;
  const int64 rows = p.rows(), columns = p.columns(), depth = p.depth();
  const int64 row_tiles = (rows + ROWS - 1) / ROWS, column_tiles = (columns + kColumns - 1) / kColumns;
  const int64 slice_depth = (depth + slices - 1) / slices, tasks = row_tiles * column_tiles * p.c.groups * slices;
  for (int64 task = blockIdx.x; task < tasks; task += gridDim.x) {
    int64 rest = task;
    const int64 first_row = rest % row_tiles * ROWS;
    rest /= row_tiles;
    const int64 first_column = rest % column_tiles * kColumns;
    rest /= column_tiles;
    const int32 group = (int32)(rest % p.c.groups);
    const int64 slice = rest / p.c.groups;
    const int64 first = slice * slice_depth, last = first + slice_depth < depth ? first + slice_depth : depth;

    typename P::Column mine[kCols], loaded;
    for (int j = 0; j < kCols; ++j) {
      const int64 n = first_column + (P::kNeighbours ? y : x) + 16 * j;
      if (n < columns) mine[j] = p.column_at(n);
    }
    const int64 loaded_column = first_column + t % kColumns;
    if (!P::kNeighbours && loaded_column < columns) loaded = p.column_at(loaded_column);

    A total[kRows][kCols];
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kCols; ++j) total[i][j] = 0;
    for (int64 start = first; start < last; start += kDepth) {
      const int64 k = start + x;
      typename P::Depth d;
      if (k < last) d = p.depth_at(k);
      for (int i = 0; i < kRows; ++i) {
        const int64 m = first_row + y + 16 * i;
        left[x][y + 16 * i] = k < last && m < rows ? p.left(group, (int32)m, k, d) : (A)0;
      }
      if (P::kNeighbours) {
        for (int j = 0; j < kCols; ++j)
          right[x][y + 16 * j] = k < last && first_column + y + 16 * j < columns ? p.right(group, d, mine[j]) : (A)0;
      } else {
        for (int j = t / kColumns; j < kDepth; j += kThreads / kColumns) {
          A value = 0;
          if (start + j < last && loaded_column < columns) value = p.right(group, p.depth_at(start + j), loaded);
          right[j][t % kColumns] = value;
        }
      }
      __syncthreads();
      for (int s = 0; s < kDepth; ++s)
        for (int i = 0; i < kRows; ++i)
          for (int j = 0; j < kCols; ++j) total[i][j] += left[s][y + 16 * i] * right[s][x + 16 * j];
      __syncthreads();
    }
    for (int j = 0; j < kCols; ++j) {
      const int64 n = first_column + x + 16 * j;
      if (n >= columns) continue;
      const typename P::Column column = P::kNeighbours ? p.column_at(n) : mine[j];
      for (int i = 0; i < kRows; ++i) {
        const int64 m = first_row + y + 16 * i;
        if (m < rows) p.put(group, (int32)m, n, column, slice, total[i][j]);
      }
    }
  }
}

// A thread for each result, where a tile would be nearly empty: depthwise convolutions above all. Neighbouring threads have
// neighbouring places in memory.
template <typename P>
__device__ inline void multiply_single(const P& p) {
  const int64 rows = p.rows(), columns = p.columns(), depth = p.depth(), groups = p.c.groups;
  GPUNET_LOOP(i, groups * rows * columns) {
    const int64 outer = p.c.channels_last ? i / (groups * rows) : i / columns, inner = p.c.channels_last ? groups * rows : columns;
    const int64 rest = i - outer * inner, n = p.c.channels_last ? outer : rest, row = p.c.channels_last ? rest : outer;
    const int32 group = (int32)(row / rows), m = (int32)(row - group * rows);
    const typename P::Column column = p.column_at(n);
    typename P::A total = 0;
    for (int64 k = 0; k < depth; ++k) {
      const typename P::Depth d = p.depth_at(k);
      total += p.left(group, m, k, d) * p.right(group, d, column);
    }
    p.put(group, m, n, column, 0, total);
  }
}

template <typename P>
__device__ inline void multiply_tiles(const P& p, int64 slices) {
  if (p.rows() <= 4 && !P::kNeighbours)
    multiply_single(p);
  else if (p.rows() <= 16)
    multiply<16>(p, slices);
  else
    multiply<64>(p, slices);
}
