// Compiled for AVX-512 with VNNI and BF16. Each variant has its source, so that object files differ.
#include "model.cpp"
