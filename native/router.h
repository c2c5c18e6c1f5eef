// The experts of each row, and the rows of each expert.
#pragma once
#include <algorithm>
#include <vector>

#include "groups.h"
#include "memory.h"
#include "simd.h"

struct Router {
  const float* weights = nullptr;  // [experts, hidden], owned by the caller
  int experts = 1, chosen = 1;     // in total, and for each row
  bool normalized = false;         // whether the weights of a row's experts are divided by their sum
  const float* bias = nullptr;     // [experts], or null
  bool sigmoid = false;            // whether an expert's weight is the sigmoid of its logit, and not of a softmax
  const float* selection = nullptr;  // [experts], added to these weights for the choice alone; or null
  float scale = 1;                   // of a row's weights
  const float* factors = nullptr;    // [experts], of these weights at the end; or null
  int groups = 1, groups_chosen = 1;  // of neighbours: a row's experts are in those whose two best have the largest sum
  // Logits of a row, padded to a multiple of 16.
  int stride() const { return int(round_up(experts, PANEL)); }
};

struct Choice {
  int32_t expert;
  float weight;
};

constexpr int MAX_GROUPS = 64;
constexpr float LEFT_OUT = -1e30f;

// Which groups of a row's experts are left out. value(expert): by which it is chosen.
template <class Value>
inline void leave_out_groups(const Router& router, const Value& value, bool* out) {
  const int size = router.experts / router.groups;
  float best[MAX_GROUPS];
  for (int group = 0; group < router.groups; group++) {
    float first = LEFT_OUT, second = LEFT_OUT;
    for (int expert = group * size; expert < (group + 1) * size; expert++) {
      const float own = value(expert);
      if (own > first)
        second = first, first = own;
      else if (own > second)
        second = own;
    }
    best[group] = first + second, out[group] = true;
  }
  for (int i = 0; i < router.groups_chosen; i++) {
    int found = -1;
    for (int group = 0; group < router.groups; group++)
      if (out[group] && (found < 0 || best[group] > best[found])) found = group;
    out[found] = false;
  }
}

// The softmax over all experts of a row, or their sigmoids, and the largest in descending order; among equal ones, the
// lower expert is first. Experts are distinct for any logits, even NaN. `logits` has router.stride() places and is changed.
inline void choose(const Router& router, float* logits, Choice* out) {
  std::fill(logits + router.experts, logits + router.stride(), -1e30f);  // with power 0
  if (router.sigmoid)
    for (int i = 0; i < router.stride(); i += PANEL) store(logits + i, sigmoid16(load(logits + i)));
  auto value = [&](int expert) { return logits[expert] + (router.selection ? router.selection[expert] : 0.0f); };
  bool left_out[MAX_GROUPS];
  if (router.groups > 1) leave_out_groups(router, value, left_out);
  int count = 0;
  for (int expert = 0; expert < router.experts; expert++) {
    if (router.groups > 1 && left_out[expert / (router.experts / router.groups)]) continue;
    auto larger = [&](int place) { return value(expert) > value(out[place].expert); };
    if (count == router.chosen && !larger(count - 1)) continue;
    int place = count < router.chosen ? count++ : count - 1;
    for (; place > 0 && larger(place - 1); place--) out[place] = out[place - 1];
    out[place].expert = expert;
  }
  const F top = set1(logits[out[0].expert]);
  F powers = zero();
  for (int i = 0; i < router.stride() && !router.sigmoid; i += PANEL) {
    const F power = power16(mul(sub(load(logits + i), top), set1(LOG2_E)));
    powers = add(powers, power), store(logits + i, power);
  }
  float total = 0;
  for (int i = 0; i < count; i++) total += out[i].weight = logits[out[i].expert];
  if (!router.normalized) total = router.sigmoid ? 1.0f : sum(powers);
  for (int i = 0; i < count; i++)
    out[i].weight = out[i].weight / total * router.scale * (router.factors ? router.factors[out[i].expert] : 1);
}

// The rows of each expert that is chosen by any row.
class Routes {
 public:
  struct Group {
    int expert, first, count;  // `first`: index in the rows of all groups
  };
  struct Row {
    int row;
    float weight;
  };

  // Sorts [rows, chosen] choices.
  void sort(const Router& router, const Choice* choices, int count) {
    const int all = count * router.chosen;
    ends_.assign(router.experts, 0), groups_.clear(), rows_.resize(all);
    for (int i = 0; i < all; i++) ends_[choices[i].expert]++;
    for (int expert = 0, first = 0; expert < router.experts; expert++) {
      const int some = ends_[expert];
      if (some) groups_.push_back({expert, first, some});
      ends_[expert] = first, first += some;
    }
    for (int i = 0; i < all; i++) rows_[ends_[choices[i].expert]++] = {i / router.chosen, choices[i].weight};
  }
  const std::vector<Group>& groups() const { return groups_; }  // by expert
  const Row* rows(const Group& group) const { return &rows_[group.first]; }  // ascending

 private:
  std::vector<Group> groups_;
  std::vector<Row> rows_;
  std::vector<int> ends_;  // [experts]
};
