// Compiled for AVX-512 with VNNI and BF16: setup.py gives each variant a source of its own, whose objects do not overwrite each other.
#include "model.cpp"
