// Rows of a tensor that are picked by indices.
#pragma once

#include "errors.cuh"

// A tensor (outer, size, ...), of which each outer part has `picked` indices: its own ones, `outer_step` behind those of the part
// before, or the same as all others (0).
template <typename I>
struct Picked {
  const I* indices;
  int64 picked, outer_step, size;
  int32 wrap;

  // The row (of outer * size) for pick i of outer * picked; -1, and a report, if the index is out of range.
  __device__ int64 row(int64 i, uint64* errors, uint64 code) const {
    const int64 outer = i / picked, at = outer * outer_step + (i - outer * picked);
    const int64 found = (int64)indices[at], index = found < 0 && wrap ? found + size : found;
    if (index >= 0 && index < size) return outer * size + index;
    report_error(errors, code, at, error_bits(found));
    return -1;
  }
};
