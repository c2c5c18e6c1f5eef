// Compiled for Armv8.2 with dot products. Each variant has its source, so that object files differ.
#include "model.cpp"
