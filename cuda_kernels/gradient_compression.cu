// Compression of gradient buckets: rounding to half precision with error feedback.
#include "gpunet.cuh"

extern "C" __global__ void round_with_feedback(const float* bucket, float* error, float16* rounded, int64 n) {
  GPUNET_LOOP(i, n) {
    const float wanted = bucket[i] + error[i];
    store(rounded, i, wanted);
    const float rest = wanted - load(rounded, i);
    // What overflows leaves no error: infinite and NaN values differ from themselves less themselves.
    error[i] = rest - rest == 0 ? rest : 0.0f;
  }
}
