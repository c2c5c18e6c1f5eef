// Included before llama.cpp's own sources. GCC 12's _tile_loadconfig names 8 of the 64 bytes it reads, so the compiler
// drops the stores to the others, and llama.cpp dies of its first AMX instruction.
#if defined(__cplusplus) && defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#include <immintrin.h>
#define _tile_loadconfig(config) asm volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)))
#endif
