// Runtime of the simulated device: launches, barriers, warps, faults, memory. Loaded by library.py, used by kernels through runtime.h.
#include "runtime.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fibre.h"
#include "memory.h"

using namespace gpunet_sim;

// What stopped a launch. Mirrored by library.py.
enum Kind {
  kNothing,
  kAccess,
  kArithmetic,
  kTrap,
  kBarrier,
  kWarp,
  kCanary,
  kStack,
  kSharedAccess,
  kConfiguration,
};

struct Report {
  int32_t kind;
  int32_t access;  // 1 read, 2 write, 0 unknown
  uint32_t block[3];
  uint32_t thread[3];
  uint64_t address;
  int64_t line;
  char file[256];
  char text[2048];
};

struct Launch {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared;
  uint32_t order;  // of threads between barriers, and of blocks: 0 forward, 1 reverse, 2 random
  uint64_t seed;
  uint64_t written;  // bit i: parameter i is a pointer through which the kernel may write
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

enum Status : unsigned char { kUnstarted, kRunning, kRunnable, kAtBarrier, kInWarp, kExited };

struct Thread {
  Fibre* fibre;
  Status status;
  int operation;
  const char* file;
  int line;
  uint64_t value, result;
  int source;
};

// Lanes of a warp that wait for one another in one operation.
struct Group {
  unsigned mask, arrived;
  int operation;
};

struct Warp {
  unsigned present, exited;
  std::vector<Group> groups;
};

Heap heap;
Report report;

void run_threads();
FibrePool fibres(run_threads);
Context host;
Fibre* current = nullptr;

void (*kernel_call)(void**) = nullptr;
void** kernel_params = nullptr;

int thread_count = 0;
std::vector<Index> order;
Thread threads[1024];
Warp warps[32];
// Whether any thread of the block has waited: until then nothing is kept about its threads.
bool waited = false;
const Index* batch = nullptr;
int exited = 0, runnable = 0, at_barrier = 0;
int vote_count = 0;

std::vector<SharedVariable*> shared_variables, shared_in_launch;
std::vector<Block> shared_blocks;
Block dynamic_block = {};
uint64_t random_state = 1;

uint64_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

void set_report(Kind kind, const char* text, const char* file = "", int line = 0) {
  const State& state = gpunet_sim_state;
  report.kind = kind;
  report.access = 0;
  report.address = 0;
  report.line = line;
  const unsigned block[3] = {state.block.x, state.block.y, state.block.z};
  const unsigned thread[3] = {state.thread.x, state.thread.y, state.thread.z};
  std::copy(block, block + 3, report.block);
  std::copy(thread, thread + 3, report.thread);
  snprintf(report.file, sizeof report.file, "%s", file);
  snprintf(report.text, sizeof report.text, "%s", text);
}

// Leaves the launch from within one of its threads.
[[noreturn]] void abandon() {
  Fibre* fibre = current;
  switch_context(&fibre->context, &host);
  __builtin_unreachable();
}

void run_threads() {
  for (;;) {
    kernel_call(kernel_params);
    current->finished = true;
    switch_context(&current->context, &host);
  }
}

void resume(Fibre* fibre) {
  current = fibre;
  fibre->finished = false;
  switch_context(&host, &fibre->context);
  current = nullptr;
}

const char* operation_name(int operation) {
  static const char* const names[] = {"__shfl_sync", "__ballot_sync", "__all_sync", "__any_sync", "__match_any_sync", "__syncwarp"};
  return names[operation];
}

// ---- warps ----

bool complete(Warp& warp, size_t index, int first_thread) {
  Group group = warp.groups[index];
  if ((group.arrived | warp.exited | ~warp.present) != ((group.arrived | warp.exited | ~warp.present) | group.mask)) return false;
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane)
    if ((group.arrived >> lane & 1) && threads[first_thread + lane].value != 0) ballot |= 1u << lane;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(group.arrived >> lane & 1)) continue;
    Thread& thread = threads[first_thread + lane];
    switch (group.operation) {
      case kShuffle: {
        // What a lane that takes no part holds is undefined: not a number here, so that it shows.
        bool known = thread.source >= 0 && thread.source < 32 && (group.arrived >> thread.source & 1);
        thread.result = known ? threads[first_thread + thread.source].value : ~0ull;
        break;
      }
      case kBallot: thread.result = ballot; break;
      case kAll: thread.result = ballot == group.arrived; break;
      case kAny: thread.result = ballot != 0; break;
      case kMatch: {
        unsigned same = 0;
        for (int other = 0; other < 32; ++other)
          if ((group.arrived >> other & 1) && threads[first_thread + other].value == thread.value) same |= 1u << other;
        thread.result = same;
        break;
      }
      default: thread.result = 0;
    }
    if (thread.status == kInWarp) {
      thread.status = kRunnable;
      ++runnable;
    }
  }
  warp.groups.erase(warp.groups.begin() + (long)index);
  return true;
}

void record_exits(const Index* from, const Index* to) {
  for (; from < to; ++from) {
    int t = from->linear;
    if (threads[t].status == kExited) continue;
    threads[t].status = kExited;
    ++exited;
    Warp& warp = warps[t / 32];
    warp.exited |= 1u << t % 32;
    for (size_t g = 0; g < warp.groups.size();)
      if (!complete(warp, g, t & ~31)) ++g;
  }
}

void begin_waiting() {
  waited = true;
  exited = runnable = at_barrier = vote_count = 0;
  for (int t = 0; t < thread_count; ++t) threads[t].status = kUnstarted;
  for (int w = 0; w * 32 < thread_count; ++w) {
    int lanes = std::min(32, thread_count - w * 32);
    warps[w].present = lanes == 32 ? ~0u : (1u << lanes) - 1;
    warps[w].exited = 0;
    warps[w].groups.clear();
  }
}

// The running thread, with all that ran before it on this stack marked as exited.
Thread& settle(const char* file, int line) {
  const State& state = gpunet_sim_state;
  if (!waited) begin_waiting();
  record_exits(batch, state.position);
  batch = state.position;
  Thread& thread = threads[state.thread.linear];
  thread.fibre = current;
  thread.status = kRunning;
  thread.file = file;
  thread.line = line;
  return thread;
}

void suspend() {
  Fibre* fibre = current;
  switch_context(&fibre->context, &host);
}

// ---- blocks ----

std::string ranges(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t j = i;
    while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
    text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
    if (j > i) text += "-" + std::to_string(numbers[j]);
    i = j + 1;
  }
  return (numbers.size() == 1 ? "thread " : "threads ") + text + (numbers.size() == 1 ? " waits" : " wait");
}

// Who waits where, once nobody can go on.
void report_stuck() {
  struct Place {
    std::string name;
    std::vector<int> threads;
  };
  std::vector<Place> places;
  std::vector<int> gone;
  bool barrier = false;
  const Thread* first = nullptr;
  for (int t = 0; t < thread_count; ++t) {
    const Thread& thread = threads[t];
    if (thread.status == kExited) {
      gone.push_back(t);
      continue;
    }
    bool here = thread.status == kAtBarrier;
    if (first == nullptr || (here && !barrier)) first = &thread;
    barrier = barrier || here;
    std::string name = std::string(here ? "__syncthreads" : operation_name(thread.operation)) + " (" + thread.file + ":" +
                       std::to_string(thread.line) + ")";
    auto place = std::find_if(places.begin(), places.end(), [&](const Place& p) { return p.name == name; });
    if (place == places.end()) place = places.insert(places.end(), Place{name, {}});
    place->threads.push_back(t);
  }
  std::string text;
  for (const Place& place : places) text += (text.empty() ? "" : "; ") + ranges(place.threads) + " at " + place.name;
  if (!gone.empty()) {
    std::string who = ranges(gone);
    who = who.substr(0, who.rfind(' '));
    text += "; " + who + (gone.size() == 1 ? " has exited" : " have exited");
  }
  set_report(barrier ? kBarrier : kWarp, text.c_str(), first ? first->file : "", first ? first->line : 0);
}

bool release_barrier() {
  const char* file = threads[0].file;
  for (int t = 0; t < thread_count; ++t)
    if (threads[t].line != threads[0].line || strcmp(threads[t].file, file) != 0) return false;
  for (int t = 0; t < thread_count; ++t) {
    Thread& thread = threads[t];
    thread.result = thread.operation == kCount ? vote_count : thread.operation == kAnd ? vote_count == thread_count : vote_count > 0;
    thread.status = kRunnable;
  }
  runnable = thread_count;
  at_barrier = vote_count = 0;
  return true;
}

bool run_block(bool random) {
  State& state = gpunet_sim_state;
  ++state.epoch;
  waited = false;
  if (random)
    for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random_number() % (i + 1)]);
  const Index* const begin = order.data();
  const Index* const end = begin + thread_count;
  for (bool first = true;; first = false) {
    for (const Index* p = begin; p < end;) {
      Fibre* fibre;
      if (first && (!waited || threads[p->linear].status == kUnstarted)) {
        fibre = fibres.acquire();
        if (fibre == nullptr) {
          set_report(kConfiguration, "no memory for the stacks of its threads");
          return false;
        }
        state.end = end;
      } else if (threads[p->linear].status == kRunnable) {
        fibre = threads[p->linear].fibre;
        threads[p->linear].status = kRunning;
        --runnable;
        state.end = p + 1;
      } else {
        ++p;
        continue;
      }
      state.position = batch = p;
      state.thread = *p;
      resume(fibre);
      if (report.kind != kNothing) return false;
      if (fibre->finished) {
        fibres.release(fibre);
        if (!waited) return true;
        record_exits(batch, state.end);
        p = state.end;
      } else {
        p = state.position + 1;
      }
    }
    if (exited == thread_count) return true;
    if (runnable > 0) continue;
    if (at_barrier < thread_count || !release_barrier()) {
      report_stuck();
      return false;
    }
    if (random)
      for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random_number() % (i + 1)]);
  }
}

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
    set_report(kArithmetic, "divided an integer by zero");
  } else if (number == SIGILL) {
    set_report(kTrap, "illegal instruction");
  } else if (address >= current->guard && address < current->stack) {
    set_report(kStack, "overflowed its stack: too deep a recursion or too large a local array");
  } else if (!describe_shared(address)) {
    set_report(kAccess, info->si_code > 0 && address != 0 ? "" : "null or misaligned pointer");
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
  if (variable->pointer == nullptr) {
    Block block = map_block(variable->nbytes, 1 << 20);
    if (block.base == 0) gpunet_sim_trap("no memory for a shared variable", "", 0);
    variable->pointer = (void*)block.pointer;
    shared_variables.push_back(variable);
    shared_blocks.push_back(block);
  }
  if (std::find(shared_in_launch.begin(), shared_in_launch.end(), variable) == shared_in_launch.end())
    shared_in_launch.push_back(variable);
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
  active = true;
}

GPUNET_SIM_EXPORT void gpunet_sim_leave() {
  active = false;
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
  if (launch->shared > 0) place_dynamic_shared(launch->shared);
  else state.dynamic_shared = nullptr;
  if (!run_grid(*launch)) {
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
