// Steps of parameter updates for one element, which dense and sparse updates share. State is changed in place.
#pragma once

#include "gpunet.cuh"

// Moment' = momentum * moment + rate * gradient; returns what to subtract from the parameter.
template <typename T>
__device__ inline T momentum_step(T gradient, T* moment, T rate, T momentum, int32 nesterov) {
  const T scaled = gradient * rate;
  *moment = *moment * momentum + scaled;
  return nesterov ? scaled + *moment * momentum : *moment;
}

template <typename T>
__device__ inline void adadelta_step(T gradient, T* w, T* squares, T* steps, T rate, double epsilon, double decay) {
  const T keep = (T)decay, take = (T)(1 - decay);
  *squares = *squares * keep + gradient * gradient * take;
  const T step = sqrt(*steps + (T)epsilon) / sqrt(*squares + (T)epsilon) * gradient;
  *steps = *steps * keep + step * step * take;
  *w += step * rate;
}

template <typename T>
__device__ inline void adam_moments(T gradient, T* mean, T* square, double beta1, double beta2) {
  *mean = *mean * (T)beta1 + gradient * (T)(1 - beta1);
  *square = *square * (T)beta2 + gradient * gradient * (T)(1 - beta2);
}

// sqrt(1 - beta2^t) / (1 - beta1^t) at t = iteration + 1.
__device__ inline double adam_correction(double beta1, double beta2, int64 iteration) {
  const double t = (double)(iteration + 1);
  return sqrt(1 - pow(beta2, t)) / (1 - pow(beta1, t));
}

template <typename T>
__device__ inline void ftrl_step(T gradient, T* w, T* squares, T* z, T alpha, double beta, double lambda1, double lambda2) {
  const T sum = *squares + gradient * gradient, root = sqrt(sum);
  const T shifted = *z + gradient - (root - sqrt(*squares)) / alpha * *w;
  const T sign = shifted > 0 ? (T)1 : shifted < 0 ? (T)-1 : shifted;
  const T step = ((T)lambda1 * sign - shifted) / (((T)beta + root) / alpha + (T)lambda2);
  *w = (shifted < 0 ? -shifted : shifted) > (T)lambda1 ? step : (T)0;
  *squares = sum;
  *z = shifted;
}
