// Checks of every access to memory, for modules built with GPUNET_SIM_BOUNDS: the compiler calls one of these functions before each
// (its instrumentation for kernel addresses, with no shadow memory behind it). Part of runtime.cpp.
#pragma once

#include "scheduler.h"

// Elements of an argument of the launch.
struct ArgumentRange {
  uint64_t start, end;
  uint64_t writable;
};

namespace {

Heap heap;
const ArgumentRange* argument_ranges = nullptr;
uint32_t range_count = 0;
// Whether the kernel may reach memory through pointers that it finds in memory.
bool indirect = false;

// `unit`: what the address must be a multiple of.
void check_access(uint64_t address, uint64_t size, bool write, uint64_t unit = 1) {
  if (range_count == 0 || current == nullptr || heap.outside(address)) return;
  if (address - (uint64_t)&gpunet_sim_state < sizeof gpunet_sim_state) return;
  if (address % unit != 0) {
    char text[64];
    snprintf(text, sizeof text, "at an address that is no multiple of %u bytes", (unsigned)unit);
    set_report(kAccess, text);
    report.access = write ? 2 : 1;
    report.address = address;
    abandon();
  }
  bool read_only = false;
  for (uint32_t i = 0; i < range_count; ++i) {
    const ArgumentRange& range = argument_ranges[i];
    if (address < range.start || address + size > range.end) continue;
    if (!write || range.writable) return;
    read_only = true;
  }
  if (!read_only) {
    if (address >= current->stack && address < current->stack + FibrePool::kStack) return;
    Block block;
    if (!heap.find(address, &block)) return;  // shared memory, constants
    if (indirect && !block.freed && address >= block.pointer && address + size <= block.pointer + block.nbytes) return;
  }
  set_report(kAccess, read_only ? "which is const" : "");
  report.access = write ? 2 : 1;
  report.address = address;
  abandon();
}

}  // namespace

#define GPUNET_SIM_CHECKS(size)                                                                                       \
  GPUNET_SIM_EXPORT void __asan_load##size##_noabort(uint64_t address) { check_access(address, size, false, size < 8 ? size : 8); } \
  GPUNET_SIM_EXPORT void __asan_store##size##_noabort(uint64_t address) { check_access(address, size, true, size < 8 ? size : 8); }
extern "C" {
GPUNET_SIM_CHECKS(1)
GPUNET_SIM_CHECKS(2)
GPUNET_SIM_CHECKS(4)
GPUNET_SIM_CHECKS(8)
GPUNET_SIM_CHECKS(16)
GPUNET_SIM_EXPORT void __asan_loadN_noabort(uint64_t address, uint64_t size) { check_access(address, size, false); }
GPUNET_SIM_EXPORT void __asan_storeN_noabort(uint64_t address, uint64_t size) { check_access(address, size, true); }
GPUNET_SIM_EXPORT void __asan_handle_no_return() {}
}
