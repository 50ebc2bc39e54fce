// Draws with noise that belongs to a place and a token: argmax of log p + Gumbel noise, as argmin of E / p with E = −log u
// and u from a hash of the row's key and the token id.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <omp.h>

namespace noise {

// splitmix64 (Steele, Lea and Flood 2014).
inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// 52 bits, so that u is neither 0 nor 1.
inline double uniform(uint64_t key, uint64_t id) {
  return ((double)(mix(key + (id + 1) * 0x9e3779b97f4a7c15u) >> 12) + 0.5) * 0x1p-52;
}

constexpr int64_t TOGETHER = 64;  // tokens that are looked at in one vectorised loop

// Whether some token of a block may be better than `best`, which is finite: E ≥ 1 − u, so that no logarithm is needed.
template <bool MAPPED>
inline bool may_win(const float* probs, uint64_t key, const int64_t* ids, int64_t first, double best) {
  bool may = false;
  for (int64_t i = 0; i < TOGETHER; i++) {
    const uint64_t id = MAPPED ? (uint64_t)ids[first + i] : (uint64_t)(first + i);
    may |= 1 - uniform(key, id) <= best * (double)probs[first + i];
  }
  return may;
}

inline int64_t draw(const float* probs, uint64_t key, const int64_t* ids, int64_t size) {
  double best = INFINITY;
  int64_t found = 0;
  for (int64_t first = 0; first < size; first += TOGETHER) {
    const int64_t last = std::min(size, first + TOGETHER);
    if (best < INFINITY && last - first == TOGETHER &&
        !(ids ? may_win<true>(probs, key, ids, first, best) : may_win<false>(probs, key, ids, first, best)))
      continue;
    for (int64_t i = first; i < last; i++) {
      const double p = probs[i];
      if (!(p > 0)) continue;
      const double u = uniform(key, (uint64_t)(ids ? ids[i] : i));
      if (1 - u > best * p) continue;
      const double cost = -std::log(u) / p;
      if (cost < best) best = cost, found = i;
    }
  }
  return found;
}

inline void draw_rows(int64_t* out, const float* probs, const int64_t* keys, const int64_t* ids, int64_t rows,
                      int64_t size, int threads) {
#pragma omp parallel for num_threads(rows * size < 65536 ? 1 : threads)
  for (int64_t n = 0; n < rows; n++) out[n] = draw(probs + n * size, (uint64_t)keys[n], ids, size);
}

}  // namespace noise
