// Compiled for AMX with bfloat16, and AVX-512 with FP16. Each variant has its source, so that object files differ.
#include "model.cpp"
