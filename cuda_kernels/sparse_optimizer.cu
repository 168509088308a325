// Updates of single rows. The rows are sorted (sorting.cu): all occurrences of a row are neighbours, in order, and one thread (or,
// for sums over a row, one block) applies them one after the other, as the CPU does.
#include "gpunet.cuh"
#include "optimizer.cuh"

// Where the occurrences are. Rows from row_count on do not exist.
struct Occurrences {
  const uint32 *rows, *order;
  int64 n, block, row_count;

  __device__ bool starts(int64 i) const { return rows[i] < row_count && (i == 0 || rows[i - 1] != rows[i]); }
};

#define GPUNET_ROWS_PARAMETERS const uint32* rows, const uint32* order, int64 n, int64 block, int64 row_count
#define GPUNET_ROWS \
  Occurrences { rows, order, n, block, row_count }

// For each element of each row: update.begin(its index), update.step(index of the gradient) for each occurrence, update.end(its
// index).
template <typename U>
__device__ inline void update_rows(const Occurrences& o, U update) {
  GPUNET_LOOP(at, o.n * o.block) {
    const int64 first = at / o.block, column = at - first * o.block;
    if (!o.starts(first)) continue;
    const uint32 row = o.rows[first];
    const int64 element = (int64)row * o.block + column;
    update.begin(element);
    for (int64 i = first; i < o.n && o.rows[i] == row; ++i) update.step((int64)o.order[i] * o.block + column);
    update.end(element);
  }
}

template <typename T>
struct MomentumUpdate {
  const T* g;
  T *step_out, *m, *w;
  T rate, momentum;
  int32 nesterov;
  T parameter, moment;
  __device__ void begin(int64 e) {
    parameter = w[e];
    moment = m[e];
  }
  __device__ void step(int64 i) {
    const T change = momentum_step(g[i], &moment, rate, momentum, nesterov);
    parameter -= change;
    step_out[i] = change;
  }
  __device__ void end(int64 e) const {
    w[e] = parameter;
    m[e] = moment;
  }
};

template <typename T>
struct AdagradUpdate {
  const T* g;
  T *w, *h;
  T rate, epsilon, weight_decay;
  T parameter, sum;
  __device__ void begin(int64 e) {
    parameter = w[e];
    sum = h[e];
  }
  __device__ void step(int64 i) {
    const T gradient = weight_decay != 0 ? parameter * weight_decay + g[i] : g[i];
    sum += gradient * gradient;
    parameter += rate / (sqrt(sum) + epsilon) * gradient;
  }
  __device__ void end(int64 e) const {
    w[e] = parameter;
    h[e] = sum;
  }
};

template <typename T>
struct AdadeltaUpdate {
  const T* g;
  T *w, *h, *d;
  T rate;
  double epsilon, decay;
  T parameter, squares, steps;
  __device__ void begin(int64 e) {
    parameter = w[e];
    squares = h[e];
    steps = d[e];
  }
  __device__ void step(int64 i) { adadelta_step(g[i], &parameter, &squares, &steps, rate, epsilon, decay); }
  __device__ void end(int64 e) const {
    w[e] = parameter;
    h[e] = squares;
    d[e] = steps;
  }
};

template <typename T>
struct AdamUpdate {
  const T* g;
  T *w, *m, *v, *effective;
  T rate, factor;
  bool divide;
  double beta1, beta2, epsilon;
  T parameter, mean, square;
  __device__ void begin(int64 e) {
    parameter = w[e];
    mean = m[e];
    square = v[e];
  }
  __device__ void step(int64 i) {
    adam_moments(g[i], &mean, &square, beta1, beta2);
    T change = factor * mean;
    if (divide) change /= sqrt(square) + (T)epsilon;
    parameter += rate * change;
    if (effective != nullptr) effective[i] = change;
  }
  __device__ void end(int64 e) const {
    w[e] = parameter;
    m[e] = mean;
    v[e] = square;
  }
};

template <typename T>
struct FtrlUpdate {
  const T* g;
  T *w, *nz;
  T alpha;
  double beta, lambda1, lambda2;
  T parameter, squares, z;
  __device__ void begin(int64 e) {
    parameter = w[e];
    squares = nz[2 * e];
    z = nz[2 * e + 1];
  }
  __device__ void step(int64 i) { ftrl_step(g[i], &parameter, &squares, &z, alpha, beta, lambda1, lambda2); }
  __device__ void end(int64 e) const {
    w[e] = parameter;
    nz[2 * e] = squares;
    nz[2 * e + 1] = z;
  }
};

template <typename T>
struct StormUpdate {
  const T* g;
  T *w, *m;
  T rate, keep;
  T parameter, moment;
  __device__ void begin(int64 e) {
    parameter = w[e];
    moment = m[e];
  }
  __device__ void step(int64 i) {
    moment = g[i] + (moment - g[i]) * keep;
    parameter += moment * rate;
  }
  __device__ void end(int64 e) const {
    w[e] = parameter;
    m[e] = moment;
  }
};

// w += rate * g
template <typename T>
struct AddUpdate {
  const T* g;
  T* w;
  T rate;
  T parameter;
  __device__ void begin(int64 e) { parameter = w[e]; }
  __device__ void step(int64 i) { parameter += rate * g[i]; }
  __device__ void end(int64 e) const { w[e] = parameter; }
};

// w *= weight, as often as the row occurs
template <typename T>
struct ScaleUpdate {
  T* w;
  T weight;
  T parameter;
  __device__ void begin(int64 e) { parameter = w[e]; }
  __device__ void step(int64) { parameter *= weight; }
  __device__ void end(int64 e) const { w[e] = parameter; }
};

// Factor of the step of Adam, and whether it is divided by the root of the second moment; rectified as in
// cpu_fallback/sparse_optimizer.py.
__device__ inline double adam_factor(double beta1, double beta2, int64 iteration, int32 rectified, int32* divide) {
  *divide = 1;
  if (!rectified) return adam_correction(beta1, beta2, iteration);
  const double t = (double)(iteration + 1), longest = 2 / (1 - beta2) - 1, power = pow(beta2, t);
  const double length = longest - 2 * t * power / (1 - power);
  if (length < 5) {
    *divide = 0;
    return 1 / (1 - pow(beta1, t));
  }
  const double term = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length);
  return sqrt(term) * adam_correction(beta1, beta2, iteration);
}

template <typename T, typename L>
__device__ inline void sparse_adam(const Occurrences& o, const T* g, const L* lr, const int64* iteration, T* w, T* m, T* v,
                                   T* effective, double beta1, double beta2, double epsilon, int32 rectified) {
  __shared__ double factor[1];
  __shared__ int32 divide[1];
  if (threadIdx.x == 0) factor[0] = adam_factor(beta1, beta2, iteration[0], rectified, divide);
  __syncthreads();
  update_rows(o, AdamUpdate<T>{g, w, m, v, effective, (T)lr[0], (T)factor[0], divide[0] != 0, beta1, beta2, epsilon});
}

template <typename T, typename L>
__device__ inline void sparse_storm(const Occurrences& o, const T* g, const L* lr, const T* total, T* w, T* m,
                                    double momentum, double beta) {
  __shared__ double factor[1];
  if (threadIdx.x == 0) {
    const double sum = (double)total[0] + beta;
    factor[0] = sum != 0 ? (double)lr[0] * pow(sum, -1.0 / 3) : 1 / sum;
  }
  __syncthreads();
  update_rows(o, StormUpdate<T>{g, w, m, (T)factor[0], (T)(1 - momentum * factor[0] * factor[0])});
}

// One sum of squares a row: a block for each row.
template <typename T, typename L>
__device__ inline void rowwise_adagrad(const Occurrences& o, const T* g, const L* lr, T* w, T* h, double epsilon,
                                       double weight_decay) {
  __shared__ T scratch[32];
  const T decay = (T)weight_decay;
  for (int64 first = blockIdx.x; first < o.n; first += gridDim.x) {
    if (!o.starts(first)) continue;
    const uint32 row = o.rows[first];
    T* parameters = w + (int64)row * o.block;
    T sum = h[row];
    for (int64 i = first; i < o.n && o.rows[i] == row; ++i) {
      const T* gradients = g + (int64)o.order[i] * o.block;
      T squares = 0;
      for (int64 c = threadIdx.x; c < o.block; c += blockDim.x) {
        const T gradient = decay != 0 ? gradients[c] + decay * parameters[c] : gradients[c];
        squares += gradient * gradient;
      }
      sum += block_reduce(squares, scratch, (T)0, Sum()) / (T)o.block;
      const T rate = (T)lr[0] / (sqrt(sum) + (T)epsilon);
      for (int64 c = threadIdx.x; c < o.block; c += blockDim.x) {
        const T gradient = decay != 0 ? gradients[c] + decay * parameters[c] : gradients[c];
        parameters[c] += rate * gradient;
      }
    }
    if (threadIdx.x == 0) h[row] = sum;
  }
}

// One second moment a row: a block for each row.
template <typename T, typename L>
__device__ inline void rowwise_adam(const Occurrences& o, const T* g, const L* lr, const int64* iteration, T* w, T* m, T* v,
                                    T* effective, double beta1, double beta2, double epsilon) {
  __shared__ T scratch[32];
  __shared__ double correction[1];
  if (threadIdx.x == 0) correction[0] = adam_correction(beta1, beta2, iteration[0]);
  __syncthreads();
  const T factor = (T)correction[0], rate = (T)lr[0];
  for (int64 first = blockIdx.x; first < o.n; first += gridDim.x) {
    if (!o.starts(first)) continue;
    const uint32 row = o.rows[first];
    const int64 element = (int64)row * o.block;
    T square = v[row];
    for (int64 i = first; i < o.n && o.rows[i] == row; ++i) {
      const int64 gradient = (int64)o.order[i] * o.block;
      T squares = 0;
      for (int64 c = threadIdx.x; c < o.block; c += blockDim.x) squares += g[gradient + c] * g[gradient + c];
      squares = block_reduce(squares, scratch, (T)0, Sum()) / (T)o.block;
      square = (T)beta2 * square + (T)(1 - beta2) * squares;
      for (int64 c = threadIdx.x; c < o.block; c += blockDim.x) {
        const T mean = (T)beta1 * m[element + c] + (T)(1 - beta1) * g[gradient + c];
        const T change = factor * mean / (sqrt(square) + (T)epsilon);
        w[element + c] += rate * change;
        m[element + c] = mean;
        if (effective != nullptr) effective[gradient + c] = change;
      }
    }
    if (threadIdx.x == 0) v[row] = square;
  }
}

#define UPDATES(S, T, LS, L)                                                                                           \
  extern "C" __global__ void sparse_momentum_sgd_fwd_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* g, const L* lr,      \
                                                                T* step, T* m, T* w, double momentum,                 \
                                                                int32 nesterov) {                                     \
    update_rows(GPUNET_ROWS, MomentumUpdate<T>{g, step, m, w, (T)lr[0], (T)momentum, nesterov});                      \
  }                                                                                                                   \
  extern "C" __global__ void sparse_adagrad_fwd_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* g, const L* lr, T* w,     \
                                                           T* h, double epsilon, double weight_decay) {               \
    update_rows(GPUNET_ROWS, AdagradUpdate<T>{g, w, h, (T)lr[0], (T)epsilon, (T)weight_decay});                       \
  }                                                                                                                   \
  extern "C" __global__ void rowwise_adagrad_fwd_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* g, const L* lr, T* w,    \
                                                            T* h, double epsilon, double weight_decay) {              \
    rowwise_adagrad(GPUNET_ROWS, g, lr, w, h, epsilon, weight_decay);                                                 \
  }                                                                                                                   \
  extern "C" __global__ void sparse_adadelta_fwd_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* g, const L* lr, T* w,    \
                                                            T* h, T* d, double epsilon, double decay) {               \
    update_rows(GPUNET_ROWS, AdadeltaUpdate<T>{g, w, h, d, (T)lr[0], epsilon, decay});                                \
  }                                                                                                                   \
  extern "C" __global__ void sparse_adam_fwd_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* g, const L* lr,              \
                                                        const int64* iteration, T* w, T* m, T* v, T* effective,       \
                                                        double beta1, double beta2, double epsilon,                   \
                                                        int32 rectified) {                                            \
    sparse_adam(GPUNET_ROWS, g, lr, iteration, w, m, v, effective, beta1, beta2, epsilon, rectified);                 \
  }                                                                                                                   \
  extern "C" __global__ void rowwise_adam_fwd_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* g, const L* lr,             \
                                                         const int64* iteration, T* w, T* m, T* v, T* effective,      \
                                                         double beta1, double beta2, double epsilon) {                \
    rowwise_adam(GPUNET_ROWS, g, lr, iteration, w, m, v, effective, beta1, beta2, epsilon);                           \
  }                                                                                                                   \
  extern "C" __global__ void sparse_ftrl_fwd_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* g, const L* rate, T* w,      \
                                                        T* nz, double alpha, double beta, double lambda1,             \
                                                        double lambda2) {                                             \
    update_rows(GPUNET_ROWS,                                                                                          \
                FtrlUpdate<T>{g, w, nz, rate == nullptr ? (T)alpha : (T)rate[0], beta, lambda1, lambda2});            \
  }                                                                                                                   \
  extern "C" __global__ void sparse_storm_fwd_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* g, const L* lr,             \
                                                         const T* total, T* w, T* m, double momentum, double beta) {  \
    sparse_storm(GPUNET_ROWS, g, lr, total, w, m, momentum, beta);                                                    \
  }                                                                                                                   \
  extern "C" __global__ void sparse_wngrad_fwd_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* g, const L* lr,            \
                                                          const T* scale, T* w, double epsilon) {                     \
    update_rows(GPUNET_ROWS, AddUpdate<T>{g, w, (T)((double)lr[0] / ((double)scale[0] + epsilon))});                  \
  }                                                                                                                   \
  extern "C" __global__ void scatter_scale_##S##_##LS(GPUNET_ROWS_PARAMETERS, const L* weight, T* w) {                \
    if (weight[0] != 1) update_rows(GPUNET_ROWS, ScaleUpdate<T>{w, (T)weight[0]});                                    \
  }                                                                                                                   \
  extern "C" __global__ void scatter_add_##S##_##LS(GPUNET_ROWS_PARAMETERS, const T* x, const L* weight, T* w) {      \
    update_rows(GPUNET_ROWS, AddUpdate<T>{x, w, (T)weight[0]});                                                       \
  }
#define REALS(S, T) UPDATES(S, T, f32, float) UPDATES(S, T, f64, double)
REALS(f32, float)
REALS(f64, double)
