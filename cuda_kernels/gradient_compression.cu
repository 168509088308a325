// Compression of gradient buckets: rounding to half precision with error feedback, orthonormal factors, the largest elements.
#include "gpunet.cuh"

template <typename T>
__device__ inline void round_with_feedback(const float* bucket, float* error, T* rounded, int64 n) {
  GPUNET_LOOP(i, n) {
    const float wanted = bucket[i] + error[i];
    store(rounded, i, wanted);
    const float rest = wanted - load(rounded, i);
    // What overflows leaves no error: infinite and NaN values differ from themselves less themselves.
    error[i] = rest - rest == 0 ? rest : 0.0f;
  }
}
#define ROUND(S, T)                                                                                                          \
  extern "C" __global__ void round_with_feedback_##S(const float* bucket, float* error, T* rounded, int64 n) {               \
    round_with_feedback(bucket, error, rounded, n);                                                                          \
  }
ROUND(f16, float16) GPUNET_IF_BFLOAT16(ROUND(bf16, bfloat16))

// ---- PowerSGD ----

__device__ inline double column_product(const double* a, const double* b, int64 rows, double* parts) {
  double total = 0;
  for (int64 r = threadIdx.x; r < rows; r += blockDim.x) total += a[r] * b[r];
  return block_reduce(total, parts, 0.0, Sum());
}

// Gram and Schmidt's method on the columns of p (rows x rank), twice for each; `work` holds them one after another. One block.
// What is left of a column that depends on those before is a direction of rounding errors only: it becomes 0.
extern "C" __global__ void orthonormalize(float* p, double* work, int64 rows, int64 rank) {
  __shared__ double parts[32];
  for (int64 i = threadIdx.x; i < rows * rank; i += blockDim.x) work[i % rank * rows + i / rank] = p[i];
  __syncthreads();
  for (int64 k = 0; k < rank; ++k) {
    double* column = work + k * rows;
    const double before = sqrt(column_product(column, column, rows, parts));
    for (int round = 0; round < 2; ++round)
      for (int64 j = 0; j < k; ++j) {
        const double* other = work + j * rows;
        const double along = column_product(other, column, rows, parts);
        for (int64 r = threadIdx.x; r < rows; r += blockDim.x) column[r] -= along * other[r];
        __syncthreads();
      }
    const double norm = sqrt(column_product(column, column, rows, parts));
    const double least = 1e-7 * before > 1e-20 ? 1e-7 * before : 1e-20;
    const double factor = norm <= least ? 0.0 : 1.0 / norm;
    for (int64 r = threadIdx.x; r < rows; r += blockDim.x) {
      column[r] *= factor;
      p[r * rank + k] = (float)column[r];
    }
    __syncthreads();
  }
}

// ---- The largest elements ----
//
// Absolute values, as whole numbers, have the order of the numbers (NaN above all). The smallest one that is sent is found digit
// by digit, the highest first: `state` holds the digits found so far and how many elements of just that value are sent.

constexpr int kDigits = 256, kThreads = 256, kWarps = kThreads / 32, kPart = 2048;

__device__ inline uint32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

// velocity = momentum velocity + bucket, error += velocity; and the counts and the state of the search before its first digit.
extern "C" __global__ void largest_update(const float* bucket, float* velocity, float* error, uint32* counts, uint32* state,
                                          int64 n, int64 kept, double momentum) {
  GPUNET_LOOP(i, n) {
    const float speed = velocity[i] * (float)momentum + bucket[i];
    velocity[i] = speed;
    error[i] += speed;
  }
  GPUNET_LOOP(digit, kDigits) counts[digit] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    state[0] = 0;
    state[1] = (uint32)kept;
  }
}

// How many elements that have the digits found so far have each digit next.
extern "C" __global__ void largest_count(const float* error, const uint32* state, uint32* counts, int64 n, int32 shift) {
  __shared__ uint32 found[kDigits];
  for (int d = threadIdx.x; d < kDigits; d += blockDim.x) found[d] = 0;
  __syncthreads();
  const uint32 prefix = state[0];
  // In two steps: no shift of a number by all of its bits.
  GPUNET_LOOP(i, n) {
    const uint32 key = magnitude(error[i]);
    if (((key ^ prefix) >> shift >> 8) == 0) atomicAdd(&found[key >> shift & (kDigits - 1)], 1u);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < kDigits; d += blockDim.x)
    if (found[d] != 0) atomicAdd(&counts[d], found[d]);
}

// The next digit of the smallest element that is sent; clears the counts. One block.
extern "C" __global__ void largest_digit(uint32* counts, uint32* state, int32 shift) {
  __shared__ uint32 found[kDigits];
  for (int d = threadIdx.x; d < kDigits; d += blockDim.x) {
    found[d] = counts[d];
    counts[d] = 0;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32 wanted = state[1];
  int digit = kDigits - 1;
  for (; digit > 0 && found[digit] < wanted; --digit) wanted -= found[digit];
  state[0] |= (uint32)digit << shift;
  state[1] = wanted;
}

// Counts, in each part, of the elements above the smallest that is sent (first `parts` numbers) and of those equal to it.
extern "C" __global__ void largest_parts(const float* error, const uint32* state, uint32* places, int64 n, int64 parts) {
  __shared__ uint32 found[2];
  const uint32 least = state[0];
  for (int64 part = blockIdx.x; part < parts; part += gridDim.x) {
    __syncthreads();
    if (threadIdx.x < 2) found[threadIdx.x] = 0;
    __syncthreads();
    const int64 end = (part + 1) * kPart < n ? (part + 1) * kPart : n;
    for (int64 i = part * kPart + threadIdx.x; i < end; i += kThreads) {
      const uint32 key = magnitude(error[i]);
      if (key >= least) atomicAdd(&found[key == least], 1u);
    }
    __syncthreads();
    if (threadIdx.x < 2) places[threadIdx.x * parts + part] = found[threadIdx.x];
  }
}

// Moves what is sent to its place: all elements above the smallest and the first of those equal to it. `before` are the counts of
// the parts, each replaced by the sum of those before it.
extern "C" __global__ void largest_move(float* error, float* velocity, const uint32* state, const uint32* before, int32* places,
                                        float* values, int64 n, int64 parts) {
  __shared__ uint32 found[2][kWarps];
  const uint32 least = state[0], wanted = state[1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned lower = (1u << lane) - 1;
  for (int64 part = blockIdx.x; part < parts; part += gridDim.x) {
    uint32 above = before[part], equal = before[parts + part];
    const int64 end = (part + 1) * kPart < n ? (part + 1) * kPart : n;
    for (int64 start = part * kPart; start < end; start += kThreads) {
      const int64 i = start + threadIdx.x;
      const uint32 key = i < end ? magnitude(error[i]) : 0;
      const bool is_above = i < end && key > least, is_equal = i < end && key == least;
      const unsigned all_above = __ballot_sync(0xffffffffu, is_above), all_equal = __ballot_sync(0xffffffffu, is_equal);
      __syncthreads();
      if (lane == 0) {
        found[0][warp] = (uint32)__popc(all_above);
        found[1][warp] = (uint32)__popc(all_equal);
      }
      __syncthreads();
      uint32 a = above + (uint32)__popc(all_above & lower), e = equal + (uint32)__popc(all_equal & lower);
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) {
          a += found[0][w];
          e += found[1][w];
        }
        above += found[0][w];
        equal += found[1][w];
      }
      if (is_above || (is_equal && e < wanted)) {
        const uint32 place = a + (e < wanted ? e : wanted);
        places[place] = (int32)i;
        values[place] = error[i];
        error[i] = 0.0f;
        velocity[i] = 0.0f;
      }
    }
  }
}
