// Windows that slide over one to three spatial dimensions, as gpunet/operators/window.py resolves them.
#pragma once

#include "gpunet.cuh"

// Dimensions that are missing come first, with sizes of 1.
struct Window {
  int32 image[3], output[3], kernel[3], stride[3], dilation[3], head[3];

  __device__ int32 positions() const { return output[0] * output[1] * output[2]; }
  __device__ int32 pixels() const { return image[0] * image[1] * image[2]; }
  __device__ int32 taps() const { return kernel[0] * kernel[1] * kernel[2]; }
};

#define GPUNET_WINDOW_PARAMETERS                                                                                     \
  int32 i0, int32 i1, int32 i2, int32 o0, int32 o1, int32 o2, int32 k0, int32 k1, int32 k2, int32 s0, int32 s1,     \
      int32 s2, int32 d0, int32 d1, int32 d2, int32 h0, int32 h1, int32 h2
#define GPUNET_WINDOW \
  Window { {i0, i1, i2}, {o0, o1, o2}, {k0, k1, k2}, {s0, s1, s2}, {d0, d1, d2}, { h0, h1, h2 } }

// A place in three dimensions.
struct Place {
  int32 at[3];
};

__device__ inline Place place_of(int32 index, const int32* size) {
  Place place;
  place.at[2] = index % size[2];
  index /= size[2];
  place.at[1] = index % size[1];
  place.at[0] = index / size[1];
  return place;
}

__device__ inline int32 index_of(const Place& place, const int32* size) {
  return (place.at[0] * size[1] + place.at[1]) * size[2] + place.at[2];
}

// From the first to behind the last.
struct Range {
  int32 first, last;
  __device__ int32 count() const { return last > first ? last - first : 0; }
};

// The pixels inside of the image that the window at output position `o` of a dimension covers, without dilation.
__device__ inline Range window_range(const Window& w, int d, int32 o) {
  const int32 start = o * w.stride[d] - w.head[d], end = start + w.kernel[d];
  return Range{start > 0 ? start : 0, end < w.image[d] ? end : w.image[d]};
}

// The output positions of a dimension whose windows cover pixel `i`, without dilation.
__device__ inline Range covering_range(const Window& w, int d, int32 i) {
  const int32 at = i + w.head[d], beyond = at - w.kernel[d] + w.stride[d];
  const int32 last = at < 0 ? 0 : at / w.stride[d] + 1;
  return Range{beyond > 0 ? beyond / w.stride[d] : 0, last < w.output[d] ? last : w.output[d]};
}
