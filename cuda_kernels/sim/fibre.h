// Fibres: stacks of their own that are switched between by hand. Part of runtime.cpp.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "memory.h"

#if !defined(GPUNET_SIM_UCONTEXT) && defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#define GPUNET_SIM_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

namespace gpunet_sim {

#ifdef GPUNET_SIM_ASSEMBLY

struct Context {
  void* stack_pointer;
};

extern "C" void gpunet_sim_switch(void** save, void* target) __attribute__((visibility("hidden")));

#ifdef __x86_64__
asm(R"(
.text
.hidden gpunet_sim_switch
.globl gpunet_sim_switch
.type gpunet_sim_switch, @function
gpunet_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gpunet_sim_switch, .-gpunet_sim_switch
)");
#else
asm(R"(
.text
.hidden gpunet_sim_switch
.globl gpunet_sim_switch
.type gpunet_sim_switch, %function
gpunet_sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size gpunet_sim_switch, .-gpunet_sim_switch
)");
#endif

inline void switch_context(Context* from, Context* to) {
  gpunet_sim_switch(&from->stack_pointer, to->stack_pointer);
}

inline void make_context(Context* context, void* stack, uint64_t size, void (*entry)()) {
  uint64_t top = ((uint64_t)stack + size) & ~(uint64_t)15;
#ifdef __x86_64__
  // Six registers, the address to return to, and a zero in the place of the caller's.
  uint64_t* frame = (uint64_t*)(top - 64);
  memset(frame, 0, 64);
  frame[6] = (uint64_t)entry;
#else
  uint64_t* frame = (uint64_t*)(top - 160);
  memset(frame, 0, 160);
  frame[11] = (uint64_t)entry;
#endif
  context->stack_pointer = frame;
}

#else

struct Context {
  ucontext_t context;
};

inline void switch_context(Context* from, Context* to) { swapcontext(&from->context, &to->context); }

inline void make_context(Context* context, void* stack, uint64_t size, void (*entry)()) {
  getcontext(&context->context);
  context->context.uc_stack.ss_sp = stack;
  context->context.uc_stack.ss_size = size;
  context->context.uc_link = nullptr;
  makecontext(&context->context, entry, 0);
}

#endif

struct Fibre {
  Context context;
  uint64_t guard, stack;  // the guard lies below the stack
  uint64_t size;
  bool busy, finished;
};

class FibrePool {
 public:
  static constexpr uint64_t kStack = 128 << 10;

  explicit FibrePool(void (*entry)()) : entry_(entry) {}

  // A fibre that starts at, or has come back to, its entry; null if there is no memory.
  Fibre* acquire() {
    if (idle_.empty() && !grow()) return nullptr;
    Fibre* fibre = idle_.back();
    idle_.pop_back();
    fibre->busy = true;
    return fibre;
  }

  void release(Fibre* fibre) {
    fibre->busy = false;
    idle_.push_back(fibre);
  }

  // Gives up what busy fibres are in the middle of.
  void reset() {
    for (Fibre* fibre : all_) {
      if (!fibre->busy) continue;
      make_context(&fibre->context, (void*)fibre->stack, fibre->size, entry_);
      release(fibre);
    }
  }

 private:
  bool grow() {
    const uint64_t page = page_size(), each = kStack + page, count = 32;
    void* base = mmap(nullptr, each * count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return false;
    for (uint64_t i = count; i-- > 0;) {
      Fibre* fibre = new Fibre();
      fibre->guard = (uint64_t)base + i * each;
      fibre->stack = fibre->guard + page;
      mprotect((void*)fibre->guard, page, PROT_NONE);
      // Tops at different places of their pages, so that they do not all fall on the same lines of the cache.
      fibre->size = kStack - all_.size() * 320 % page;
      make_context(&fibre->context, (void*)fibre->stack, fibre->size, entry_);
      all_.push_back(fibre);
      idle_.push_back(fibre);
    }
    return true;
  }

  void (*entry_)();
  std::vector<Fibre*> all_, idle_;
};

}  // namespace gpunet_sim
