// What kernels compiled for the simulated device see of its runtime (runtime.cpp).
//
// A launch runs block after block. Each thread of a block runs until it meets a barrier or an operation of its warp, on a stack
// of its own (a fibre) only if it must wait there: threads that never wait follow one another on one stack.
#pragma once

#define GPUNET_SIM_EXPORT __attribute__((visibility("default")))

namespace gpunet_sim {

struct Index {
  unsigned x, y, z;
  int linear;  // of a thread in its block; unused for blocks
};

// The thread that runs now. One launch runs at a time in a process, so this needs no thread-local storage.
struct State {
  Index thread, block, block_dim, grid_dim;
  // The threads that follow one another on this stack: from *position up to, not including, *end.
  const Index* position;
  const Index* end;
  // Number of the block, different for every block of every launch.
  unsigned long long epoch;
  void* dynamic_shared;
};

enum WarpOperation { kShuffle, kBallot, kAll, kAny, kMatch, kSync };
enum Vote { kNone, kCount, kAnd, kOr };

// A __shared__ variable: memory of its own between guard pages, poisoned when a block first enters its scope.
struct SharedVariable {
  const char* name;
  unsigned long long nbytes;
  unsigned long long epoch;
  void* pointer;
};

}  // namespace gpunet_sim

extern "C" {
GPUNET_SIM_EXPORT extern gpunet_sim::State gpunet_sim_state;
GPUNET_SIM_EXPORT int gpunet_sim_barrier(int vote, int value, const char* file, int line);
GPUNET_SIM_EXPORT unsigned long long gpunet_sim_warp(int operation, unsigned mask, unsigned long long value, int source,
                                                     const char* file, int line);
GPUNET_SIM_EXPORT unsigned gpunet_sim_active_mask();
GPUNET_SIM_EXPORT void gpunet_sim_enter_shared(gpunet_sim::SharedVariable* variable);
[[noreturn]] GPUNET_SIM_EXPORT void gpunet_sim_trap(const char* message, const char* file, int line);
}

namespace gpunet_sim {

inline bool next_thread() {
  State& state = gpunet_sim_state;
  if (++state.position == state.end) return false;
  state.thread = *state.position;
  return true;
}

template <typename T>
struct Shared {
  SharedVariable variable;
  inline T& enter() {
    if (variable.epoch != gpunet_sim_state.epoch) gpunet_sim_enter_shared(&variable);
    return *reinterpret_cast<T*>(variable.pointer);
  }
};

// A type written with commas, as one macro argument: Type<void(T)>::type.
template <typename F>
struct Type;
template <typename T>
struct Type<void(T)> {
  typedef T type;
};

template <typename A, typename B>
struct Same {
  static constexpr bool value = false;
};
template <typename A>
struct Same<A, A> {
  static constexpr bool value = true;
};

// The compiler's message on failure shows both types.
template <typename Found, typename Declared>
struct Signature {
  static constexpr bool value = Same<Found, Declared>::value;
  static_assert(value, "the kernel's parameters in the source (Found) are not those declared in Python (Declared)");
};

}  // namespace gpunet_sim
