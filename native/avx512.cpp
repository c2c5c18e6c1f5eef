// Compiled for AVX-512 with VNNI. Each variant has its source, so that object files differ.
#include "model.cpp"
