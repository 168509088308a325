// Runtime of the simulated device: launches, barriers, warps, faults, memory. Loaded by library.py, used by kernels through runtime.h.
#include "runtime.h"

#include <pthread.h>
#include <signal.h>

#include "bounds.h"
#include "clock.h"
#include "scheduler.h"

struct Launch {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared;
  uint32_t order;  // of threads between barriers, and of blocks: 0 forward, 1 reverse, 2 random
  uint64_t seed;
  uint64_t written;  // bit i: parameter i is a pointer through which the kernel may write
  const ArgumentRange* ranges;  // for bounds.h
  uint32_t range_count;
  uint32_t indirect;
  uint64_t milliseconds;  // of processor time at most; 0 for no limit
};

struct BlockInfo {
  uint64_t base, length, pointer, nbytes;
  int32_t freed;
};

extern "C" {
GPUNET_SIM_EXPORT State gpunet_sim_state;
}

namespace {

constexpr uint64_t kSharedLimit = 48 << 10;

std::vector<SharedVariable*> shared_variables, shared_in_launch;
std::vector<Block> shared_blocks;
Block dynamic_block = {};
uint32_t dynamic_bytes = 0;

void set_order(const Launch& launch) {
  static uint32_t last[4] = {0, 0, 0, 0};
  const uint32_t wanted[4] = {launch.block[0], launch.block[1], launch.block[2], launch.order};
  if (launch.order < 2 && std::equal(wanted, wanted + 4, last)) return;
  std::copy(wanted, wanted + 4, last);
  order.clear();
  int linear = 0;
  for (unsigned z = 0; z < launch.block[2]; ++z)
    for (unsigned y = 0; y < launch.block[1]; ++y)
      for (unsigned x = 0; x < launch.block[0]; ++x) order.push_back({x, y, z, linear++});
  if (launch.order == 1) std::reverse(order.begin(), order.end());
}

bool check_configuration(const Launch& launch) {
  uint64_t count = (uint64_t)launch.block[0] * launch.block[1] * launch.block[2];
  char text[256];
  if (count == 0 || count > 1024 || launch.block[2] > 64) {
    snprintf(text, sizeof text, "%ux%ux%u threads in a block, wanted 1 to 1024 (64 in z)", launch.block[0], launch.block[1],
             launch.block[2]);
  } else if (launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0 || launch.grid[0] > 0x7fffffff ||
             launch.grid[1] > 65535 || launch.grid[2] > 65535) {
    snprintf(text, sizeof text, "a grid of %ux%ux%u blocks, wanted 1 to 2147483647 (65535 in y and z)", launch.grid[0],
             launch.grid[1], launch.grid[2]);
  } else if (launch.shared > kSharedLimit) {
    snprintf(text, sizeof text, "%u bytes of dynamic shared memory, wanted at most %u", launch.shared, (unsigned)kSharedLimit);
  } else {
    return true;
  }
  set_report(kConfiguration, text);
  return false;
}

void place_dynamic_shared(uint32_t nbytes) {
  if (dynamic_block.base == 0) dynamic_block = map_block(kSharedLimit, 1 << 20);
  uint64_t end = dynamic_block.body + dynamic_block.body_length;
  dynamic_block.nbytes = nbytes;
  dynamic_block.pointer = end - round_up(nbytes, 16);
  repair(dynamic_block);
  gpunet_sim_state.dynamic_shared = (void*)dynamic_block.pointer;
}

bool check_canaries(const Launch& launch, void** params) {
  char text[256];
  for (int i = 0; i < 64 && launch.written >> i != 0; ++i) {
    if (!(launch.written >> i & 1)) continue;
    uint64_t damage = heap.check(*(uint64_t*)params[i]);
    if (damage == 0) continue;
    set_report(kCanary, "");
    report.access = 2;
    report.address = damage;
    return false;
  }
  for (SharedVariable* variable : shared_in_launch) {
    size_t i = (size_t)(std::find(shared_variables.begin(), shared_variables.end(), variable) - shared_variables.begin());
    if (find_damage(shared_blocks[i]) == 0) continue;
    repair(shared_blocks[i]);
    snprintf(text, sizeof text, "wrote outside of the shared variable '%s' of %llu bytes", variable->name, variable->nbytes);
    set_report(kSharedAccess, text);
    return false;
  }
  if (launch.shared > 0 && find_damage(dynamic_block) != 0) {
    repair(dynamic_block);
    snprintf(text, sizeof text, "wrote outside of its %u bytes of dynamic shared memory", launch.shared);
    set_report(kSharedAccess, text);
    return false;
  }
  return true;
}

uint64_t greatest_common_divisor(uint64_t a, uint64_t b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// Blocks one after another, in the order asked for.
bool run_grid(const Launch& launch) {
  State& state = gpunet_sim_state;
  const uint64_t nx = launch.grid[0], ny = launch.grid[1], count = nx * ny * launch.grid[2];
  uint64_t start = 0, stride = 1;
  if (launch.order == 1) {
    start = count - 1;
    stride = count - 1;
  } else if (launch.order == 2) {
    start = random_number() % count;
    do {
      stride = 1 + random_number() % count;
    } while (greatest_common_divisor(stride, count) != 1);
  }
  uint64_t b = start;
  for (uint64_t i = 0; i < count; ++i) {
    state.block = {(unsigned)(b % nx), (unsigned)(b / nx % ny), (unsigned)(b / nx / ny), 0};
    if (launch.shared > 0) memset(state.dynamic_shared, 0xff, launch.shared);
    if (!run_block(launch.order == 2)) return false;
    b += stride;
    if (b >= count) b -= count;
  }
  return true;
}

// ---- faults ----

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction previous[4];
stack_t previous_stack;
pthread_t active_thread;
bool active = false;
alignas(16) char handler_stack[64 << 10];

bool describe_shared(uint64_t address) {
  char text[256];
  for (size_t i = 0; i < shared_blocks.size(); ++i) {
    const Block& block = shared_blocks[i];
    if (address < block.base || address >= block.base + block.length) continue;
    snprintf(text, sizeof text, "byte %lld of the shared variable '%s' of %llu bytes", (long long)(address - block.pointer),
             shared_variables[i]->name, shared_variables[i]->nbytes);
    set_report(kSharedAccess, text);
    return true;
  }
  const Block& block = dynamic_block;
  if (block.base == 0 || address < block.base || address >= block.base + block.length) return false;
  snprintf(text, sizeof text, "byte %lld of its %llu bytes of dynamic shared memory", (long long)(address - block.pointer),
           (unsigned long long)block.nbytes);
  set_report(kSharedAccess, text);
  return true;
}

void chain(int number, siginfo_t* info, void* context) {
  size_t i = (size_t)(std::find(kSignals, kSignals + 4, number) - kSignals);
  const struct sigaction& old = previous[i];
  if (old.sa_flags & SA_SIGINFO) {
    old.sa_sigaction(number, info, context);
  } else if (old.sa_handler == SIG_DFL || old.sa_handler == SIG_IGN) {
    // Runs into the same fault again, with what would have happened without us.
    signal(number, SIG_DFL);
  } else {
    old.sa_handler(number);
  }
}

void handle(int number, siginfo_t* info, void* context) {
  if (!active || !pthread_equal(active_thread, pthread_self()) || current == nullptr || report.kind != kNothing) {
    chain(number, info, context);
    return;
  }
  uint64_t address = (uint64_t)info->si_addr;
  int access = 0;
#if defined(__linux__) && defined(__x86_64__)
  access = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2 ? 2 : 1;
#endif
  if (number == SIGFPE) {
    set_report(kArithmetic, "divided an integer by zero, or the smallest one by -1");
  } else if (number == SIGILL) {
    set_report(kTrap, "illegal instruction");
  } else if (address >= current->guard && address < current->stack) {
    set_report(kStack, "overflowed its stack: too deep a recursion or too large a local array");
  } else if (!describe_shared(address)) {
    set_report(kAccess, "");
  }
  report.access = access;
  report.address = address;
  abandon();
}

}  // namespace

extern "C" {

GPUNET_SIM_EXPORT int gpunet_sim_barrier(int vote, int value, const char* file, int line) {
  Thread& thread = settle(file, line);
  thread.status = kAtBarrier;
  thread.operation = vote;
  vote_count += value;
  ++at_barrier;
  suspend();
  return (int)thread.result;
}

GPUNET_SIM_EXPORT unsigned long long gpunet_sim_warp(int operation, unsigned mask, unsigned long long value, int source,
                                                     const char* file, int line) {
  Thread& thread = settle(file, line);
  int t = gpunet_sim_state.thread.linear, lane = t % 32;
  if (!(mask >> lane & 1)) {
    char text[128];
    snprintf(text, sizeof text, "%s with mask 0x%08x, which leaves out the calling lane %d", operation_name(operation), mask, lane);
    set_report(kWarp, text, file, line);
    abandon();
  }
  thread.operation = operation;
  thread.value = value;
  thread.source = source;
  Warp& warp = warps[t / 32];
  size_t g = 0;
  while (g < warp.groups.size() && (warp.groups[g].mask != mask || warp.groups[g].operation != operation)) ++g;
  if (g == warp.groups.size()) warp.groups.push_back({mask, 0, operation});
  warp.groups[g].arrived |= 1u << lane;
  if (!complete(warp, g, t & ~31)) {
    thread.status = kInWarp;
    suspend();
  }
  return thread.result;
}

GPUNET_SIM_EXPORT unsigned gpunet_sim_active_mask() {
  settle("", 0);
  const Warp& warp = warps[gpunet_sim_state.thread.linear / 32];
  return warp.present & ~warp.exited;
}

GPUNET_SIM_EXPORT void gpunet_sim_enter_shared(SharedVariable* variable) {
  if (std::find(shared_in_launch.begin(), shared_in_launch.end(), variable) == shared_in_launch.end()) {
    shared_in_launch.push_back(variable);
    uint64_t total = dynamic_bytes;
    for (const SharedVariable* each : shared_in_launch) total += each->nbytes;
    if (total > kSharedLimit) {
      char text[256];
      snprintf(text, sizeof text, "%llu bytes of shared memory in a block with '%s' of %llu bytes, wanted at most %u",
               (unsigned long long)total, variable->name, variable->nbytes, (unsigned)kSharedLimit);
      gpunet_sim_trap(text, "", 0);
    }
  }
  if (variable->pointer == nullptr) {
    Block block = map_block(variable->nbytes, 1 << 20);
    if (block.base == 0) gpunet_sim_trap("no memory for a shared variable", "", 0);
    variable->pointer = (void*)block.pointer;
    shared_variables.push_back(variable);
    shared_blocks.push_back(block);
  }
  memset(variable->pointer, 0xff, variable->nbytes);
  variable->epoch = gpunet_sim_state.epoch;
}

GPUNET_SIM_EXPORT void gpunet_sim_trap(const char* message, const char* file, int line) {
  set_report(kTrap, message, file, line);
  abandon();
}

// ---- for library.py ----

// Around launches: takes over the signals of faults in this thread.
GPUNET_SIM_EXPORT void gpunet_sim_enter() {
  stack_t stack = {};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action = {};
  action.sa_sigaction = handle;
  // Not blocked in the handler, which is left without returning.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &action, &previous[i]);
  active_thread = pthread_self();
  launch_clock.begin();
  active = true;
}

GPUNET_SIM_EXPORT void gpunet_sim_leave() {
  active = false;
  launch_clock.end();
  fflush(stdout);  // what kernels have printed
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &previous[i], nullptr);
  if (previous_stack.ss_sp == nullptr) previous_stack.ss_flags = SS_DISABLE;
  sigaltstack(&previous_stack, nullptr);
}

// Runs a launch; 0, or the kind of what stopped it.
GPUNET_SIM_EXPORT int gpunet_sim_launch(void (*call)(void**), void** params, const Launch* launch) {
  State& state = gpunet_sim_state;
  report.kind = kNothing;
  state.block = state.thread = {0, 0, 0, 0};
  if (!check_configuration(*launch)) return report.kind;
  random_state = launch->seed * 0x9e3779b97f4a7c15ULL | 1;
  set_order(*launch);
  thread_count = (int)order.size();
  state.grid_dim = {launch->grid[0], launch->grid[1], launch->grid[2], 0};
  state.block_dim = {launch->block[0], launch->block[1], launch->block[2], 0};
  kernel_call = call;
  kernel_params = params;
  shared_in_launch.clear();
  argument_ranges = launch->ranges;
  range_count = launch->range_count;
  indirect = launch->indirect != 0;
  dynamic_bytes = launch->shared;
  if (launch->shared > 0) place_dynamic_shared(launch->shared);
  else state.dynamic_shared = nullptr;
  launch_clock.start(launch->milliseconds, call);
  const bool done = run_grid(*launch);
  launch_clock.stop();
  if (!done) {
    current = nullptr;
    fibres.reset();
  } else {
    check_canaries(*launch, params);
  }
  return report.kind;
}

GPUNET_SIM_EXPORT const Report* gpunet_sim_report() { return &report; }

GPUNET_SIM_EXPORT uint64_t gpunet_sim_allocate(uint64_t nbytes) { return heap.allocate(nbytes); }

GPUNET_SIM_EXPORT uint64_t gpunet_sim_free(uint64_t pointer) { return heap.release(pointer); }

GPUNET_SIM_EXPORT int gpunet_sim_find(uint64_t address, BlockInfo* info) {
  Block block;
  if (!heap.find(address, &block)) return 0;
  *info = {block.base, block.length, block.pointer, block.nbytes, block.freed};
  return 1;
}

// Copies after checking that device memory (bit 0 of `device`: the target, bit 1: the source) is there; 0, or which is not.
GPUNET_SIM_EXPORT int gpunet_sim_copy(uint64_t target, uint64_t source, uint64_t nbytes, int device) {
  if (nbytes == 0) return 0;
  if ((device & 1) && !heap.accessible(target, nbytes)) return 1;
  if ((device & 2) && !heap.accessible(source, nbytes)) return 2;
  memmove((void*)target, (const void*)source, nbytes);
  return 0;
}

GPUNET_SIM_EXPORT int gpunet_sim_fill(uint64_t target, int byte, uint64_t nbytes) {
  if (nbytes == 0) return 0;
  if (!heap.accessible(target, nbytes)) return 1;
  memset((void*)target, byte, nbytes);
  return 0;
}

GPUNET_SIM_EXPORT int gpunet_sim_accessible(uint64_t address, uint64_t nbytes) {
  return nbytes == 0 || heap.accessible(address, nbytes);
}

}  // extern "C"
