// The kernels of a variant with one function more: it times the recurrence of layers with a state in chunks, as a pass
// computes it (native/states.h), beside the plain one, token by token, made of the same parts.
#include "model.cpp"

namespace {

// The plain recurrence of heads of v that share a head of k: the state is read and written for every token.
void run_plainly(const StateRun& run, int sequence, const StateRun::Part& part, float* states, Model::Private& own) {
  const StateShape& c = run.c;
  const int first = run.batch.row_starts[sequence], count = run.batch.row_starts[sequence + 1] - first;
  float* q = own.states.get<float>(2 * c.k_dim + 3 * c.v_dim);
  float *k = q + c.k_dim, *seen = k + c.k_dim, *u = seen + c.v_dim, *out = u + c.v_dim;
  const StateRun::Inputs inputs(run, sequence);
  for (int i = 0; i < count; i++) {
    const float* made = run.at.projected + size_t(first + i) * run.block.qkv.width;
    run.convolve(inputs, i, part.key * c.k_dim, c.k_dim, q);
    run.convolve(inputs, i, c.k_size() + part.key * c.k_dim, c.k_dim, k);
    StateRun::normalize(q, c.k_dim, 1.0f / std::sqrt(float(c.k_dim))), StateRun::normalize(k, c.k_dim, 1.0f);
    for (int g = 0; g < part.count; g++) {
      const int head = part.v_head(c, g);
      float* state = states + size_t(head) * c.k_dim * c.v_dim;
      const double x = double(made[c.a_column() + head]) + c.dt_bias[head];
      const F keep = set1(exp_of(float(-double(c.decay[head]) * (x > 30 ? x : std::log1p(std::exp(x))))));
      const float strength = float(1.0 / (1.0 + std::exp(-double(made[c.b_column() + head]))));
      run.convolve(inputs, i, 2 * c.k_size() + head * c.v_dim, c.v_dim, u);
      const float *rows[512], *factors = k;
      for (int j = 0; j < c.k_dim; j++) rows[j] = state + size_t(j) * c.v_dim;
      weighted_sums(rows, c.k_dim, {&factors}, 1, c.v_dim, nullptr, &seen);
      for (int d = 0; d < c.v_dim; d += 16)
        store(u + d, mul(set1(strength), fnma(keep, load(seen + d), load(u + d)))), store(out + d, zero());
      for (int d = 0; d < c.v_dim; d += 64) {
        F written[4], sums[4];
        for (int v = 0; v < 4; v++) written[v] = load(u + d + 16 * v), sums[v] = zero();
        for (int j = 0; j < c.k_dim; j++) {
          float* row = state + size_t(j) * c.v_dim + d;
          const F key = set1(k[j]), query = set1(q[j]);
          for (int v = 0; v < 4; v++) {
            const F next = fma(key, written[v], mul(keep, load(row + 16 * v)));
            store(row + 16 * v, next), sums[v] = fma(query, next, sums[v]);
          }
        }
        for (int v = 0; v < 4; v++) store(out + d + 16 * v, sums[v]);
      }
      rms_norm(out, c.norm, c.v_dim, run.m.config.eps, out);
      float* mixed = run.at.mixed + size_t(first + i) * c.v_size() + head * c.v_dim;
      const float* z = made + c.z_column() + head * c.v_dim;
      for (int d = 0; d < c.v_dim; d += 16) store(mixed + d, mul(load(out + d), silu16(load(z + d))));
    }
  }
}

}  // namespace

// One member computes all layers with a state for the rows of a batch, in chunks and then plainly. Nanoseconds of both
// go to `ns`, and the largest difference of what they make, over its root mean square, to `difference`, which means
// something where sequences begin without a state. `states`: [layers, sequences, heads of v, k_dim, v_dim], those of the
// plain recurrence.
#pragma GCC visibility push(default)
extern "C" void twostroke_time_states(void* model, const Batch* given, uint8_t* kv, const int64_t* strides, float* states,
                                      int64_t* ns, double* difference) {
  Model& m = *(Model*)model;
  const Turn turn(m.team->turn);
  m.team->settle();
  Pass& pass = m.passes[0];
  pass.begin(m, *given, kv, strides, 1, m.common);
  Model::Private& own = m.own[0];
  ns[0] = ns[1] = 0, *difference = 0;
  uint32_t seed = 1;
  auto number = [&] { return float(int32_t(seed = seed * 1664525 + 1013904223)) / float(1u << 31); };
  std::vector<float> chunked;
  for (size_t i = 0; i < m.blocks.size(); i++) {
    const Block& b = m.blocks[i];
    if (!b.state) continue;
    const StateShape& c = *b.state;
    const StateRun run{m, b, c, pass, pass.batch, pass.room.of(i)};
    const size_t rows = pass.batch.num_rows, size = c.state_size();
    for (size_t j = 0; j < rows * b.qkv.width; j++) run.at.projected[j] = number();
    for (size_t j = 0; j < rows * c.conv_size(); j += 16) {
      float some[16];
      for (float& one : some) one = number();
      store_bf16(run.at.state_inputs + j, load(some));
    }
    for (int way = 0; way < 2; way++) {
      const auto began = Clock::now();
      for (int s = 0; s < pass.batch.num_sequences; s++, states += way ? size : 0)
        for (int key = 0; key < c.k_heads; key++)
          for (int part = 0; part < c.v_heads / c.k_heads; part += c.together()) {
            const StateRun::Part some{key, part, c.together()};
            way ? run_plainly(run, s, some, states, own) : run.run(s, some, own);
          }
      ns[way] += Time(Clock::now() - began).count();
      if (!way) chunked.assign(run.at.mixed, run.at.mixed + rows * c.v_size());
    }
    double most = 0, squares = 0;
    for (size_t j = 0; j < chunked.size(); j++) {
      most = std::max(most, std::abs(double(chunked[j]) - run.at.mixed[j]));
      squares += double(chunked[j]) * chunked[j];
    }
    *difference = std::max(*difference, most / std::sqrt(squares / double(chunked.size())));
  }
}
#pragma GCC visibility pop
