// What a thread does between two looks at a word that another thread changes.
#pragma once
#ifdef __x86_64__
#include <immintrin.h>
#endif

// Leaves the core to its other thread for some cycles. On ARM `yield` does nothing on most cores, and `isb` takes a while.
inline void pause_core() {
#ifdef __x86_64__
  _mm_pause();
#else
  asm volatile("isb" ::: "memory");
#endif
}
