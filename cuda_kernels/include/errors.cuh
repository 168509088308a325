// Errors that kernels find in their data, for the host to raise (device_errors.py).
#pragma once

#include "gpunet.cuh"

__device__ inline uint64 error_bits(int64 value) { return (uint64)value; }
__device__ inline uint64 error_bits(double value) { return (uint64)__double_as_longlong(value); }

// Notes that element `index` holds a bad value. Of several errors the one with the lowest code stays, and of those the one with
// the lowest index, in whatever order threads get here. `errors`: a lock, the code (0 for none), the index, the bits of the value.
__device__ inline void report_error(uint64* errors, uint64 code, int64 index, uint64 bits) {
  volatile uint64* noted = errors;
  for (bool done = false; !done;) {
    // Without the lock first, since all of a large tensor may be bad. An error is only ever replaced by a lower one.
    const uint64 present = noted[1];
    if (present != 0 && (present < code || (present == code && noted[2] <= (uint64)index))) return;
    if (atomicCAS(errors, (uint64)0, (uint64)1) != 0) continue;
    __threadfence();
    const uint64 last = noted[1];
    if (last == 0 || code < last || (code == last && (uint64)index < noted[2])) {
      noted[2] = (uint64)index;
      noted[3] = bits;
      __threadfence();
      noted[1] = code;
      __threadfence();
    }
    atomicExch(errors, (uint64)0);
    done = true;
  }
}

// Whether a label is one of the classes 0 .. classes-1.
template <typename I>
__device__ inline bool is_class(I label, int64 classes) {
  return label >= 0 && (int64)label < classes;
}
