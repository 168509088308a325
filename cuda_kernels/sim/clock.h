// The limit of a launch's time: a timer of the processor time of its thread. Part of runtime.cpp.
//
// Its signal stops a thread of the kernel only within the kernel's own code: the runtime and the C library must not be left in the
// middle of their work, and notice it themselves or are asked again a little later.
#pragma once

#include "scheduler.h"

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <link.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

struct Code {
  uint64_t inside;  // an address that is looked for
  uint64_t start, end;
};
Code code = {0, 0, 0};

// The executable part of the library that the kernel is in.
int find_code(struct dl_phdr_info* info, size_t, void* result) {
  Code* wanted = (Code*)result;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    const uint64_t start = info->dlpi_addr + part.p_vaddr, end = start + part.p_memsz;
    if (part.p_type != PT_LOAD || !(part.p_flags & PF_X) || wanted->inside < start || wanted->inside >= end) continue;
    wanted->start = start;
    wanted->end = end;
    return 1;
  }
  return 0;
}

int clock_signal() { return SIGRTMAX - 3; }

void handle_clock(int, siginfo_t*, void* context) {
  overdue = true;
#ifdef __x86_64__
  const uint64_t place = (uint64_t)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#else
  const uint64_t place = ((ucontext_t*)context)->uc_mcontext.pc;
#endif
  if (current == nullptr || report.kind != kNothing || place < code.start || place >= code.end) return;
  report_overdue();
  abandon();
}

// Timers belong to threads. One lives from the first launch in a call of the runtime to the end of the call.
class Clock {
 public:
  void begin() {
    struct sigaction action = {};
    action.sa_sigaction = handle_clock;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(clock_signal(), &action, &previous_);
    there_ = false;
  }

  // Without a timer there is no limit.
  void start(uint64_t milliseconds, void (*call)(void**)) {
    overdue = false;
    limit_milliseconds = milliseconds;
    if (milliseconds == 0) return;
    if (!there_) {
      struct sigevent event = {};
      event.sigev_notify = SIGEV_THREAD_ID;
      event.sigev_signo = clock_signal();
      *thread_of(&event) = (int)syscall(SYS_gettid);
      there_ = syscall(SYS_timer_create, CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
    }
    if (code.inside != (uint64_t)call) {
      code = {(uint64_t)call, 0, 0};
      dl_iterate_phdr(find_code, &code);
    }
    set(milliseconds);
  }

  void stop() {
    if (limit_milliseconds != 0) set(0);
    overdue = false;
  }

  void end() {
    if (there_) syscall(SYS_timer_delete, timer_);
    sigaction(clock_signal(), &previous_, nullptr);
  }

 private:
  static int* thread_of(struct sigevent* event) {
#ifdef sigev_notify_thread_id
    return &event->sigev_notify_thread_id;
#else
    return &event->_sigev_un._tid;
#endif
  }

  void set(uint64_t milliseconds) {
    if (!there_) return;
    struct itimerspec times = {};
    times.it_value.tv_sec = (time_t)(milliseconds / 1000);
    times.it_value.tv_nsec = (long)(milliseconds % 1000) * 1000000;
    if (milliseconds != 0) times.it_interval.tv_nsec = 1000000;
    syscall(SYS_timer_settime, timer_, 0, &times, nullptr);
  }

  struct sigaction previous_ = {};
  int timer_ = 0;
  bool there_ = false;
};

}  // namespace

#else

namespace {
struct Clock {
  void begin() {}
  void start(uint64_t, void (*)(void**)) { overdue = false; }
  void stop() {}
  void end() {}
};
}  // namespace

#endif

namespace {
Clock launch_clock;
}
