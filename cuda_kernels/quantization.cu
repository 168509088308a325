// Numbers of 8 bits. Products and sums are whole numbers, so results are the same on each device, bit for bit.
#include "conv_tiles.cuh"

template <typename Q>
struct Limits {};
template <>
struct Limits<int8> {
  static constexpr int low = -128, high = 127;
};
template <>
struct Limits<uint8> {
  static constexpr int low = 0, high = 255;
};

// A whole number into 8 bits; NaN becomes the least.
template <typename Q, typename A>
__device__ inline Q saturate(A value) {
  const A low = (A)Limits<Q>::low, high = (A)Limits<Q>::high;
  return (Q)(int)(value >= low ? (value < high ? value : high) : low);
}

// Element i has scale i / inner % count. Without zero points (null) they are 0.
template <typename T, typename Q>
__device__ void quantize(const T* x, const float* scale, const Q* zero, Q* y, int64 n, int64 count, int64 inner) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(i, n) {
    const int64 c = count == 1 ? 0 : i / inner % count;
    A value = rint(load(x, i) / (A)scale[c]);
    if (zero) value += (A)zero[c];
    y[i] = saturate<Q>(value);
  }
}

template <typename Q>
__device__ void dequantize(const Q* x, const float* scale, const Q* zero, float* y, int64 n, int64 count, int64 inner) {
  GPUNET_LOOP(i, n) {
    const int64 c = count == 1 ? 0 : i / inner % count;
    const int64 value = (int64)x[i] - (zero ? (int64)zero[c] : 0);
    y[i] = (float)value * scale[c];
  }
}

// From sums to numbers of 8 bits. There are as many scales of filters as filters, or (step 0) one.
template <typename Y>
struct Rescale {
  const int32* bias;
  const float *x_scale, *w_scale, *y_scale;
  const Y* y_zero;
  int32 scale_step;

  __device__ Y operator()(uint32 sum, int64 filter) const {
    if (bias) sum += (uint32)bias[filter];
    const float factor = x_scale[0] * w_scale[filter * scale_step] / y_scale[0];
    return saturate<Y>(rint((double)(int32)sum * (double)factor) + (double)y_zero[0]);
  }
};

// Sums wrap around: unsigned.
template <typename X, typename W, typename Y>
struct QuantizedProduct {
  typedef uint32 A;
  typedef Element Depth;
  typedef Spot Column;
  static constexpr bool kNeighbours = false;
  Convolution c;
  const X *x, *x_zero;
  const W *w, *w_zero;
  Y* y;
  int32 zero_step;
  Rescale<Y> rescale;

  __device__ int32 rows() const { return c.filters; }
  __device__ int64 columns() const { return c.windows(); }
  __device__ int64 depth() const { return c.elements(); }
  __device__ Depth depth_at(int64 k) const { return element_of(c, (int32)k); }
  __device__ Column column_at(int64 n) const { return spot_of(n, c.window.positions(), c.window.output); }
  __device__ A left(int32 group, int32 m, int64 k, const Depth&) const {
    const int64 filter = (int64)group * c.filters + m;
    return (A)((int32)w[filter * c.elements() + k] - (w_zero ? (int32)w_zero[filter * zero_step] : 0));
  }
  __device__ A right(int32 group, const Depth& e, const Column& window) const {
    const int64 at = pixel_offset(c, group, e, window);
    return at < 0 ? (A)0 : (A)((int32)x[at] - (x_zero ? (int32)x_zero[0] : 0));
  }
  __device__ void put(int32 group, int32 m, int64, const Column& window, int64, A total) const {
    y[c.y_offset(window.image, group, m, window.index)] = rescale(total, (int64)group * c.filters + m);
  }
};

// Element i is of filter i / inner % filters.
template <typename Y>
__device__ void requantize(const int32* sums, Y* y, int64 n, int64 filters, int64 inner, const Rescale<Y>& rescale) {
  GPUNET_LOOP(i, n) y[i] = rescale((uint32)sums[i], i / inner % filters);
}

#define QUANTIZE(S, T, QS, Q)                                                                                               \
  extern "C" __global__ void quantize_fwd_##S##_##QS(const T* x, const float* scale, const Q* zero, Q* y, int64 n,         \
                                                     int64 count, int64 inner) {                                           \
    quantize(x, scale, zero, y, n, count, inner);                                                                          \
  }
#define QUANTIZES(S, T) QUANTIZE(S, T, i8, int8) QUANTIZE(S, T, u8, uint8)
GPUNET_FLOATS(QUANTIZES)

#define DEQUANTIZE(S, Q)                                                                                                    \
  extern "C" __global__ void dequantize_fwd_##S(const Q* x, const float* scale, const Q* zero, float* y, int64 n,          \
                                                int64 count, int64 inner) {                                                \
    dequantize(x, scale, zero, y, n, count, inner);                                                                        \
  }
DEQUANTIZE(i8, int8)
DEQUANTIZE(u8, uint8)
DEQUANTIZE(i32, int32)

#define QCONV(XS, X, WS, W, YS, Y)                                                                                          \
  extern "C" __global__ void qconv_fwd_##XS##_##WS##_##YS(                                                                 \
      const X* x, const float* x_scale, const X* x_zero, const W* w, const float* w_scale, const W* w_zero,                \
      const float* y_scale, const Y* y_zero, const int32* bias, Y* y, int32 scale_step, int32 zero_step,                   \
      GPUNET_CONVOLUTION_PARAMETERS) {                                                                                     \
    multiply_tiles(QuantizedProduct<X, W, Y>{GPUNET_CONVOLUTION, x, x_zero, w, w_zero, y, zero_step,                       \
                                             Rescale<Y>{bias, x_scale, w_scale, y_scale, y_zero, scale_step}},             \
                   1);                                                                                                     \
  }
#define QCONVS(XS, X, WS, W) QCONV(XS, X, WS, W, i8, int8) QCONV(XS, X, WS, W, u8, uint8)
QCONVS(i8, int8, i8, int8)
QCONVS(i8, int8, u8, uint8)
QCONVS(u8, uint8, i8, int8)
QCONVS(u8, uint8, u8, uint8)

#define REQUANTIZE(S, Y)                                                                                                    \
  extern "C" __global__ void requantize_##S(const int32* sums, const float* x_scale, const float* w_scale,                 \
                                            const float* y_scale, const Y* y_zero, const int32* bias, Y* y, int64 n,       \
                                            int64 filters, int64 inner, int32 scale_step) {                                \
    requantize(sums, y, n, filters, inner, Rescale<Y>{bias, x_scale, w_scale, y_scale, y_zero, scale_step});               \
  }
REQUANTIZE(i8, int8)
REQUANTIZE(u8, uint8)
