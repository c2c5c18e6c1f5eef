// Memory in whole cache lines, and huge pages where it is large.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#include "rounding.h"

constexpr size_t LINE = 64;
constexpr size_t HUGE_PAGE = 2 << 20;

// Memory that grows. What is large comes in huge pages: looking up an address every 4 KiB can take longer than reading.
class Buffer {
 public:
  template <class T>
  T* get(size_t count) {
    if (count * sizeof(T) > size_) grow(count * sizeof(T));
    return (T*)memory_.get();
  }

 private:
  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };
  void grow(size_t size) {
    const size_t unit = size < HUGE_PAGE / 8 ? LINE : HUGE_PAGE;
    memory_.reset();
    size_ = round_up(size, unit);
    memory_.reset((uint8_t*)std::aligned_alloc(unit, size_));
    if (!memory_) throw std::bad_alloc();
    if (unit == HUGE_PAGE) madvise(memory_.get(), size_, MADV_HUGEPAGE);
  }
  std::unique_ptr<uint8_t, Free> memory_;
  size_t size_ = 0;
};

// Memory for matrices, one after another: a core that streams a matrix has the next one on the way already. Huge
// pages, because it would otherwise look up an address every 4 KiB.
inline std::shared_ptr<uint8_t> take_memory(size_t bytes) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  constexpr size_t REGION = 64 << 20;
  static std::shared_ptr<uint8_t> region;
  static size_t used = 0, size = 0;
  bytes = round_up(bytes + 1, LINE);  // at least a byte more, which kernels may read
  if (!region || used + bytes > size) {
    size = round_up(std::max(bytes, REGION), HUGE_PAGE), used = 0;
    region.reset((uint8_t*)std::aligned_alloc(HUGE_PAGE, size), std::free);
    if (!region) return nullptr;
    madvise(region.get(), size, MADV_HUGEPAGE);
  }
  used += bytes;
  return {region, region.get() + used - bytes};
}
