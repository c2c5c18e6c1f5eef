// Compiled for AVX2 with FMA. Each variant has its source, so that object files differ.
#include "model.cpp"
