// Compiled for Armv8.2 with products of int8 matrices.
#include "model.cpp"
