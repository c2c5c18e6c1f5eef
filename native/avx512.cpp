// Compiled for AVX-512 with VNNI: setup.py gives each variant a source of its own, whose objects do not overwrite each other.
#include "model.cpp"
