// Gather and its inverse, the largest values, and where they are.
#include "rows.cuh"
#include "sums.cuh"

#define GPUNET_MOVED(M) M(u8, uint8) M(u16, uint16) M(i32, int32) M(i64, int64)

// Rows of `block` elements; a row that does not exist is 0.
template <typename T, typename I>
__device__ inline void gather(const T* data, T* y, uint64* errors, uint64 code, int64 count, int64 block,
                              const Picked<I>& picks) {
  GPUNET_LOOP(at, count * block) {
    const int64 pick = at / block, row = picks.row(pick, errors, code);
    y[at] = row < 0 ? (T)0 : data[row * block + (at - pick * block)];
  }
}

#define GATHER(S, T, IS, I)                                                                                            \
  extern "C" __global__ void gather_fwd_##S##_##IS(const T* data, const I* indices, T* y, uint64* errors, uint64 code, \
                                                   int64 count, int64 block, int64 picked, int64 outer_step,          \
                                                   int64 size, int32 wrap) {                                          \
    gather(data, y, errors, code, count, block, Picked<I>{indices, picked, outer_step, size, wrap});                  \
  }
#define GATHERS(S, T) GATHER(S, T, i32, int32) GATHER(S, T, i64, int64)
GPUNET_MOVED(GATHERS)

// Adds up the values of each row, in order; `rows` are sorted, `order` tells which value each is. Rows from row_count on do not count.
template <typename T>
__device__ inline void sum_rows(const uint32* rows, const uint32* order, const T* values, T* y, int64 n, int64 block,
                                int64 row_count) {
  GPUNET_LOOP(at, n * block) {
    const int64 first = at / block, column = at - first * block;
    const uint32 row = rows[first];
    if (row >= row_count || (first > 0 && rows[first - 1] == row)) continue;
    typename Total<T>::type total = 0;
    for (int64 i = first; i < n && rows[i] == row; ++i) total += load(values, (int64)order[i] * block + column);
    store(y, (int64)row * block + column, total);
  }
}

#define SUM_ROWS(S, T)                                                                                                 \
  extern "C" __global__ void sum_rows_##S(const uint32* rows, const uint32* order, const T* values, T* y, int64 n,    \
                                          int64 block, int64 row_count) {                                             \
    sum_rows(rows, order, values, y, n, block, row_count);                                                            \
  }
GPUNET_NUMBERS(SUM_ROWS)

// A value and its index along a line; without one, the index is negative.
template <typename C>
struct Ranked {
  C value;
  int64 index;
};

// Largest first, of equal ones the first first; a NaN comes before all numbers.
struct Descending {
  template <typename C>
  __device__ bool operator()(const Ranked<C>& a, const Ranked<C>& b) const {
    if (a.index < 0 || b.index < 0) return b.index < 0 && a.index >= 0;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan;
    if (a.value > b.value) return true;
    if (a.value < b.value) return false;
    return a.index < b.index;
  }
};

// Smallest first, otherwise the same.
struct Ascending {
  template <typename C>
  __device__ bool operator()(const Ranked<C>& a, const Ranked<C>& b) const {
    if (a.index < 0 || b.index < 0) return b.index < 0 && a.index >= 0;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan;
    if (a.value < b.value) return true;
    if (a.value > b.value) return false;
    return a.index < b.index;
  }
};

// Element j of a line lies at start + j * step.
struct Line {
  int64 start, step;
  __device__ Line(int64 line, int64 size, int64 inner) : start(line / inner * size * inner + line % inner), step(inner) {}
  __device__ int64 at(int64 j) const { return start + j * step; }
};

// The first in order of what all threads of a block hold.
template <typename C, typename Before>
__device__ inline Ranked<C> block_first(Ranked<C> mine, C* values, int64* indices, Before before) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const Ranked<C> other = {__shfl_down_sync(0xffffffffu, mine.value, offset),
                             __shfl_down_sync(0xffffffffu, mine.index, offset)};
    if (before(other, mine)) mine = other;
  }
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    values[warp] = mine.value;
    indices[warp] = mine.index;
  }
  __syncthreads();
  Ranked<C> best = {values[0], indices[0]};
  for (int w = 1; w < warps; ++w) {
    const Ranked<C> other = {values[w], indices[w]};
    if (before(other, best)) best = other;
  }
  return best;
}

// A block for each line.
template <typename T, typename Before>
__device__ inline void arg_blocks(const T* x, int64* y, int64 lines, int64 size, int64 inner, Before before) {
  typedef typename Total<T>::type C;
  __shared__ C values[32];
  __shared__ int64 indices[32];
  for (int64 l = blockIdx.x; l < lines; l += gridDim.x) {
    const Line line(l, size, inner);
    Ranked<C> best = {(C)0, -1};
    for (int64 j = threadIdx.x; j < size; j += blockDim.x) {
      const Ranked<C> next = {(C)load(x, line.at(j)), j};
      if (before(next, best)) best = next;
    }
    best = block_first(best, values, indices, before);
    if (threadIdx.x == 0) y[l] = best.index;
  }
}

// A thread for each line.
template <typename T, typename Before>
__device__ inline void arg_lines(const T* x, int64* y, int64 lines, int64 size, int64 inner, Before before) {
  typedef typename Total<T>::type C;
  GPUNET_LOOP(l, lines) {
    const Line line(l, size, inner);
    Ranked<C> best = {(C)0, -1};
    for (int64 j = 0; j < size; ++j) {
      const Ranked<C> next = {(C)load(x, line.at(j)), j};
      if (before(next, best)) best = next;
    }
    y[l] = best.index;
  }
}

#define ARG(NAME, ORDER, S, T)                                                                                         \
  extern "C" __global__ void NAME##_fwd_##S(const T* x, int64* y, int64 lines, int64 size, int64 inner) {             \
    arg_lines(x, y, lines, size, inner, ORDER());                                                                     \
  }                                                                                                                   \
  extern "C" __global__ void NAME##_long_##S(const T* x, int64* y, int64 lines, int64 size, int64 inner) {            \
    arg_blocks(x, y, lines, size, inner, ORDER());                                                                    \
  }
#define ARGS(S, T) ARG(arg_max, Descending, S, T) ARG(arg_min, Ascending, S, T)
GPUNET_NUMBERS(ARGS)

// Value `rank` of a line: that at index j, or nothing where there is none.
template <typename T>
__device__ inline void put_ranked(const T* x, T* values, int64* indices, int64* flat, const Line& from, const Line& to,
                                  int64 rank, int64 j) {
  const int64 place = to.at(rank);
  values[place] = j < 0 ? (T)0 : x[from.at(j)];
  indices[place] = j;
  if (flat != nullptr) flat[place] = j < 0 ? -1 : from.at(j);
}

// A block for each line looks for one value after the other.
template <typename T>
__device__ inline void top_k_search(const T* x, T* values, int64* indices, int64* flat, int64 lines, int64 size, int64 inner,
                                    int64 k) {
  typedef typename Total<T>::type C;
  __shared__ C best_values[32];
  __shared__ int64 best_indices[32];
  const Descending before;
  for (int64 l = blockIdx.x; l < lines; l += gridDim.x) {
    const Line from(l, size, inner), to(l, k, inner);
    Ranked<C> last = {(C)0, -1};
    for (int64 rank = 0; rank < k; ++rank) {
      Ranked<C> best = {(C)0, -1};
      if (rank < size) {
        for (int64 j = threadIdx.x; j < size; j += blockDim.x) {
          const Ranked<C> next = {(C)load(x, from.at(j)), j};
          if ((rank == 0 || before(last, next)) && before(next, best)) best = next;
        }
        best = block_first(best, best_values, best_indices, before);
      }
      if (threadIdx.x == 0) put_ranked(x, values, indices, flat, from, to, rank, best.index);
      last = best;
    }
  }
}

constexpr int kSorted = 1024;

// A block for each line of at most kSorted elements sorts it (bitonic: pairs at halving distances in runs of doubling length).
template <typename T>
__device__ inline void top_k_sort(const T* x, T* values, int64* indices, int64* flat, int64 lines, int64 size, int64 inner,
                                  int64 k) {
  typedef typename Total<T>::type C;
  __shared__ C value[kSorted];
  __shared__ int32 index[kSorted];
  const Descending before;
  int length = 2;
  while (length < size) length *= 2;
  for (int64 l = blockIdx.x; l < lines; l += gridDim.x) {
    const Line from(l, size, inner), to(l, k, inner);
    for (int j = threadIdx.x; j < length; j += blockDim.x) {
      value[j] = j < size ? (C)load(x, from.at(j)) : (C)0;
      index[j] = j < size ? j : -1;
    }
    __syncthreads();
    for (int run = 2; run <= length; run *= 2)
      for (int distance = run / 2; distance > 0; distance /= 2) {
        for (int pair = threadIdx.x; pair < length / 2; pair += blockDim.x) {
          const int i = pair / distance * distance * 2 + pair % distance, j = i + distance;
          const Ranked<C> a = {value[i], index[i]}, b = {value[j], index[j]};
          if ((i & run) == 0 ? before(b, a) : before(a, b)) {
            value[i] = b.value;
            index[i] = (int32)b.index;
            value[j] = a.value;
            index[j] = (int32)a.index;
          }
        }
        __syncthreads();
      }
    for (int64 rank = threadIdx.x; rank < k; rank += blockDim.x)
      put_ranked(x, values, indices, flat, from, to, rank, rank < size ? (int64)index[rank] : -1);
    __syncthreads();
  }
}

#define TOP_K(S, T)                                                                                                    \
  extern "C" __global__ void top_k_search_##S(const T* x, T* values, int64* indices, int64* flat, int64 lines,        \
                                              int64 size, int64 inner, int64 k) {                                     \
    top_k_search(x, values, indices, flat, lines, size, inner, k);                                                    \
  }                                                                                                                   \
  extern "C" __global__ void top_k_sort_##S(const T* x, T* values, int64* indices, int64* flat, int64 lines,          \
                                            int64 size, int64 inner, int64 k) {                                       \
    top_k_sort(x, values, indices, flat, lines, size, inner, k);                                                      \
  }
GPUNET_NUMBERS(TOP_K)

// To the places of the values; dx holds 0 elsewhere. A negative index has none.
template <typename T, typename I>
__device__ inline void top_k_bwd(const T* dvalues, const I* indices, T* dx, uint64* errors, uint64 code, int64 n, int64 size,
                                 int64 inner, int64 k) {
  GPUNET_LOOP(at, n) {
    const int64 line = at / (k * inner) * inner + at % inner, j = (int64)indices[at];
    if (j >= size)
      report_error(errors, code, at, error_bits(j));
    else if (j >= 0)
      dx[Line(line, size, inner).at(j)] = dvalues[at];
  }
}

#define TOP_K_BWD(S, T, IS, I)                                                                                         \
  extern "C" __global__ void top_k_bwd_##S##_##IS(const T* dvalues, const I* indices, T* dx, uint64* errors,          \
                                                  uint64 code, int64 n, int64 size, int64 inner, int64 k) {           \
    top_k_bwd(dvalues, indices, dx, errors, code, n, size, inner, k);                                                 \
  }
#define TOP_K_BWDS(S, T) TOP_K_BWD(S, T, i32, int32) TOP_K_BWD(S, T, i64, int64)
GPUNET_FLOATS(TOP_K_BWDS)
