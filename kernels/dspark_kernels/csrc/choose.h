// Greedy choices: the largest of a row, and the drafter's chain of choices, each biased by the one before.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <omp.h>

#include "vec.h"

namespace choose {

constexpr int64_t kChunk = 1024;  // columns looked at together: their fp32 scores stay in the first-level cache

struct Best {
  float value = -INFINITY;
  int64_t index = 0;
};

template <class T>
float largest(const T* x, int64_t size) {
  vf best = splat(-INFINITY);
  int64_t i = 0;
  for (; i + W <= size; i += W) best = vmax(load(x + i), best);
  float m = max(best);
  for (; i < size; i++) m = std::max(m, to_float(x[i]));
  return m;
}

// The first of equals wins, a NaN never does.
template <class T>
void consider(Best& best, const T* x, int64_t start, int64_t size) {
  float m = largest(x, size);
  if (!(m > best.value)) return;
  for (int64_t i = 0; i < size; i++) {
    if (to_float(x[i]) == m) {
      best = {m, start + i};
      return;
    }
  }
}

template <class T>
void argmax(int64_t* out, const T* x, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(rows * size < 65536 ? 1 : threads)
  for (int64_t n = 0; n < rows; n++) {
    Best best;
    for (int64_t at = 0; at < size; at += kChunk)
      consider(best, x + n * size + at, at, std::min(kChunk, size - at));
    out[n] = best.index;
  }
}

constexpr int kTogether = 8;  // terms added to a score while it is in a register

// scores += Σ_{j < N} e_j · w2[j], the rows of w2 `stride` apart.
template <int N, class T>
void add_columns(float* scores, const T* e, const T* w2, int64_t stride, int64_t size) {
  vf factors[N];
  for (int j = 0; j < N; j++) factors[j] = splat(to_float(e[j]));
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    vf v = load(scores + i);
    for (int j = 0; j < N; j++) v += factors[j] * load(w2 + j * stride + i);
    store(scores + i, v);
  }
  for (; i < size; i++)
    for (int j = 0; j < N; j++) scores[i] += to_float(e[j]) * to_float(w2[j * stride + i]);
}

// scores = base + Σ_j e_j · w2[j], a chunk of columns at a time.
template <class T>
int64_t biased_argmax(const T* base, const T* e, const T* w2, int64_t rank, int64_t vocab) {
  float scores[kChunk];
  Best best;
  for (int64_t at = 0; at < vocab; at += kChunk) {
    int64_t size = std::min(kChunk, vocab - at);
    for (int64_t i = 0; i < size; i += W) {
      vf v = load_some(base + at + i, size - i);
      store_some(scores + i, v, size - i);
    }
    int64_t j = 0;
    for (; j + kTogether <= rank; j += kTogether) add_columns<kTogether>(scores, e + j, w2 + j * vocab + at, vocab, size);
    for (; j < rank; j++) add_columns<1>(scores, e + j, w2 + j * vocab + at, vocab, size);
    consider(best, scores, at, size);
  }
  return best.index;
}

template <class T>
void markov_chain(int64_t* ids, int64_t* previous, const T* base, const T* w1, const T* w2, const int64_t* anchors,
                  const int64_t* vocab_map, int64_t requests, int64_t slots, int64_t rank, int64_t vocab, int threads) {
#pragma omp parallel for num_threads(requests == 1 ? 1 : threads)
  for (int64_t r = 0; r < requests; r++) {
    int64_t token = anchors[r];
    for (int64_t k = 0; k < slots; k++) {
      int64_t at = r * slots + k;
      previous[at] = token;
      int64_t chosen = biased_argmax(base + at * vocab, w1 + token * rank, w2, rank, vocab);
      token = ids[at] = vocab_map ? vocab_map[chosen] : chosen;
    }
  }
}

}  // namespace choose
