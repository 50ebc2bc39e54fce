// Greedy choices: the largest of a row, and the drafter's chain of choices, each biased by the one before.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

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

// scores = base + Σ_j e_j · w2[j] in `size` columns from `at` on.
template <class T>
void biased(float* scores, const T* base, const T* e, const T* w2, int64_t rank, int64_t vocab, int64_t at, int64_t size) {
  for (int64_t i = 0; i < size; i += W) {
    vf v = load_some(base + at + i, size - i);
    store_some(scores + i, v, size - i);
  }
  int64_t j = 0;
  for (; j + kTogether <= rank; j += kTogether) add_columns<kTogether>(scores, e + j, w2 + j * vocab + at, vocab, size);
  for (; j < rank; j++) add_columns<1>(scores, e + j, w2 + j * vocab + at, vocab, size);
}

// By a team: out = base + w1[previous] · w2, in fp32; out and base [requests, vocab].
template <class T>
void markov_logits(float* out, const T* base, const T* w1, const T* w2, const int64_t* previous, int64_t requests,
                   int64_t rank, int64_t vocab) {
  const int64_t chunks = (vocab + kChunk - 1) / kChunk;
#pragma omp for schedule(static)
  for (int64_t n = 0; n < requests * chunks; n++) {
    const int64_t r = n / chunks, at = n % chunks * kChunk;
    biased(out + r * vocab + at, base + r * vocab, w1 + previous[r] * rank, w2, rank, vocab, at,
           std::min(kChunk, vocab - at));
  }
}

// The best of those scores in the columns first .. last, a chunk at a time.
template <class T>
Best biased_best(const T* base, const T* e, const T* w2, int64_t rank, int64_t vocab, int64_t first, int64_t last) {
  float scores[kChunk];
  Best best;
  for (int64_t at = first; at < last; at += kChunk) {
    int64_t size = std::min(kChunk, last - at);
    biased(scores, base, e, w2, rank, vocab, at, size);
    consider(best, scores, at, size);
  }
  return best;
}

// x_k = argmax(base_k + W1[x_{k−1}] W2), from left to right; without w1 the argmax of base_k.
struct Chain {
  const void* base;           // [requests, slots, vocab]
  const void *w1, *w2;        // [V, rank], [rank, vocab]; null with rank 0
  const int64_t* anchors;     // [requests]
  const int64_t* vocab_map;   // [vocab] or null
  int64_t *ids, *previous;    // [requests, slots]
  int64_t requests, slots, rank, vocab;

  template <class T>
  Best best(int64_t at, int64_t token, int64_t first, int64_t last) const {
    return biased_best((const T*)base + at * vocab, (const T*)w1 + token * rank, (const T*)w2, rank, vocab, first, last);
  }
  int64_t note(int64_t at, int64_t token, const Best& chosen) const {
    previous[at] = token;
    return ids[at] = vocab_map ? vocab_map[chosen.index] : chosen.index;
  }
};

// What each thread found, by turns in two rows: who is ahead writes where nobody reads any more.
struct Bests {
  struct alignas(64) Line {
    Best best;
  };
  std::vector<Line> lines;

  explicit Bests(int threads) : lines(2 * std::max(threads, 1)) {}
};

// By a team. Few requests: the threads share out the columns of one slot after the other.
template <class T>
void run_chain(const Chain& a, Bests& bests) {
  const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
  if (a.requests >= threads) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < a.requests; r++) {
      int64_t token = a.anchors[r];
      for (int64_t at = r * a.slots; at < (r + 1) * a.slots; at++) token = a.note(at, token, a.best<T>(at, token, 0, a.vocab));
    }
    return;
  }
  const int64_t chunks = (a.vocab + kChunk - 1) / kChunk;
  const int64_t first = std::min(a.vocab, chunks * thread / threads * kChunk);
  const int64_t last = std::min(a.vocab, chunks * (thread + 1) / threads * kChunk);
  for (int64_t r = 0; r < a.requests; r++) {
    int64_t token = a.anchors[r];
    for (int64_t at = r * a.slots; at < (r + 1) * a.slots; at++) {
      Bests::Line* found = bests.lines.data() + at % 2 * threads;
      found[thread].best = a.best<T>(at, token, first, last);
#pragma omp barrier
      Best best = found[0].best;
      for (int64_t t = 1; t < threads; t++)
        if (found[t].best.value > best.value) best = found[t].best;
      if (thread == 0) {
        token = a.note(at, token, best);
      } else {
        token = a.vocab_map ? a.vocab_map[best.index] : best.index;
      }
    }
  }
#pragma omp barrier
}

}  // namespace choose
