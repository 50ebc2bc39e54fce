// Rows of logits to the distributions that are sampled, and draws from them. A row is worked on by one thread, in the order of
// its columns, so that its bits do not depend on the batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "choose.h"
#include "noise.h"
#include "vec.h"

namespace sampling {

// Floats as integers of the same order. ±0 are apart.
static inline vi in_order(vf v) {
  const vi bits = (vi)v;
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
static inline float from_order(int32_t ordered) {
  const int32_t bits = ordered ^ ((ordered >> 31) & 0x7fffffff);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline int32_t to_order(float value) {
  int32_t bits;
  memcpy(&bits, &value, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The largest t below which `holds` is true, for one that is true at `low` and false at `high`, and turns once.
template <class Holds>
float last_where(float low, float high, const Holds& holds) {
  int64_t below = to_order(low), above = to_order(high);
  while (above - below > 1) {
    const int64_t middle = below + (above - below) / 2;
    (holds(from_order(int32_t(middle))) ? below : above) = middle;
  }
  return from_order(int32_t(below));
}

// Σ of the values above t.
static inline float mass_above(const float* x, int64_t size, float t) {
  vf total = splat(0);
  for (int64_t i = 0; i < size; i += W) {
    const vf v = load_some(x + i, size - i);
    total += select(v > splat(t), v, splat(0));
  }
  return sum(total);
}

// How many values are at least t; what fills the last vector up is no value.
static inline int64_t count_from(const float* x, int64_t size, float t) {
  int64_t count = 0, i = 0;
  vi counts = {};
  for (; i + W <= size; i += W) counts -= load(x + i) >= splat(t);
  for (int k = 0; k < W; k++) count += counts[k];
  for (; i < size; i++) count += x[i] >= t;
  return count;
}

static inline float scale_row(float* x, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i += W) store_some(x + i, load_some(x + i, size - i) * factor, size - i);
  return factor;
}

struct Filter {
  float temperature;
  int64_t top_k;       // size: none
  float top_p, min_p;  // 1 and 0: none
};

// x → the distribution after temperature, top-k, top-p and min-p; torch_sampling.py is the reference.
template <class T>
void filter_row(float* out, const T* x, int64_t size, const Filter& f) {
  float largest = -INFINITY;
  for (int64_t i = 0; i < size; i += W) {
    const int64_t count = size - i;
    store_some(out + i, load_some(x + i, count) / splat(f.temperature), count);
  }
  largest = choose::largest(out, size);
  float least = -INFINITY;  // scaled logits from here on stay
  if (f.top_k < size) {
    float smallest = largest;
    for (int64_t i = 0; i < size; i++) smallest = std::min(smallest, out[i]);
    // All values are at least the smallest; the k-th largest is where fewer than k begin to be left.
    least = count_from(out, size, largest) >= f.top_k
                ? largest
                : last_where(smallest, largest, [&](float t) { return count_from(out, size, t) >= f.top_k; });
  }
  vf total = splat(0);
  for (int64_t i = 0; i < size; i += W) {
    const int64_t count = size - i;
    const vf scaled = load_some(out + i, count), power = (scaled - largest) * LOG2_E;
    vf p = select(power >= splat(-126.0f), vexp2(power), splat(0));  // a token that is forbidden has no chance at all
    p = select(scaled >= splat(least), p, splat(0));
    if (count < W) {
      for (int k = int(count); k < W; k++) p[k] = 0;
    }
    total += p;
    store_some(out + i, p, count);
  }
  const float most = scale_row(out, size, 1.0f / sum(total));  // of the likeliest, whose power is 0
  float above = 0;  // chances up to here are dropped
  if (f.top_p < 1 && mass_above(out, size, 0) >= f.top_p)
    above = last_where(0, most, [&](float t) { return mass_above(out, size, t) >= f.top_p; });
  const float floor = most * f.min_p;
  if (above <= 0 && floor <= 0) return;
  total = splat(0);
  for (int64_t i = 0; i < size; i += W) {
    const int64_t count = size - i;
    vf p = load_some(out + i, count);
    p = select((p > splat(above)) & (p >= splat(floor)), p, splat(0));
    total += p;
    store_some(out + i, p, count);
  }
  scale_row(out, size, 1.0f / sum(total));
}

struct Filters {
  const float* temperature;
  const int64_t* top_k;  // each [rows], or null: nobody has one
  const float *top_p, *min_p;

  Filter of(int64_t row, int64_t size) const {
    return {temperature[row], top_k ? top_k[row] : size, top_p ? top_p[row] : 1.0f, min_p ? min_p[row] : 0.0f};
  }
};

// By a team, as those below.
template <class T>
void filter_rows(float* out, const T* x, const Filters& filters, int64_t rows, int64_t size) {
#pragma omp for schedule(dynamic, 1)
  for (int64_t n = 0; n < rows; n++) filter_row(out + n * size, x + n * size, size, filters.of(n, size));
}

// The first column up to which more than u of the weight lies. Never one without weight, as long as the row has any.
static inline int64_t draw(const float* weights, int64_t size, double u) {
  constexpr int64_t CHUNK = 512;
  auto weight_of = [&](int64_t at) {
    vf total = splat(0);
    const int64_t end = std::min(size, at + CHUNK);
    for (int64_t i = at; i < end; i += W) total += load_some(weights + i, end - i);
    return double(sum(total));
  };
  double total = 0;
  for (int64_t at = 0; at < size; at += CHUNK) total += weight_of(at);
  const double target = u * total;
  double before = 0, begun = 0;
  int64_t chosen = 0;
  for (int64_t at = 0; at < size; at += CHUNK) {
    const double weight = weight_of(at);
    if (weight > 0) chosen = at, begun = before;
    before += weight;
    if (before > target) break;
  }
  int64_t found = chosen;
  for (int64_t i = chosen; i < std::min(size, chosen + CHUNK); i++) {
    if (!(weights[i] > 0)) continue;
    found = i, begun += weights[i];
    if (begun > target) break;
  }
  return found;
}

static inline void draw_rows(int64_t* out, const float* weights, const double* uniforms, int64_t rows, int64_t size) {
#pragma omp for schedule(static)
  for (int64_t n = 0; n < rows; n++) out[n] = draw(weights + n * size, size, uniforms[n]);
}

// R requests with their rows side by side: one for each of ℓ draft tokens, which it decides about, and one after them.
struct Drafts {
  const float* probs;        // [M, vocab]
  const int64_t* drafted;    // [M] target ids
  const int32_t* row_start;  // [R + 1]
  const double* uniforms;    // [M]
  const int64_t* keys;       // [R] of the draw of the token after those that stand
  const float* draft_probs;  // [M, draft_vocab], or null: all are one-hot
  const bool* one_hot;       // [R], or null: nobody's are
  const int64_t *vocab_map, *draft_ids;  // [draft_vocab], [M], or null: the same ids
  int64_t requests, vocab, draft_vocab;
  int64_t *counts, *tokens;  // out: [R]
};

// The rejection rule (Leviathan et al. 2023): x stands iff u · q(x) < p(x); at the first that does not, the token is drawn from
// max(0, p − q).
static inline void accept_one(const Drafts& a, int64_t r) {
  const int64_t start = a.row_start[r], length = a.row_start[r + 1] - start - 1;
  const bool hot = !a.draft_probs || (a.one_hot && a.one_hot[r]);
  int64_t count = 0;
  for (; count < length; count++) {
    const int64_t row = start + count, token = a.drafted[row];
    const double q = hot ? 1.0 : a.draft_probs[row * a.draft_vocab + (a.draft_ids ? a.draft_ids[row] : token)];
    if (!(a.uniforms[row] * q < double(a.probs[row * a.vocab + token]))) break;
  }
  const int64_t row = start + count;
  const float* weights = a.probs + row * a.vocab;
  static thread_local std::vector<float> residual;
  if (count < length) {
    residual.assign(weights, weights + a.vocab);
    if (hot) {
      residual[a.drafted[row]] -= 1.0f;
    } else {
      const float* q = a.draft_probs + row * a.draft_vocab;
      for (int64_t i = 0; i < a.draft_vocab; i++) residual[a.vocab_map ? a.vocab_map[i] : i] -= q[i];
    }
    vf total = splat(0);
    for (int64_t i = 0; i < a.vocab; i += W) {
      const vf left = vmax(load_some(residual.data() + i, a.vocab - i), splat(0));
      total += left;
      store_some(residual.data() + i, left, a.vocab - i);
    }
    // p = q up to rounding leaves nothing: the rejection itself was rounding, and p is what is owed.
    if (sum(total) > 0) weights = residual.data();
  }
  a.counts[r] = count;
  a.tokens[r] = noise::draw(weights, uint64_t(a.keys[r]), nullptr, a.vocab);
}

static inline void accept(const Drafts& a) {
#pragma omp for schedule(dynamic, 1)
  for (int64_t r = 0; r < a.requests; r++) accept_one(a, r);
}

}  // namespace sampling
