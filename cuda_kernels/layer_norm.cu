// Normalization of each example by itself: of rows of elements that share a mean, see gpunet/operators/layer_norm.py.
#include "columns.cuh"
#include "vector.cuh"

// Row r is group r % groups of example r / groups; its element j belongs to channel (of the group) and lies at:
struct Rows {
  int64 columns, groups, depth, inner;
  int32 last;

  // Rows lie one behind the other, and each element is a channel.
  __device__ bool plain() const { return groups == 1 && inner == 1; }
  __device__ int64 start(int64 row) const {
    return last ? row / groups * groups * columns + row % groups * depth : row * columns;
  }
  __device__ int64 at(int64 j) const { return last ? j / depth * groups * depth + j % depth : j; }
  __device__ int64 channel(int64 row, int64 j) const { return row % groups * depth + (last ? j % depth : j / inner); }
};

// Calls f(x[j]) for the elements of a row, by threads of a block; 16 bytes at once where they can be. Which elements a thread
// gets does not depend on where the row lies, so neither do sums.
template <typename T, typename F>
__device__ inline void each_of_row(const T* x, const Rows& rows, F f) {
  constexpr int N = pack_size<T, T>();
  if (!rows.plain() || rows.columns % N != 0) {
    for (int64 j = threadIdx.x; j < rows.columns; j += blockDim.x) f(load(x, rows.at(j)));
    return;
  }
  const bool wide = aligned<N>(x);
  for (int64 i = threadIdx.x; i < rows.columns / N; i += blockDim.x) {
    if (wide) {
      const Pack<T, N> pack = load_pack<N>(x, i);
      for (int k = 0; k < N; ++k) f(load(pack.v, k));
    } else {
      for (int k = 0; k < N; ++k) f(load(x, i * N + k));
    }
  }
}

// Y = (X - mean) / deviation * gamma + beta. Null pointers: Y and the statistics are not wanted, there are no gamma and beta.
// The statistics are of the type to compute in; `inverse` saves 1 / deviation.
template <typename T>
__device__ void layer_norm(const T* x, const T* gamma, const T* beta, T* y, uint8* means, uint8* deviations, int64 count,
                           const Rows& rows, double epsilon, int32 inverse) {
  typedef typename Accumulate<T>::type A;
  constexpr int N = pack_size<T, T>();
  __shared__ A parts[32];
  const bool whole = rows.plain() && rows.columns % N == 0 && y && aligned<N>(x) && aligned<N>(y) &&
                     (!gamma || (aligned<N>(gamma) && aligned<N>(beta)));
  const A size = (A)(rows.columns > 0 ? rows.columns : 1);
  for (int64 row = blockIdx.x; row < count; row += gridDim.x) {
    const T* from = x + rows.start(row);
    A sum = 0;
    each_of_row(from, rows, [&](A value) { sum += value; });
    A mean = block_reduce(sum, parts, (A)0, Sum()) / size;
    // About the mean; what that lacks to the true one is the mean of the distances.
    A distances = 0, squares = 0;
    each_of_row(from, rows, [&](A value) {
      const A distance = value - mean;
      distances += distance;
      squares += distance * distance;
    });
    const A lacking = block_reduce(distances, parts, (A)0, Sum()) / size;
    squares = block_reduce(squares, parts, (A)0, Sum()) / size - lacking * lacking;
    mean += lacking;
    const A deviation = (A)sqrt((double)(squares > 0 || squares != squares ? squares : (A)0) + epsilon), factor = (A)1 / deviation;
    if (threadIdx.x == 0 && means) {
      ((A*)means)[row] = mean;
      ((A*)deviations)[row] = inverse ? factor : deviation;
    }
    if (!y) continue;
    T* to = y + rows.start(row);
    if (whole) {
      for (int64 i = threadIdx.x; i < rows.columns / N; i += blockDim.x) {
        Pack<T, N> pack = load_pack<N>(from, i);
        if (gamma) {
          const Pack<T, N> scale = load_pack<N>(gamma, i), shift = load_pack<N>(beta, i);
          for (int k = 0; k < N; ++k)
            store(pack.v, k, (load(pack.v, k) - mean) * factor * load(scale.v, k) + load(shift.v, k));
        } else {
          for (int k = 0; k < N; ++k) store(pack.v, k, (load(pack.v, k) - mean) * factor);
        }
        store_pack<N>(to, i, pack);
      }
    } else {
      for (int64 j = threadIdx.x; j < rows.columns; j += blockDim.x) {
        const int64 at = rows.at(j);
        const A value = (load(from, at) - mean) * factor;
        const int64 c = rows.channel(row, j);
        store(to, at, gamma ? value * load(gamma, c) + load(beta, c) : value);
      }
    }
  }
}

// 1 / deviation of a row.
template <typename A>
__device__ inline A inverse_of(const uint8* deviations, int64 row, int32 inverse) {
  const A value = ((const A*)deviations)[row];
  return inverse ? value : (A)1 / value;
}

// dX = (g - mean(g) - xhat mean(g xhat)) / deviation, g = dY gamma.
template <typename T>
__device__ void layer_norm_bwd(const T* x, const T* dy, const T* gamma, const uint8* means, const uint8* deviations, T* dx,
                               int64 count, const Rows& rows, int32 inverse) {
  typedef typename Accumulate<T>::type A;
  __shared__ A parts[32];
  const A size = (A)(rows.columns > 0 ? rows.columns : 1);
  for (int64 row = blockIdx.x; row < count; row += gridDim.x) {
    const int64 start = rows.start(row);
    const A mean = ((const A*)means)[row], factor = inverse_of<A>(deviations, row, inverse);
    A sum = 0, products = 0;
    for (int64 j = threadIdx.x; j < rows.columns; j += blockDim.x) {
      const int64 at = start + rows.at(j);
      const A g = gamma ? load(dy, at) * load(gamma, rows.channel(row, j)) : load(dy, at);
      sum += g;
      products += g * ((load(x, at) - mean) * factor);
    }
    sum = block_reduce(sum, parts, (A)0, Sum()) / size;
    products = block_reduce(products, parts, (A)0, Sum()) / size;
    for (int64 j = threadIdx.x; j < rows.columns; j += blockDim.x) {
      const int64 at = start + rows.at(j);
      const A g = gamma ? load(dy, at) * load(gamma, rows.channel(row, j)) : load(dy, at);
      store(dx, at, (g - sum - (load(x, at) - mean) * factor * products) * factor);
    }
  }
}

// Sums of dY xhat and of dY over slices of the elements of each channel: partial[2 * slice][channel] and the row after it. A block
// takes `across` channels and a slice at a time; a channel has `depth_count` elements, `inner` of each example.
template <typename T>
__device__ void layer_norm_bwd_sums(const T* x, const T* dy, const uint8* means, const uint8* deviations, double* partial,
                                    int64 elements, const Rows& rows, int64 slices, int64 length, int32 across,
                                    int32 inverse) {
  typedef typename Accumulate<T>::type A;
  __shared__ A parts[256];
  const int lane = threadIdx.x % across, above = threadIdx.x / across, deep = blockDim.x / across;
  const int64 channels = rows.groups * rows.depth, tiles = (channels + across - 1) / across;
  for (int64 task = blockIdx.x; task < tiles * slices; task += gridDim.x) {
    const int64 slice = task / tiles, c = (task - slice * tiles) * across + lane;
    const int64 begin = slice * length, end = begin + length < elements ? begin + length : elements;
    A sum = 0, products = 0;
    if (c < channels) {
      const int64 group = c / rows.depth;
      for (int64 r = begin + above; r < end; r += deep) {
        const int64 example = r / rows.inner, row = example * rows.groups + group;
        const int64 at = rows.last ? r * channels + c : example * channels * rows.inner + c * rows.inner + (r - example * rows.inner);
        const A g = load(dy, at);
        sum += g;
        products += g * ((load(x, at) - ((const A*)means)[row]) * inverse_of<A>(deviations, row, inverse));
      }
    }
    sum = column_sum(sum, parts, across);
    products = column_sum(products, parts, across);
    if (above != 0 || c >= channels) continue;
    partial[2 * slice * channels + c] = products;
    partial[(2 * slice + 1) * channels + c] = sum;
  }
}

// dgamma and dbeta: the sums over the slices, in their order.
template <typename T>
__device__ void layer_norm_bwd_total(const double* partial, T* dgamma, T* dbeta, int64 channels, int64 slices) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(c, channels) {
    double products = 0, sum = 0;
    for (int64 slice = 0; slice < slices; ++slice) {
      products += partial[2 * slice * channels + c];
      sum += partial[(2 * slice + 1) * channels + c];
    }
    store(dgamma, c, (A)products);
    store(dbeta, c, (A)sum);
  }
}

// y = 1 / x: between standard deviations and what cuDNN takes and gives.
extern "C" __global__ void inverse_deviations(const float* x, float* y, int64 n) {
  GPUNET_LOOP(i, n) y[i] = 1.0f / x[i];
}

#define LAYER_NORM(S, T)                                                                                                     \
  extern "C" __global__ void layer_norm_fwd_##S(const T* x, const T* gamma, const T* beta, T* y, uint8* means,               \
                                                uint8* deviations, int64 count, int64 columns, int64 groups, int64 depth,    \
                                                int64 inner, int32 last, double epsilon, int32 inverse) {                    \
    layer_norm(x, gamma, beta, y, means, deviations, count, Rows{columns, groups, depth, inner, last}, epsilon, inverse);    \
  }                                                                                                                          \
  extern "C" __global__ void layer_norm_bwd_##S(const T* x, const T* dy, const T* gamma, const uint8* means,                 \
                                                const uint8* deviations, T* dx, int64 count, int64 columns, int64 groups,    \
                                                int64 depth, int64 inner, int32 last, int32 inverse) {                       \
    layer_norm_bwd(x, dy, gamma, means, deviations, dx, count, Rows{columns, groups, depth, inner, last}, inverse);          \
  }                                                                                                                          \
  extern "C" __global__ void layer_norm_bwd_sums_##S(const T* x, const T* dy, const uint8* means, const uint8* deviations,   \
                                                     double* partial, int64 elements, int64 columns, int64 groups,           \
                                                     int64 depth, int64 inner, int32 last, int64 slices, int64 length,       \
                                                     int32 across, int32 inverse) {                                          \
    layer_norm_bwd_sums(x, dy, means, deviations, partial, elements, Rows{columns, groups, depth, inner, last}, slices,      \
                        length, across, inverse);                                                                            \
  }                                                                                                                          \
  extern "C" __global__ void layer_norm_bwd_total_##S(const double* partial, T* dgamma, T* dbeta, int64 channels,            \
                                                      int64 slices) {                                                        \
    layer_norm_bwd_total(partial, dgamma, dbeta, channels, slices);                                                          \
  }
GPUNET_FLOATS(LAYER_NORM)
