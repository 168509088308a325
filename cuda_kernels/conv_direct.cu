// Convolution without a library, see include/conv_tiles.cuh.
#include "conv_tiles.cuh"

// What a tap of a window reads; 0 in the padding.
template <typename T>
__device__ inline typename Accumulate<T>::type pixel_of(const Convolution& c, const T* x, int32 group, const Element& e,
                                                        const Spot& window) {
  const int64 at = pixel_offset(c, group, e, window);
  return at < 0 ? (typename Accumulate<T>::type)0 : load(x, at);
}

template <typename T>
struct ForwardProduct {
  typedef typename Accumulate<T>::type A;
  typedef Element Depth;
  typedef Spot Column;
  static constexpr bool kNeighbours = false;
  Convolution c;
  const T *x, *w, *bias;
  T* y;

  __device__ int32 rows() const { return c.filters; }
  __device__ int64 columns() const { return c.windows(); }
  __device__ int64 depth() const { return c.elements(); }
  __device__ Depth depth_at(int64 k) const { return element_of(c, (int32)k); }
  __device__ Column column_at(int64 n) const { return spot_of(n, c.window.positions(), c.window.output); }
  __device__ A left(int32 group, int32 m, int64 k, const Depth&) const {
    return load(w, ((int64)group * c.filters + m) * c.elements() + k);
  }
  __device__ A right(int32 group, const Depth& e, const Column& window) const {
    return pixel_of(c, x, group, e, window);
  }
  __device__ void put(int32 group, int32 m, int64, const Column& window, int64, A total) const {
    if (bias != nullptr) total += load(bias, (int64)group * c.filters + m);
    store(y, c.y_offset(window.image, group, m, window.index), total);
  }
};

template <typename T>
struct DataProduct {
  typedef typename Accumulate<T>::type A;
  struct Depth {
    int32 filter, tap;
    Place place;
  };
  typedef Spot Column;
  static constexpr bool kNeighbours = false;
  Convolution c;
  const T *w, *dy, *bias;
  T* dx;

  __device__ int32 rows() const { return c.channels; }
  __device__ int64 columns() const { return c.batch * c.window.pixels(); }
  __device__ int64 depth() const { return (int64)c.filters * c.window.taps(); }
  __device__ Depth depth_at(int64 k) const {
    const int32 taps = c.window.taps(), filter = (int32)(k / taps), tap = (int32)(k - (int64)filter * taps);
    return Depth{filter, tap, place_of(tap, c.window.kernel)};
  }
  __device__ Column column_at(int64 n) const { return spot_of(n, c.window.pixels(), c.window.image); }
  __device__ A left(int32 group, int32 m, int64, const Depth& d) const {
    const int64 filter = (int64)group * c.filters + d.filter, taps = c.window.taps();
    return load(w, c.channels_last ? (filter * taps + d.tap) * c.channels + m : (filter * c.channels + m) * taps + d.tap);
  }
  __device__ A right(int32 group, const Depth& tap, const Column& pixel) const {
    const Window& w = c.window;
    Place window;
    for (int d = 0; d < 3; ++d) {
      const int32 at = pixel.place.at[d] + w.head[d] - tap.place.at[d] * w.dilation[d];
      window.at[d] = at / w.stride[d];
      if (at < 0 || window.at[d] * w.stride[d] != at || window.at[d] >= w.output[d]) return 0;
    }
    return load(dy, c.y_offset(pixel.image, group, tap.filter, index_of(window, w.output)));
  }
  __device__ void put(int32 group, int32 m, int64, const Column& pixel, int64, A total) const {
    if (bias != nullptr) total += load(bias, (int64)group * c.channels + m);
    store(dx, c.x_offset(pixel.image, group, m, pixel.index), total);
  }
};

template <typename T>
struct FilterProduct {
  typedef typename Accumulate<T>::type A;
  typedef Spot Depth;
  typedef Element Column;
  static constexpr bool kNeighbours = true;
  Convolution c;
  const T *x, *dy;
  T* dw;
  A* partial;
  int64 slices;

  __device__ int32 rows() const { return c.filters; }
  __device__ int64 columns() const { return c.elements(); }
  __device__ int64 depth() const { return c.windows(); }
  __device__ Depth depth_at(int64 k) const { return spot_of(k, c.window.positions(), c.window.output); }
  __device__ Column column_at(int64 n) const { return element_of(c, (int32)n); }
  __device__ A left(int32 group, int32 m, int64, const Depth& window) const {
    return load(dy, c.y_offset(window.image, group, m, window.index));
  }
  __device__ A right(int32 group, const Depth& window, const Column& e) const {
    return pixel_of(c, x, group, e, window);
  }
  __device__ void put(int32 group, int32 m, int64 n, const Column&, int64 slice, A total) const {
    const int64 row = (int64)group * c.filters + m, all = (int64)c.groups * c.filters;
    if (slices == 1)
      store(dw, row * columns() + n, total);
    else
      partial[(slice * all + row) * columns() + n] = total;
  }
};

template <typename T>
__device__ inline void sum_filter_slices(const uint8* partial, T* dw, int64 size, int64 slices) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(i, size) {
    A total = 0;
    for (int64 s = 0; s < slices; ++s) total += ((const A*)partial)[s * size + i];
    store(dw, i, total);
  }
}

#define CONVOLUTION(S, T)                                                                                             \
  extern "C" __global__ void conv_fwd_##S(const T* x, const T* w, const T* bias, T* y,                               \
                                          GPUNET_CONVOLUTION_PARAMETERS) {                                           \
    multiply_tiles(ForwardProduct<T>{GPUNET_CONVOLUTION, x, w, bias, y}, 1);                                         \
  }                                                                                                                  \
  extern "C" __global__ void conv_data_##S(const T* w, const T* dy, const T* bias, T* dx,                            \
                                           GPUNET_CONVOLUTION_PARAMETERS) {                                          \
    multiply_tiles(DataProduct<T>{GPUNET_CONVOLUTION, w, dy, bias, dx}, 1);                                          \
  }                                                                                                                  \
  extern "C" __global__ void conv_filter_##S(const T* x, const T* dy, T* dw, uint8* partial, int64 slices,           \
                                             GPUNET_CONVOLUTION_PARAMETERS) {                                        \
    multiply_tiles(FilterProduct<T>{GPUNET_CONVOLUTION, x, dy, dw, (Accumulate<T>::type*)partial, slices}, slices);  \
  }                                                                                                                  \
  extern "C" __global__ void conv_filter_sum_##S(const uint8* partial, T* dw, int64 size, int64 slices) {            \
    sum_filter_slices(partial, dw, size, slices);                                                                    \
  }
GPUNET_FLOATS(CONVOLUTION)
