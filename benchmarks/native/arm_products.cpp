// A program that multiplies one panel, 16 outputs, with rows: by native/ or, with LLAMA_CPP, by llama.cpp's kernels for the
// same bits. Contents are zeros: no instruction depends on them. benchmarks/predicted_arm.py follows what it runs.
//
//     arm_products FORMAT ROWS COLUMNS
#include <cstdlib>
#include <cstring>

[[gnu::noinline]] void begin() { asm volatile(""); }
[[gnu::noinline]] void finish() { asm volatile(""); }

#ifdef LLAMA_CPP
using Product = void(int, float*, size_t, const void*, const void*, int, int);
extern "C" Product ONE_ROW, MANY_ROWS;
extern "C" int ggml_cpu_get_sve_cnt() { return SVE_BYTES; }

static void multiply(const char*, int rows, int columns) {
  auto* memory = (char*)calloc(1, 64 << 20);
  auto* out = (float*)(memory + (32 << 20));
  begin();
  (rows == 1 ? ONE_ROW : MANY_ROWS)(columns, out, 16, memory, memory + (16 << 20), rows, 16);
  finish();
}
#else
#include "model.cpp"

static void multiply(const char* format, int rows, int columns) {
  Matrix matrix{!strcmp(format, "q8_0") ? Q8_0 : !strcmp(format, "q4_K") ? Q4_K : Q4_0, PANEL, columns};
  matrix.memory = map_memory(2 * matrix.bytes()), matrix.data = matrix.memory.get();
  const auto memory = map_memory(Rows::bytes(rows, columns)), sums = map_memory(sizeof(F) * ROW_BLOCK);
  const Rows all = Rows::in(memory.get(), rows, columns);
  const Job job{&matrix, 0, 0, matrix.data, matrix.data};
  Workspace work;
  begin();
  if (rows == 1)
    multiply(job, all, rows, (F*)sums.get(), work);
  else
    multiply(&job, 1, all, 0, rows, (F*)sums.get(), work);
  finish();
}
#endif

int main(int, char** argv) { multiply(argv[1], atoi(argv[2]), atoi(argv[3])); }
