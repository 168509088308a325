// Threads, warps, barriers and blocks of a launch. Part of runtime.cpp.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "fibre.h"
#include "memory.h"
#include "runtime.h"

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
  kOverdue,
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

namespace {

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

// Whether the launch has used up its time (clock.h), looked at where nothing is half done.
volatile bool overdue = false;
uint64_t limit_milliseconds = 0;

void report_overdue() {
  char text[256];
  snprintf(text, sizeof text,
           "ran for more than %g seconds of processor time: an endless loop, or it waits for what a later thread or block does "
           "(GPUNET_SIM_TIMEOUT sets the limit)",
           (double)limit_milliseconds / 1000);
  set_report(kOverdue, text);
}

// The running thread, with all that ran before it on this stack marked as exited.
Thread& settle(const char* file, int line) {
  const State& state = gpunet_sim_state;
  if (overdue) {
    report_overdue();
    abandon();
  }
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
    if (threads[t].line != threads[0].line || (threads[t].file != file && strcmp(threads[t].file, file) != 0))
      return false;
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
  if (overdue) {
    state.thread = {0, 0, 0, 0};
    report_overdue();
    return false;
  }
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

}  // namespace
