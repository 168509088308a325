// Dense parameter updates, each in one pass over the parameter. Rates and iteration numbers are read from device memory. Outputs
// may be the inputs of their in-place pairs: every thread reads its elements before it writes them.
#include "errors.cuh"
#include "optimizer.cuh"
#include "vector.cuh"

// The gradient, or (where there are weights) weights[0] g + weights[1] w: weight decay on the way.
template <typename T>
struct Decayed {
  bool on;
  T of_gradient, of_parameter;
  __device__ Decayed(const T* gradient_weight, const T* param_weight)
      : on(gradient_weight != nullptr), of_gradient(on ? gradient_weight[0] : (T)1), of_parameter(on ? param_weight[0] : (T)0) {}
  __device__ T operator()(T gradient, T parameter) const {
    return on ? gradient * of_gradient + parameter * of_parameter : gradient;
  }
};

template <typename T, typename L>
__device__ inline void momentum_sgd(const T* g, const T* m, const L* lr, const T* w, T* step, T* new_m, T* new_w,
                                    const T* gradient_weight, const T* param_weight, int64 n, double momentum, int32 nesterov) {
  const T rate = (T)lr[0], mu = (T)momentum;
  const Decayed<T> decayed(gradient_weight, param_weight);
  const T* const x[] = {g, m, new_w != nullptr ? w : nullptr};
  T* const y[] = {step, new_m, new_w};
  map_all(x, y, n, [=](const T(&in)[3], T(&out)[3]) {
    const T parameter = in[2];
    out[1] = in[1];
    out[0] = momentum_step(decayed(in[0], parameter), &out[1], rate, mu, nesterov);
    out[2] = parameter - out[0];
  });
}

template <typename T, typename L>
__device__ inline void adagrad(const T* w, const T* h, const T* g, const L* lr, T* new_w, T* new_h, T* rates, T* updates,
                               int64 n, double epsilon, double decay, double weight_decay) {
  const T learning_rate = (T)lr[0];
  const T* const x[] = {w, h, g};
  T* const y[] = {new_w, new_h, rates, updates};
  map_all(x, y, n, [=](const T(&in)[3], T(&out)[4]) {
    const T parameter = in[0];
    const T gradient = weight_decay != 0 ? parameter * (T)weight_decay + in[2] : in[2];
    const T sum = decay != 1 ? in[1] * (T)decay + gradient * gradient : in[1] + gradient * gradient;
    out[2] = learning_rate / (sqrt(sum) + (T)epsilon);
    out[3] = out[2] * gradient;
    out[1] = sum;
    out[0] = parameter + out[3];
  });
}

template <typename T, typename L>
__device__ inline void adadelta(const T* w, const T* h, const T* d, const T* g, const L* lr, T* new_w, T* new_h, T* new_d,
                                int64 n, double epsilon, double decay) {
  const T rate = (T)lr[0];
  const T* const x[] = {w, h, d, g};
  T* const y[] = {new_w, new_h, new_d};
  map_all(x, y, n, [=](const T(&in)[4], T(&out)[3]) {
    for (int i = 0; i < 3; ++i) out[i] = in[i];
    adadelta_step(in[3], &out[0], &out[1], &out[2], rate, epsilon, decay);
  });
}

template <typename T, typename L>
__device__ inline void rmsprop(const T* g, const T* squares, const T* m, const L* lr, T* step, T* new_squares, T* new_m,
                               int64 n, double decay, double momentum, double epsilon) {
  const T rate = (T)lr[0];
  const T* const x[] = {g, squares, m};
  T* const y[] = {step, new_squares, new_m};
  map_all(x, y, n, [=](const T(&in)[3], T(&out)[3]) {
    const T gradient = in[0], old = in[1];
    out[1] = old + (gradient * gradient - old) * (T)(1 - decay);
    out[0] = out[2] = in[2] * (T)momentum + gradient / sqrt(out[1] + (T)epsilon) * rate;
  });
}

template <typename T, typename L>
__device__ inline void adam(const T* w, const T* m, const T* v, const T* g, const L* lr, const int64* iteration, T* new_w,
                            T* new_m, T* new_v, T* effective, const T* gradient_weight, const T* param_weight, int64 n,
                            double beta1, double beta2, double epsilon) {
  __shared__ double correction[1];
  if (threadIdx.x == 0) correction[0] = adam_correction(beta1, beta2, iteration[0]);
  __syncthreads();
  const T factor = (T)correction[0], rate = (T)((double)lr[0] * correction[0]);
  const Decayed<T> decayed(gradient_weight, param_weight);
  const T* const x[] = {w, m, v, g};
  T* const y[] = {new_w, new_m, new_v, effective};
  map_all(x, y, n, [=](const T(&in)[4], T(&out)[4]) {
    out[1] = in[1];
    out[2] = in[2];
    adam_moments(decayed(in[3], in[0]), &out[1], &out[2], beta1, beta2);
    const T step = out[1] / (sqrt(out[2]) + (T)epsilon);
    out[0] = in[0] + step * rate;
    out[3] = step * factor;
  });
}

template <typename T, typename L>
__device__ inline void ftrl(const T* w, const T* nz, const T* g, const L* rate, T* new_w, T* new_nz, int64 n, double alpha,
                            double beta, double lambda1, double lambda2) {
  GPUNET_LOOP(i, n) {
    T parameter = w[i], squares = nz[2 * i], z = nz[2 * i + 1];
    ftrl_step(g[i], &parameter, &squares, &z, rate == nullptr ? (T)alpha : (T)rate[0], beta, lambda1, lambda2);
    new_w[i] = parameter;
    new_nz[2 * i] = squares;
    new_nz[2 * i + 1] = z;
  }
}

template <typename T>
__device__ inline void weight_scale(const T* w, const int64* iteration, T* new_w, int64 n, int64 step, int64 end, double scale) {
  const int64 t = iteration[0] + 1;
  const bool now = t % step == 0 && t < end;
  map(w, new_w, n, [=](T parameter) { return now ? parameter * (T)scale : parameter; });
}

// Sums of squares: `count` of them, which the next kernel adds up.
template <typename T>
__device__ inline void square_sums(const T* x, T* partial, int64 n, int64 count) {
  __shared__ T scratch[32];
  for (int64 part = blockIdx.x; part < count; part += gridDim.x) {
    T total = 0;
    for (int64 i = part * blockDim.x + threadIdx.x; i < n; i += count * blockDim.x) total += x[i] * x[i];
    total = block_reduce(total, scratch, (T)0, Sum());
    if (threadIdx.x == 0) partial[part] = total;
  }
}

template <typename T>
__device__ inline T sum_of_partial(const T* partial, int64 count, T* scratch) {
  T total = 0;
  for (int64 i = threadIdx.x; i < count; i += blockDim.x) total += partial[i];
  return block_reduce(total, scratch, (T)0, Sum());
}

template <typename T, typename L>
__device__ inline void wngrad(const T* w, const T* scale, const T* g, const L* lr, T* new_w, T* updates, int64 n, double epsilon) {
  const T rate = (T)((double)lr[0] / ((double)scale[0] + epsilon));
  const T* const x[] = {w, g};
  T* const y[] = {new_w, updates};
  map_all(x, y, n, [=](const T(&in)[2], T(&out)[2]) {
    out[1] = in[1] * rate;
    out[0] = in[0] + out[1];
  });
}

// One block.
template <typename T, typename L>
__device__ inline void wngrad_scale(const T* scale, const L* lr, const T* partial, T* new_scale, T* rate, int64 count,
                                    double epsilon) {
  __shared__ T scratch[32];
  const T total = sum_of_partial(partial, count, scratch);
  if (threadIdx.x != 0) return;
  const double divisor = (double)scale[0] + epsilon;
  if (rate != nullptr) rate[0] = (T)((double)lr[0] / divisor);
  new_scale[0] = scale[0] + (T)((double)total / divisor);
}

// One block.
template <typename T>
__device__ inline void storm_total(const T* total, const T* partial, T* new_total, int64 count) {
  __shared__ T scratch[32];
  const T sum = sum_of_partial(partial, count, scratch);
  if (threadIdx.x == 0) new_total[0] = total[0] + sum;
}

template <typename T, typename L>
__device__ inline void storm(const T* w, const T* m, const T* total, const T* g, const L* lr, T* new_w, T* new_m, int64 n,
                             double momentum, double beta) {
  __shared__ double factor[1];
  if (threadIdx.x == 0) {
    const double sum = (double)total[0] + beta;
    factor[0] = sum != 0 ? (double)lr[0] * pow(sum, -1.0 / 3) : 1 / sum;
  }
  __syncthreads();
  const T rate = (T)factor[0], keep = (T)(1 - momentum * factor[0] * factor[0]);
  const T* const x[] = {w, m, g};
  T* const y[] = {new_w, new_m};
  map_all(x, y, n, [=](const T(&in)[3], T(&out)[2]) {
    out[1] = in[2] + (in[1] - in[2]) * keep;
    out[0] = in[0] + out[1] * rate;
  });
}

// One block.
template <typename T, typename L>
__device__ inline void lars(const T* squares, const T* gradient_squares, const L* decay, const L* trust, const L* upper, T* y,
                            int64 count, double offset, double lower) {
  __shared__ T scratch[32];
  const double norm = sqrt((double)sum_of_partial(squares, count, scratch));
  const double gradient_norm = sqrt((double)sum_of_partial(gradient_squares, count, scratch));
  if (threadIdx.x != 0) return;
  double factor = 1;
  if (norm > 0) factor = (double)trust[0] / (gradient_norm / norm + (double)decay[0] + offset);
  if (factor > (double)upper[0]) factor = (double)upper[0];
  y[0] = (T)(factor < lower ? lower : factor);
}

// The momentum step, the averages, and `count` sums of squares each of the gradient and of its average.
template <typename T>
__device__ inline void yellowfin(const T* w, const T* m, const T* lr, const T* mu, const T* g_avg, const T* g2_avg, const T* g,
                                 T* new_w, T* new_m, T* new_g_avg, T* new_g2_avg, T* partial, int64 n, int64 count,
                                 double beta, int32 nesterov) {
  __shared__ T scratch[32];
  const T rate = lr[0], momentum = mu[0], keep = (T)beta, take = (T)(1 - beta);
  for (int64 part = blockIdx.x; part < count; part += gridDim.x) {
    T squares = 0, average_squares = 0;
    for (int64 i = part * blockDim.x + threadIdx.x; i < n; i += count * blockDim.x) {
      const T gradient = g[i], step = gradient * rate, moment = m[i] * momentum + step;
      new_w[i] = nesterov ? w[i] - step - moment * momentum : w[i] - moment;
      new_m[i] = moment;
      const T average = g_avg[i] * keep + gradient * take;
      new_g_avg[i] = average;
      new_g2_avg[i] = g2_avg[i] * keep + gradient * take * gradient;
      squares += gradient * gradient;
      average_squares += average * average;
    }
    squares = block_reduce(squares, scratch, (T)0, Sum());
    average_squares = block_reduce(average_squares, scratch, (T)0, Sum());
    if (threadIdx.x != 0) continue;
    partial[part] = squares;
    partial[count + part] = average_squares;
  }
}

// Rate and momentum from the statistics of the gradient, as in cpu_fallback/optimizer.py.
__device__ inline void yellowfin_values(double low, double high, double distance, double variance, double* rate,
                                        double* momentum) {
  const double p = distance * low * (distance * low) / (2 * variance);
  const double w = -pow((sqrt(p * p + 4.0 / 27 * p * p * p) + p) / 2, 1.0 / 3);
  const double root = w != 0 ? w - p / 3 / w + 1 : 1;
  const double spread = sqrt(high / low), least = (spread - 1) / (spread + 1);
  *momentum = fmax(root * root, least * least);
  *rate = (1 - sqrt(*momentum)) * (1 - sqrt(*momentum)) / low;
}

// One block.
template <typename T>
__device__ inline void yellowfin_tune(const T* lr, const T* mu, const T* window, const T* memory, const int64* iteration,
                                      const T* partial, T* new_lr, T* new_mu, T* new_window, T* new_memory, uint64* errors,
                                      uint64 code, int64 count, int64 width, double beta, double epsilon, int32 debias) {
  __shared__ T scratch[32];
  const double squares = (double)sum_of_partial(partial, count, scratch);
  const double average_squares = (double)sum_of_partial(partial + count, count, scratch);
  if (threadIdx.x != 0) return;
  const int64 step = iteration[0];
  if (step < 1) {
    report_error(errors, code, 0, error_bits(step));
    return;
  }
  const double rate = lr[0], momentum = mu[0], norm2 = fmax(epsilon, squares);
  double low = 0, high = 0;
  for (int64 i = 0; i < width; ++i) {
    const T value = i == (step - 1) % width ? (T)log(norm2) : window[i];
    new_window[i] = value;
    if (i >= step) continue;
    low = i == 0 || (double)value < low ? (double)value : low;
    high = i == 0 || (double)value > high ? (double)value : high;
  }
  const double observed[4] = {sqrt(norm2), norm2, low, high};
  double averages[5];
  for (int i = 0; i < 4; ++i) averages[i] = beta * (double)memory[i] + (1 - beta) * observed[i];
  averages[4] = beta * (double)memory[4] + (1 - beta) * averages[0] / averages[1];
  for (int i = 0; i < 5; ++i) new_memory[i] = (T)averages[i];
  if (step <= 1) {
    new_lr[0] = (T)rate;
    new_mu[0] = (T)momentum;
    return;
  }
  const double factor = debias ? 1 / (1 - pow(beta, (double)step)) : 1;
  const double variance = fmax(epsilon, factor * averages[1] - factor * factor * average_squares);
  double tuned_rate, tuned_momentum;
  yellowfin_values(fmax(epsilon, exp(factor * averages[2])), fmax(epsilon, exp(factor * averages[3])), factor * averages[4],
                   variance, &tuned_rate, &tuned_momentum);
  new_lr[0] = (T)(beta * rate + (1 - beta) * tuned_rate);
  new_mu[0] = (T)(beta * momentum + (1 - beta) * tuned_momentum);
}

#define UPDATES(S, T, LS, L)                                                                                           \
  extern "C" __global__ void momentum_sgd_fwd_##S##_##LS(const T* g, const T* m, const L* lr, const T* w, T* step,    \
                                                         T* new_m, T* new_w, const T* gradient_weight,                \
                                                         const T* param_weight, int64 n, double momentum,             \
                                                         int32 nesterov) {                                            \
    momentum_sgd(g, m, lr, w, step, new_m, new_w, gradient_weight, param_weight, n, momentum, nesterov);              \
  }                                                                                                                   \
  extern "C" __global__ void adagrad_fwd_##S##_##LS(const T* w, const T* h, const T* g, const L* lr, T* new_w,        \
                                                    T* new_h, T* rates, T* updates, int64 n, double epsilon,          \
                                                    double decay, double weight_decay) {                              \
    adagrad(w, h, g, lr, new_w, new_h, rates, updates, n, epsilon, decay, weight_decay);                              \
  }                                                                                                                   \
  extern "C" __global__ void adadelta_fwd_##S##_##LS(const T* w, const T* h, const T* d, const T* g, const L* lr,     \
                                                     T* new_w, T* new_h, T* new_d, int64 n, double epsilon,           \
                                                     double decay) {                                                  \
    adadelta(w, h, d, g, lr, new_w, new_h, new_d, n, epsilon, decay);                                                 \
  }                                                                                                                   \
  extern "C" __global__ void rmsprop_fwd_##S##_##LS(const T* g, const T* squares, const T* m, const L* lr, T* step,   \
                                                    T* new_squares, T* new_m, int64 n, double decay,                  \
                                                    double momentum, double epsilon) {                                \
    rmsprop(g, squares, m, lr, step, new_squares, new_m, n, decay, momentum, epsilon);                                \
  }                                                                                                                   \
  extern "C" __global__ void adam_fwd_##S##_##LS(const T* w, const T* m, const T* v, const T* g, const L* lr,         \
                                                 const int64* iteration, T* new_w, T* new_m, T* new_v, T* effective,  \
                                                 const T* gradient_weight, const T* param_weight, int64 n,            \
                                                 double beta1, double beta2, double epsilon) {                        \
    adam(w, m, v, g, lr, iteration, new_w, new_m, new_v, effective, gradient_weight, param_weight, n, beta1, beta2,   \
         epsilon);                                                                                                    \
  }                                                                                                                   \
  extern "C" __global__ void ftrl_fwd_##S##_##LS(const T* w, const T* nz, const T* g, const L* rate, T* new_w,        \
                                                 T* new_nz, int64 n, double alpha, double beta, double lambda1,       \
                                                 double lambda2) {                                                    \
    ftrl(w, nz, g, rate, new_w, new_nz, n, alpha, beta, lambda1, lambda2);                                            \
  }                                                                                                                   \
  extern "C" __global__ void wngrad_fwd_##S##_##LS(const T* w, const T* scale, const T* g, const L* lr, T* new_w,     \
                                                   T* updates, int64 n, double epsilon) {                             \
    wngrad(w, scale, g, lr, new_w, updates, n, epsilon);                                                              \
  }                                                                                                                   \
  extern "C" __global__ void wngrad_scale_##S##_##LS(const T* scale, const L* lr, const T* partial, T* new_scale,     \
                                                     T* rate, int64 count, double epsilon) {                          \
    wngrad_scale(scale, lr, partial, new_scale, rate, count, epsilon);                                                \
  }                                                                                                                   \
  extern "C" __global__ void storm_fwd_##S##_##LS(const T* w, const T* m, const T* total, const T* g, const L* lr,    \
                                                  T* new_w, T* new_m, int64 n, double momentum, double beta) {        \
    storm(w, m, total, g, lr, new_w, new_m, n, momentum, beta);                                                       \
  }                                                                                                                   \
  extern "C" __global__ void lars_fwd_##S##_##LS(const T* squares, const T* gradient_squares, const L* decay,         \
                                                 const L* trust, const L* upper, T* y, int64 count, double offset,    \
                                                 double lower) {                                                      \
    lars(squares, gradient_squares, decay, trust, upper, y, count, offset, lower);                                    \
  }
#define REALS(S, T)                                                                                                    \
  UPDATES(S, T, f32, float)                                                                                           \
  UPDATES(S, T, f64, double)                                                                                          \
  extern "C" __global__ void weight_scale_fwd_##S(const T* w, const int64* iteration, T* new_w, int64 n, int64 step,  \
                                                  int64 end, double scale) {                                          \
    weight_scale(w, iteration, new_w, n, step, end, scale);                                                           \
  }                                                                                                                   \
  extern "C" __global__ void square_sums_##S(const T* x, T* partial, int64 n, int64 count) {                      \
    square_sums(x, partial, n, count);                                                                                \
  }                                                                                                                   \
  extern "C" __global__ void storm_total_##S(const T* total, const T* partial, T* new_total, int64 count) {           \
    storm_total(total, partial, new_total, count);                                                                    \
  }                                                                                                                   \
  extern "C" __global__ void yellowfin_fwd_##S(const T* w, const T* m, const T* lr, const T* mu, const T* g_avg,      \
                                               const T* g2_avg, const T* g, T* new_w, T* new_m, T* new_g_avg,         \
                                               T* new_g2_avg, T* partial, int64 n, int64 count, double beta,          \
                                               int32 nesterov) {                                                      \
    yellowfin(w, m, lr, mu, g_avg, g2_avg, g, new_w, new_m, new_g_avg, new_g2_avg, partial, n, count, beta,          \
              nesterov);                                                                                              \
  }                                                                                                                   \
  extern "C" __global__ void yellowfin_tune_##S(const T* lr, const T* mu, const T* window, const T* memory,           \
                                                const int64* iteration, const T* partial, T* new_lr, T* new_mu,       \
                                                T* new_window, T* new_memory, uint64* errors, uint64 code,            \
                                                int64 count, int64 width, double beta, double epsilon,                \
                                                int32 debias) {                                                       \
    yellowfin_tune(lr, mu, window, memory, iteration, partial, new_lr, new_mu, new_window, new_memory, errors, code,  \
                   count, width, beta, epsilon, debias);                                                              \
  }
REALS(f32, float)
REALS(f64, double)
