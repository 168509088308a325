// Device memory of the simulated device: blocks between inaccessible guards. Part of runtime.cpp.
//
//   guard | page ... canary | elements | canary, up to 15 bytes | guard
//
// A block ends at a guard, so that an access behind its last element (rounded up to 16 bytes) faults; what lies between the start
// of the page and the block holds a canary. Freed blocks stay inaccessible until many more have been freed.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace gpunet_sim {

struct Block {
  uint64_t base, length;  // the whole mapping, guards included
  uint64_t body, body_length;
  uint64_t pointer, nbytes;
  int freed;
};

inline uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

inline uint64_t page_size() {
  static const uint64_t size = (uint64_t)sysconf(_SC_PAGESIZE);
  return size;
}

// Not a number as float16, bfloat16, float and double alike, so that a read of it shows too.
inline void write_canary(uint64_t from, uint64_t to) {
  for (; from < to; ++from) *(unsigned char*)from = from & 1 ? 0xff : 0xfe;
}

// Address of the first damaged byte, or 0.
inline uint64_t find_damage(uint64_t from, uint64_t to) {
  for (; from < to && from % 8 != 0; ++from)
    if (*(unsigned char*)from != (from & 1 ? 0xff : 0xfe)) return from;
  for (; from + 8 <= to && *(uint64_t*)from == 0xfffefffefffefffeULL; from += 8) {
  }
  for (; from < to; ++from)
    if (*(unsigned char*)from != (from & 1 ? 0xff : 0xfe)) return from;
  return 0;
}

// Maps a block; base is 0 if there is no memory. The guard on each side is as wide as asked for, at least a page.
inline Block map_block(uint64_t nbytes, uint64_t guard) {
  Block block = {};
  guard = round_up(guard, page_size());
  block.nbytes = nbytes;
  block.body_length = round_up(nbytes > 0 ? nbytes : 1, page_size());
  block.length = block.body_length + 2 * guard;
  void* base = mmap(nullptr, block.length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return block;
  block.body = (uint64_t)base + guard;
  if (mprotect((void*)block.body, block.body_length, PROT_READ | PROT_WRITE) != 0) {
    munmap(base, block.length);
    return block;
  }
  block.base = (uint64_t)base;
  block.pointer = block.body + block.body_length - round_up(nbytes, 16);
  write_canary(block.body, block.pointer);
  write_canary(block.pointer + nbytes, block.body + block.body_length);
  memset((void*)block.pointer, 0xff, nbytes);
  return block;
}

inline uint64_t find_damage(const Block& block) {
  uint64_t damage = find_damage(block.body, block.pointer);
  return damage ? damage : find_damage(block.pointer + block.nbytes, block.body + block.body_length);
}

inline void repair(const Block& block) {
  write_canary(block.body, block.pointer);
  write_canary(block.pointer + block.nbytes, block.body + block.body_length);
}

class Heap {
 public:
  uint64_t allocate(uint64_t nbytes) {
    // Address space costs nothing: wide guards catch indices that are far off too.
    Block block = map_block(nbytes, (16 << 20) + nbytes);
    if (block.base == 0) return 0;
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[block.base] = block;
    if (low_ == 0 || block.base < low_) low_ = block.base;
    if (block.base + block.length > high_) high_ = block.base + block.length;
    return block.pointer;
  }

  // Address of a damaged canary, 0, or 1 if there is no such block.
  uint64_t release(uint64_t pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = locate(pointer);
    if (block == nullptr || block->freed || block->pointer != pointer) return 1;
    uint64_t damage = find_damage(*block);
    block->freed = 1;
    // Mapping it anew gives the memory back and keeps the addresses taken.
    mmap((void*)block->body, block->body_length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    quarantine_.push_back(block->base);
    if (quarantine_.size() > kQuarantine) {
      auto oldest = blocks_.find(quarantine_.front());
      munmap((void*)oldest->second.base, oldest->second.length);
      blocks_.erase(oldest);
      quarantine_.pop_front();
    }
    return damage;
  }

  // The block whose mapping, guards included, holds the address.
  bool find(uint64_t address, Block* found) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = locate(address);
    if (block == nullptr) return false;
    *found = *block;
    return true;
  }

  // Whether no block can hold the address: most of what is not device memory, at once.
  bool outside(uint64_t address) const { return address < low_ || address >= high_; }

  // Address of a damaged canary of the block that holds the address (repaired then), or 0.
  uint64_t check(uint64_t address) {
    Block block;
    if (!find(address, &block) || block.freed) return 0;
    uint64_t damage = find_damage(block);
    if (damage) repair(block);
    return damage;
  }

  bool accessible(uint64_t address, uint64_t nbytes) {
    Block block;
    return find(address, &block) && !block.freed && address >= block.pointer &&
           address + nbytes <= block.pointer + block.nbytes;
  }

 private:
  static constexpr size_t kQuarantine = 4096;

  Block* locate(uint64_t address) {
    auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) return nullptr;
    Block& block = std::prev(next)->second;
    return address < block.base + block.length ? &block : nullptr;
  }

  std::mutex mutex_;
  std::map<uint64_t, Block> blocks_;
  std::deque<uint64_t> quarantine_;
  uint64_t low_ = 0, high_ = 0;
};

}  // namespace gpunet_sim
