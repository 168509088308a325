// Batch normalization over all ranks: what is done by channel. The passes over the data are those of normalization.cu.
#include "gpunet.cuh"

// Sums of X and of X^2 from the means, and the sums of squared distances to them, of slices; then how many.
extern "C" __global__ void sync_bn_moments(const double* partial, double* moments, int64 channels, int64 count, int64 slices,
                                           int64 length) {
  if (blockIdx.x == 0 && threadIdx.x == 0) moments[2 * channels] = (double)count;
  GPUNET_LOOP(c, channels) {
    double sum = 0, squares = 0;
    for (int64 slice = 0; slice < slices && count > 0; ++slice) {
      const double n = (double)((slice + 1) * length < count ? length : count - slice * length);
      const double mean = partial[2 * slice * channels + c];
      sum += n * mean;
      squares += partial[(2 * slice + 1) * channels + c] + n * mean * mean;
    }
    moments[c] = sum;
    moments[channels + c] = squares;
  }
}

template <typename U>
__device__ void sync_bn_statistics(const double* moments, const U* scale, const U* bias, U* running_mean, U* running_var,
                                   U* saved_mean, U* saved_inv_std, uint8* factors, int64 channels, double epsilon,
                                   double momentum) {
  const double total = moments[2 * channels];
  GPUNET_LOOP(c, channels) {
    if (total == 0) {
      // No rank has data: the running statistics stay.
      saved_mean[c] = saved_inv_std[c] = 0;
      ((U*)factors)[c] = ((U*)factors)[channels + c] = 0;
      continue;
    }
    const double mean = moments[c] / total;
    double variance = moments[channels + c] / total - mean * mean;
    if (variance < 0) variance = 0;
    const double unbiased = variance * (total / (total - 1)), inv_std = 1.0 / sqrt(variance + epsilon);
    running_mean[c] = (U)(momentum * running_mean[c] + (1 - momentum) * mean);
    running_var[c] = (U)(momentum * running_var[c] + (1 - momentum) * unbiased);
    saved_mean[c] = (U)mean;
    saved_inv_std[c] = (U)inv_std;
    const double factor = scale[c] * inv_std;
    ((U*)factors)[c] = (U)factor;
    ((U*)factors)[channels + c] = (U)(bias[c] - mean * factor);
  }
}

// This rank's gradients of scale and bias, and both times its weight.
template <typename U>
__device__ void sync_bn_bwd_local(const double* partial, const U* inv_std, const float* weight, U* dscale, U* dbias, double* sums,
                                  int64 channels, int64 count, int64 slices) {
  const double share = weight[0];
  GPUNET_LOOP(c, channels) {
    double of_bias = 0, of_scale = 0;
    // A rank without samples has gradients of 0/0, which must not spread.
    if (share != 0 && count > 0)
      for (int64 slice = 0; slice < slices; ++slice) {
        of_bias += partial[2 * slice * channels + c];
        of_scale += partial[(2 * slice + 1) * channels + c];
      }
    of_scale *= inv_std[c];
    dscale[c] = (U)of_scale;
    dbias[c] = (U)of_bias;
    sums[c] = share * of_bias;
    sums[channels + c] = share * of_scale;
  }
}

// Slope, offset and factor of dX = factor (dY + slope X + offset).
template <typename U>
__device__ void sync_bn_bwd_global(const double* moments, const double* sums, const float* weight, const U* scale, const U* mean,
                                   const U* inv_std, uint8* factors, int64 channels) {
  const double count = moments[2 * channels] * (double)weight[0];
  GPUNET_LOOP(c, channels) {
    const double center = mean[c], inv = inv_std[c];
    const double slope = count == 0 ? 0.0 : -sums[channels + c] * inv / count;
    const double offset = count == 0 ? 0.0 : -slope * center - sums[c] / count;
    ((U*)factors)[c] = (U)slope;
    ((U*)factors)[channels + c] = (U)offset;
    ((U*)factors)[2 * channels + c] = (U)(scale[c] * inv);
  }
}

#define SYNC_BN(S, U)                                                                                                  \
  extern "C" __global__ void sync_bn_statistics_##S(const double* moments, const U* scale, const U* bias,              \
                                                    U* running_mean, U* running_var, U* saved_mean, U* saved_inv_std,  \
                                                    uint8* factors, int64 channels, double epsilon, double momentum) { \
    sync_bn_statistics(moments, scale, bias, running_mean, running_var, saved_mean, saved_inv_std, factors, channels,  \
                       epsilon, momentum);                                                                             \
  }                                                                                                                    \
  extern "C" __global__ void sync_bn_bwd_local_##S(const double* partial, const U* inv_std, const float* weight,       \
                                                   U* dscale, U* dbias, double* sums, int64 channels, int64 count,     \
                                                   int64 slices) {                                                     \
    sync_bn_bwd_local(partial, inv_std, weight, dscale, dbias, sums, channels, count, slices);                         \
  }                                                                                                                    \
  extern "C" __global__ void sync_bn_bwd_global_##S(const double* moments, const double* sums, const float* weight,    \
                                                    const U* scale, const U* mean, const U* inv_std, uint8* factors,   \
                                                    int64 channels) {                                                  \
    sync_bn_bwd_global(moments, sums, weight, scale, mean, inv_std, factors, channels);                                \
  }
SYNC_BN(f32, float)
SYNC_BN(f64, double)
