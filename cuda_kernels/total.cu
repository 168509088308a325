// Sums over all elements.
#include "sums.cuh"

template <typename T>
struct Divided {
  double divisor;
  __device__ T operator()(T total) const { return divisor == 1 ? total : (T)(total / (T)divisor); }
};

template <typename T>
struct Element {
  const T* x;
  __device__ typename Total<T>::type operator()(int64 i) const { return load(x, i); }
};

template <typename T>
struct Product {
  const T *x, *y;
  __device__ typename Total<T>::type operator()(int64 i) const { return load(x, i) * load(y, i); }
};

#define TOTAL(S, T)                                                                                                 \
  extern "C" __global__ void total_fwd_##S(const T* x, T* y, uint8* partial, int64 n, double divisor) {            \
    typedef Total<T>::type A;                                                                                      \
    sum_grid(n, y, (A*)partial, Element<T>{x}, Divided<A>{divisor});                                               \
  }                                                                                                                \
  extern "C" __global__ void total_partial_##S(const uint8* partial, T* y, int64 count, double divisor) {          \
    typedef Total<T>::type A;                                                                                      \
    sum_partial((const A*)partial, count, y, Divided<A>{divisor});                                                 \
  }
GPUNET_SIGNLESS(TOTAL)

template <typename T>
__device__ void total_bwd(const T* dy, T* dx, int64 n, double divisor) {
  typedef typename Accumulate<T>::type C;
  const C value = divisor == 1 ? load(dy, 0) : load(dy, 0) / (C)divisor;
  GPUNET_LOOP(i, n) store(dx, i, value);
}

#define PRODUCT(S, T)                                                                                                   \
  extern "C" __global__ void dot_fwd_##S(const T* a, const T* b, T* y, uint8* partial, int64 n, double divisor) {      \
    typedef Total<T>::type A;                                                                                          \
    sum_grid(n, y, (A*)partial, Product<T>{a, b}, Divided<A>{divisor});                                                \
  }                                                                                                                    \
  extern "C" __global__ void total_bwd_##S(const T* dy, T* dx, int64 n, double divisor) {                              \
    total_bwd<T>(dy, dx, n, divisor);                                                                                  \
  }
GPUNET_FLOATS(PRODUCT)
