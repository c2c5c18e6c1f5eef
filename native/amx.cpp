// Compiled for AMX with bfloat16, and AVX-512 with FP16: setup.py gives each variant a source of its own, whose objects do not overwrite each other.
#include "model.cpp"
