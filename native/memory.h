// Memory in whole cache lines, and in huge pages if it is large.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "rounding.h"

constexpr size_t LINE = 64;
constexpr size_t HUGE_PAGE = 2 << 20;

// Memory from the system, in huge pages except at its end: an address translation every 4 KiB can take longer than
// reading. Null if there is no memory.
inline std::shared_ptr<uint8_t> map_memory(size_t size) {
  const size_t room = size + HUGE_PAGE;  // untouched pages take addresses but no memory
  void* base = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  auto* memory = (uint8_t*)round_up(size_t(base), HUGE_PAGE);
#ifdef MADV_HUGEPAGE  // of Linux
  if (size >= HUGE_PAGE) madvise(memory, size / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
#endif
  return {memory, [base, room](uint8_t*) { munmap(base, room); }};
}

// Memory that grows, or a place of fixed size that it is lent.
class Buffer {
 public:
  void lend(uint8_t* place, size_t size) {
    memory_ = {place, [](uint8_t*) {}}, size_ = size, fixed_ = true;
  }
  template <class T>
  T* get(size_t count) {
    if (count * sizeof(T) > size_) grow(count * sizeof(T));
    return (T*)memory_.get();
  }

 private:
  void grow(size_t size) {
    constexpr size_t LARGE = HUGE_PAGE / 8;  // the C library would keep freed memory
    if (fixed_) throw std::bad_alloc();
    memory_.reset();
    if (size < LARGE)
      memory_.reset((uint8_t*)std::aligned_alloc(LINE, round_up(size, LINE)), std::free);
    else
      memory_ = map_memory(size);
    if (!memory_) throw std::bad_alloc();
    size_ = size;
  }
  std::shared_ptr<uint8_t> memory_;
  size_t size_ = 0;
  bool fixed_ = false;
};

// Memory for matrices, one after another, so that a core that streams a matrix already prefetches the next one.
inline std::shared_ptr<uint8_t> take_memory(size_t bytes) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  constexpr size_t REGION = 64 << 20;
  static std::shared_ptr<uint8_t> region;
  static size_t used = 0, size = 0;
  bytes = round_up(bytes + 1, LINE);  // at least one byte more, as kernels may read past the end
  if (!region || used + bytes > size) {
    size = std::max(bytes, REGION), used = 0;
    region = map_memory(size);
    if (!region) return nullptr;
  }
  used += bytes;
  return {region, region.get() + used - bytes};
}
