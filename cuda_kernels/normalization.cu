// LRN and batch normalization.
#include "columns.cuh"
#include "vector.cuh"

// ---- LRN ----

// Sum of f over the channels from `before` before to `after` after that of element i; a channel lies `inner` elements from the next.
template <typename A, typename F>
__device__ inline A window_sum(int64 i, int64 channels, int64 inner, int64 before, int64 after, F f) {
  const int64 c = i / inner % channels;
  if (before > c) before = c;
  if (after > channels - 1 - c) after = channels - 1 - c;
  A total = f(i);
  for (int64 shift = 1; shift <= before; ++shift) total += f(i - shift * inner);
  for (int64 shift = 1; shift <= after; ++shift) total += f(i + shift * inner);
  return total;
}

template <typename A, typename T>
__device__ inline A lrn_scale(const T* x, int64 i, int64 channels, int64 inner, int64 size, double alpha, double bias) {
  const A squares = window_sum<A>(i, channels, inner, (size - 1) / 2, size / 2, [=](int64 at) {
    const A v = load(x, at);
    return v * v;
  });
  return squares * (A)(alpha / size) + (A)bias;
}

template <typename T>
__device__ void lrn_fwd(const T* x, T* y, T* scale, int64 n, int64 channels, int64 inner, int64 size, double alpha, double beta,
                        double bias) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(i, n) {
    const A value = lrn_scale<A>(x, i, channels, inner, size, alpha, bias);
    if (scale) store(scale, i, value);
    store(y, i, load(x, i) * pow(value, (A)-beta));
  }
}

// First for all elements: ratio = dY Y / scale, power = scale^-beta.
template <typename T>
__device__ void lrn_bwd_ratio(const T* x, const T* y, const T* dy, uint8* ratio, uint8* power, int64 n, int64 channels, int64 inner,
                              int64 size, double alpha, double beta, double bias) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(i, n) {
    const A scale = lrn_scale<A>(x, i, channels, inner, size, alpha, bias);
    ((A*)ratio)[i] = load(dy, i) * load(y, i) / scale;
    ((A*)power)[i] = pow(scale, (A)-beta);
  }
}

// dX = dY power - factor X (sum of the ratios of the channels in whose window this one is).
template <typename T>
__device__ void lrn_bwd(const T* x, const T* dy, const uint8* ratio, const uint8* power, T* dx, int64 n, int64 channels, int64 inner,
                        int64 size, double factor) {
  typedef typename Accumulate<T>::type A;
  const A* ratios = (const A*)ratio;
  GPUNET_LOOP(i, n) {
    const A sum = window_sum<A>(i, channels, inner, size / 2, (size - 1) / 2, [=](int64 at) { return ratios[at]; });
    store(dx, i, load(dy, i) * ((const A*)power)[i] - sum * load(x, i) * (A)factor);
  }
}

// ---- Batch normalization ----
//
// Element r of channel c lies at (r / pixels) * channels * pixels + c * pixels + r % pixels; pixels is 1 where the channels are last.
// A block takes `across` channels (a power of two) and a slice of their elements at a time. It sums in the type to compute in;
// the totals of the slices are put together in double precision, in their order.

template <typename I>
__device__ inline int64 element_of_channel(I r, int64 channels, int64 pixels) {
  if (pixels == 1) return r * channels;
  const I image = r / (I)pixels;
  return image * channels * pixels + (r - image * (I)pixels);
}
__device__ inline int64 element_of(int64 r, int64 channels, int64 pixels) {
  return r <= GPUNET_NARROW ? element_of_channel<uint32>((uint32)r, channels, pixels) : element_of_channel<int64>(r, channels, pixels);
}

// Mean and sum of squared distances to it, of each slice: partial[2 * slice][channel] and the row after it.
template <typename T>
__device__ void spatial_bn_moments(const T* x, double* partial, int64 count, int64 channels, int64 pixels, int64 slices,
                                   int64 length, int32 across) {
  typedef typename Accumulate<T>::type A;
  __shared__ A parts[256];
  const int lane = threadIdx.x % across, depth = threadIdx.x / across, deep = blockDim.x / across;
  const int64 tiles = (channels + across - 1) / across;
  for (int64 task = blockIdx.x; task < tiles * slices; task += gridDim.x) {
    const int64 slice = task / tiles, c = (task - slice * tiles) * across + lane;
    const int64 begin = slice * length, end = begin + length < count ? begin + length : count;
    const T* from = x + c * pixels;
    A sum = 0;
    if (c < channels)
      for (int64 r = begin + depth; r < end; r += deep) sum += load(from, element_of(r, channels, pixels));
    const A mean = column_sum(sum, parts, across) / (A)(end - begin);
    // About the mean; what that lacks to the true one is the mean of the distances.
    A distances = 0, squares = 0;
    if (c < channels)
      for (int64 r = begin + depth; r < end; r += deep) {
        const A distance = load(from, element_of(r, channels, pixels)) - mean;
        distances += distance;
        squares += distance * distance;
      }
    distances = column_sum(distances, parts, across);
    squares = column_sum(squares, parts, across);
    if (depth != 0 || c >= channels) continue;
    const double lacking = (double)distances / (double)(end - begin);
    partial[2 * slice * channels + c] = mean + lacking;
    partial[(2 * slice + 1) * channels + c] = squares - lacking * distances;
  }
}

// Sums of dY and of dY (X - mean), of each slice. The mean may be of the type of X, or (the other pointer is null) in single precision.
template <typename T>
__device__ void spatial_bn_bwd_sums(const T* x, const T* dy, const T* mean, const float* single_mean, double* partial, int64 count, int64 channels, int64 pixels,
                                    int64 slices, int64 length, int32 across) {
  typedef typename Accumulate<T>::type A;
  __shared__ A parts[256];
  const int lane = threadIdx.x % across, depth = threadIdx.x / across, deep = blockDim.x / across;
  const int64 tiles = (channels + across - 1) / across;
  for (int64 task = blockIdx.x; task < tiles * slices; task += gridDim.x) {
    const int64 slice = task / tiles, c = (task - slice * tiles) * across + lane;
    const int64 begin = slice * length, end = begin + length < count ? begin + length : count;
    A sum = 0, products = 0;
    if (c < channels) {
      const A center = single_mean ? (A)single_mean[c] : load(mean, c);
      for (int64 r = begin + depth; r < end; r += deep) {
        const int64 at = c * pixels + element_of(r, channels, pixels);
        const A gradient = load(dy, at);
        sum += gradient;
        products += gradient * (load(x, at) - center);
      }
    }
    sum = column_sum(sum, parts, across);
    products = column_sum(products, parts, across);
    if (depth != 0 || c >= channels) continue;
    partial[2 * slice * channels + c] = sum;
    partial[(2 * slice + 1) * channels + c] = products;
  }
}

// Factor and offset of each channel for Y = factor X + offset.
template <typename U>
__device__ inline void put_affine(uint8* factors, int64 c, int64 channels, double scale, double bias, double mean, double inv_std) {
  typedef typename Accumulate<U>::type A;
  const double factor = scale * inv_std;
  ((A*)factors)[c] = (A)factor;
  ((A*)factors)[channels + c] = (A)(bias - mean * factor);
}

template <typename U>
__device__ void spatial_bn_test(const U* scale, const U* bias, const U* mean, const U* var, uint8* factors, int64 channels,
                                double epsilon, int32 inverted) {
  GPUNET_LOOP(c, channels) {
    const double inv_std = inverted ? (double)load(var, c) : 1.0 / sqrt((double)load(var, c) + epsilon);
    put_affine<U>(factors, c, channels, load(scale, c), load(bias, c), load(mean, c), inv_std);
  }
}

// Statistics of the batch from its slices, or (not null) from the sums over several batches of `total` elements a channel together.
// The sums may be the same memory as the saved statistics.
template <typename U>
__device__ void spatial_bn_statistics(const double* partial, const U* batch_sum, const U* batch_sumsq, const U* scale, const U* bias,
                                      U* running_mean, U* running_var, U* saved_mean, U* saved_inv_std, uint8* factors,
                                      int64 channels, int64 count, int64 slices, int64 length, double total, double epsilon,
                                      double momentum) {
  typedef typename Accumulate<U>::type A;
  GPUNET_LOOP(c, channels) {
    double mean = 0, variance = 0;
    if (batch_sum) {
      mean = load(batch_sum, c) / total;
      variance = load(batch_sumsq, c) / total - mean * mean;
      if (variance < 0) variance = 0;
    } else {
      double seen = 0;
      for (int64 slice = 0; slice < slices; ++slice) {
        const double n = (double)((slice + 1) * length < count ? length : count - slice * length), all = seen + n;
        const double distance = partial[2 * slice * channels + c] - mean;
        mean += distance * (n / all);
        variance += partial[(2 * slice + 1) * channels + c] + distance * distance * (seen * n / all);
        seen = all;
      }
      variance /= seen;
    }
    // Infinite (or, of 0, no number) where a channel has one element.
    const double unbiased = variance * (total / (total - 1));
    store(running_mean, c, (A)(momentum * load(running_mean, c) + (1 - momentum) * mean));
    store(running_var, c, (A)(momentum * load(running_var, c) + (1 - momentum) * unbiased));
    const double inv_std = 1.0 / sqrt(variance + epsilon);
    store(saved_mean, c, (A)mean);
    store(saved_inv_std, c, (A)inv_std);
    put_affine<U>(factors, c, channels, load(scale, c), load(bias, c), mean, inv_std);
  }
}

// dscale and dbias, and for each channel slope, offset and factor of dX = factor (dY + slope X + offset).
template <typename U>
__device__ void spatial_bn_bwd_statistics(const double* partial, const U* dscale_sum, const U* dbias_sum, const U* scale,
                                          const U* mean, const U* inv_std, U* dscale, U* dbias, uint8* factors, int64 channels,
                                          int64 count, int64 slices, double batches) {
  typedef typename Accumulate<U>::type A;
  GPUNET_LOOP(c, channels) {
    const double center = load(mean, c), inv = load(inv_std, c);
    double of_scale, of_bias;
    if (dscale_sum) {
      of_scale = load(dscale_sum, c) / batches;
      of_bias = load(dbias_sum, c) / batches;
    } else {
      double sum = 0, products = 0;
      for (int64 slice = 0; slice < slices; ++slice) {
        sum += partial[2 * slice * channels + c];
        products += partial[(2 * slice + 1) * channels + c];
      }
      of_bias = sum;
      of_scale = products * inv;
    }
    store(dscale, c, (A)of_scale);
    store(dbias, c, (A)of_bias);
    const double slope = -of_scale * inv / count;
    ((A*)factors)[c] = (A)slope;
    ((A*)factors)[channels + c] = (A)(-slope * center - of_bias / count);
    ((A*)factors)[2 * channels + c] = (A)(load(scale, c) * inv);
  }
}

// Calls f(channel of the first, i) for each i-th pack of N elements.
template <typename I, int N, typename F>
__device__ inline void loop_channels(int64 n, int64 channels, int64 pixels, F f) {
  GPUNET_LOOP(i, n / N) f((int64)((I)(i * N) / (I)pixels % (I)channels), i);
}

// Packs of N elements where `packed` (all pointers are aligned) and no pack reaches over the end of a channel's pixels (or, with
// channels last, of a pixel's channels); else `single` elements.
template <int N, typename F, typename G>
__device__ inline void each_channel(int64 n, int64 channels, int64 pixels, bool packed, F f, G single) {
  packed = packed && (pixels == 1 ? channels : pixels) % N == 0;
  if (packed && n <= GPUNET_NARROW)
    loop_channels<uint32, N>(n, channels, pixels, f);
  else if (packed)
    loop_channels<int64, N>(n, channels, pixels, f);
  else if (n <= GPUNET_NARROW)
    loop_channels<uint32, 1>(n, channels, pixels, single);
  else
    loop_channels<int64, 1>(n, channels, pixels, single);
}

template <typename T>
__device__ void spatial_bn_apply(const T* x, const uint8* factors, T* y, int64 n, int64 channels, int64 pixels) {
  typedef typename Accumulate<T>::type A;
  constexpr int N = pack_size<T, T>();
  const A *factor = (const A*)factors, *offset = factor + channels;
  const int step = pixels == 1;
  each_channel<N>(
      n, channels, pixels, aligned<N>(x) && aligned<N>(y),
      [=](int64 c, int64 i) {
        const Pack<T, N> a = load_pack<N>(x, i);
        Pack<T, N> result;
        for (int k = 0; k < N; ++k) store(result.v, k, load(a.v, k) * factor[c + k * step] + offset[c + k * step]);
        store_pack<N>(y, i, result);
      },
      [=](int64 c, int64 i) { store(y, i, load(x, i) * factor[c] + offset[c]); });
}

template <typename T>
__device__ void spatial_bn_bwd(const T* x, const T* dy, const uint8* factors, T* dx, int64 n, int64 channels, int64 pixels) {
  typedef typename Accumulate<T>::type A;
  constexpr int N = pack_size<T, T>();
  const A *slope = (const A*)factors, *offset = slope + channels, *factor = offset + channels;
  const int step = pixels == 1;
  each_channel<N>(
      n, channels, pixels, aligned<N>(x) && aligned<N>(dy) && aligned<N>(dx),
      [=](int64 c, int64 i) {
        const Pack<T, N> a = load_pack<N>(x, i), b = load_pack<N>(dy, i);
        Pack<T, N> result;
        for (int k = 0; k < N; ++k) {
          const int64 here = c + k * step;
          store(result.v, k, (load(a.v, k) * slope[here] + load(b.v, k) + offset[here]) * factor[here]);
        }
        store_pack<N>(dx, i, result);
      },
      [=](int64 c, int64 i) { store(dx, i, (load(x, i) * slope[c] + load(dy, i) + offset[c]) * factor[c]); });
}

#define NORMALIZATION(S, T)                                                                                                   \
  extern "C" __global__ void lrn_fwd_##S(const T* x, T* y, T* scale, int64 n, int64 channels, int64 inner, int64 size,        \
                                         double alpha, double beta, double bias) {                                            \
    lrn_fwd(x, y, scale, n, channels, inner, size, alpha, beta, bias);                                                        \
  }                                                                                                                           \
  extern "C" __global__ void lrn_bwd_ratio_##S(const T* x, const T* y, const T* dy, uint8* ratio, uint8* power, int64 n,      \
                                               int64 channels, int64 inner, int64 size, double alpha, double beta,            \
                                               double bias) {                                                                 \
    lrn_bwd_ratio(x, y, dy, ratio, power, n, channels, inner, size, alpha, beta, bias);                                       \
  }                                                                                                                           \
  extern "C" __global__ void lrn_bwd_##S(const T* x, const T* dy, const uint8* ratio, const uint8* power, T* dx, int64 n,     \
                                         int64 channels, int64 inner, int64 size, double factor) {                            \
    lrn_bwd(x, dy, ratio, power, dx, n, channels, inner, size, factor);                                                       \
  }                                                                                                                           \
  extern "C" __global__ void spatial_bn_moments_##S(const T* x, double* partial, int64 count, int64 channels, int64 pixels,   \
                                                    int64 slices, int64 length, int32 across) {                               \
    spatial_bn_moments(x, partial, count, channels, pixels, slices, length, across);                                          \
  }                                                                                                                           \
  extern "C" __global__ void spatial_bn_test_##S(const T* scale, const T* bias, const T* mean, const T* var, uint8* factors,  \
                                                 int64 channels, double epsilon, int32 inverted) {                            \
    spatial_bn_test(scale, bias, mean, var, factors, channels, epsilon, inverted);                                            \
  }                                                                                                                           \
  extern "C" __global__ void spatial_bn_statistics_##S(                                                                       \
      const double* partial, const T* batch_sum, const T* batch_sumsq, const T* scale, const T* bias, T* running_mean,        \
      T* running_var, T* saved_mean, T* saved_inv_std, uint8* factors, int64 channels, int64 count, int64 slices,             \
      int64 length, double total, double epsilon, double momentum) {                                                          \
    spatial_bn_statistics(partial, batch_sum, batch_sumsq, scale, bias, running_mean, running_var, saved_mean,                \
                          saved_inv_std, factors, channels, count, slices, length, total, epsilon, momentum);                 \
  }                                                                                                                           \
  extern "C" __global__ void spatial_bn_apply_##S(const T* x, const uint8* factors, T* y, int64 n, int64 channels,            \
                                                  int64 pixels) {                                                             \
    spatial_bn_apply(x, factors, y, n, channels, pixels);                                                                     \
  }                                                                                                                           \
  extern "C" __global__ void spatial_bn_bwd_sums_##S(const T* x, const T* dy, const T* mean, const float* single_mean,          \
                                                     double* partial, int64 count, int64 channels, int64 pixels,              \
                                                     int64 slices, int64 length, int32 across) {                              \
    spatial_bn_bwd_sums(x, dy, mean, single_mean, partial, count, channels, pixels, slices, length, across);                  \
  }                                                                                                                           \
  extern "C" __global__ void spatial_bn_bwd_statistics_##S(                                                                   \
      const double* partial, const T* dscale_sum, const T* dbias_sum, const T* scale, const T* mean, const T* inv_std,        \
      T* dscale, T* dbias, uint8* factors, int64 channels, int64 count, int64 slices, double batches) {                       \
    spatial_bn_bwd_statistics(partial, dscale_sum, dbias_sum, scale, mean, inv_std, dscale, dbias, factors, channels, count,  \
                              slices, batches);                                                                               \
  }                                                                                                                           \
  extern "C" __global__ void spatial_bn_bwd_##S(const T* x, const T* dy, const uint8* factors, T* dx, int64 n,                \
                                                int64 channels, int64 pixels) {                                               \
    spatial_bn_bwd(x, dy, factors, dx, n, channels, pixels);                                                                  \
  }
GPUNET_FLOATS(NORMALIZATION)
