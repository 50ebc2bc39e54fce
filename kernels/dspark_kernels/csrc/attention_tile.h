// One tile of keys and values against a few query rows: packing, scores, softmax weights, weighted sum. See attention.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vec.h"

namespace attention {

constexpr int TILE = 64;             // keys whose scores are held at once
constexpr int ROWS = 6;              // rows in registers at once
constexpr int NV = W == 16 ? 4 : 2;  // vectors per row in registers at once
constexpr float MASKED = -1e30f;     // below any score, without the NaNs of infinities

// bf16 products of pairs, accumulated in fp32, where the CPU has the instruction: keys are then packed as pairs of
// dimensions and values as pairs of keys, each pair in 32 bits. Everywhere else the tile is packed as fp32.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool PAIRS = std::is_same<T, bf16>::value;
static inline vf dot_pairs(vf acc, uint32_t a, vu b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
}
#else
template <class T>
constexpr bool PAIRS = false;
static inline vf dot_pairs(vf acc, uint32_t, vu) { return acc; }
#endif

// Where the keys and values of one tile are, all heads of a row side by side.
template <class T>
struct TileRows {
  const T *keys[TILE], *values[TILE];
  int count = 0;
};

// Fetches a tile into the second-level cache, a few lines at a time between the products of the tile before it: all at
// once they would fill the queue of outstanding misses and stop the products too.
class Fetcher {
 public:
  Fetcher() = default;
  template <class T>
  Fetcher(const TileRows<T>& rows, int64_t row_bytes, int64_t steps)
      : keys(reinterpret_cast<const char* const*>(rows.keys)),
        values(reinterpret_cast<const char* const*>(rows.values)),
        row_bytes(row_bytes),
        left(rows.count),
        per_step(int((rows.count * ((row_bytes + 63) / 64) + steps - 1) / steps)) {}

  inline void step() {
    for (int i = 0; i < per_step && left; i++) {
      __builtin_prefetch(*keys + byte, 0, 2);
      __builtin_prefetch(*values + byte, 0, 2);
      byte += 64;
      if (byte >= row_bytes) byte = 0, keys++, values++, left--;
    }
  }

 private:
  const char *const *keys = nullptr, *const *values = nullptr;
  int64_t row_bytes = 0, byte = 0;
  int left = 0, per_step = 0;
};

#if defined(__AVX512F__)
// 16 rows of 16 words → their columns, `to_stride` words apart.
static inline void transpose16(const void* const* rows, int64_t byte, uint32_t* to, int64_t to_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(static_cast<const char*>(rows[i]) + byte);
  for (int i = 0; i < 8; i++) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    _mm512_store_si512(to + i * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
    _mm512_store_si512(to + (i + 4) * to_stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
    _mm512_store_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    _mm512_store_si512(to + (i + 12) * to_stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
  }
}
#endif

// Keys [TILE][dim] behind pointers → columns: [dim][TILE] floats, or [dim / 2][TILE] pairs. Pointers past the last key
// lead to zeros.
template <class T>
void pack_keys(float* to, const T* const* keys, int64_t dim, int num_keys) {
#if defined(__AVX512F__)
  if constexpr (PAIRS<T> || std::is_same<T, float>::value) {
    int64_t words = dim * sizeof(T) / 4;
    for (int key = 0; key < num_keys; key += 16)
      for (int64_t word = 0; word < words; word += 16)
        transpose16(reinterpret_cast<const void* const*>(keys + key), word * 4,
                    reinterpret_cast<uint32_t*>(to) + word * TILE + key, TILE);
    return;
  }
#endif
  for (int key = 0; key < TILE; key++)
    for (int64_t d = 0; d < dim; d++) to[d * TILE + key] = to_float(keys[key][d]);
}

// Values [TILE][dim] behind pointers → [TILE][dim] floats, or [TILE / 2][dim] pairs of consecutive keys.
template <class T>
void pack_values(float* to, const T* const* values, int64_t dim, int num_keys) {
#if defined(__AVX512BF16__)
  if constexpr (PAIRS<T>) {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 16; i++) {
      low[2 * i] = i, low[2 * i + 1] = 32 + i;
      high[2 * i] = 16 + i, high[2 * i + 1] = 48 + i;
    }
    __m512i low_index = _mm512_load_si512(low), high_index = _mm512_load_si512(high);
    for (int key = 0; key < num_keys; key += 2)
      for (int64_t d = 0; d < dim; d += 32) {
        __m512i a = _mm512_loadu_si512(values[key] + d), b = _mm512_loadu_si512(values[key + 1] + d);
        float* at = to + key / 2 * dim + d;
        _mm512_store_si512(at, _mm512_permutex2var_epi16(a, low_index, b));
        _mm512_store_si512(at + 16, _mm512_permutex2var_epi16(a, high_index, b));
      }
    return;
  }
#endif
  for (int key = 0; key < num_keys; key++)
    for (int64_t d = 0; d < dim; d += W) store(to + key * dim + d, load(values[key] + d));
}

// Scores of R rows against the packed tile: scores[r][key] = q_r · k_key.
template <class T, int R>
void score_rows(float (*scores)[TILE], const float* q, const float* k, int64_t dim, int num_keys, Fetcher* fetcher) {
  int64_t steps = PAIRS<T> ? dim / 2 : dim;
  for (int key = 0; key < num_keys; key += NV * W) {
    vf acc[R][NV] = {};
    for (int64_t d = 0; d < steps; d++) {
      fetcher->step();
      const float* column = k + d * TILE + key;
      vf kv[NV];
      for (int i = 0; i < NV; i++) kv[i] = load(column + i * W);
      for (int r = 0; r < R; r++) {
        float x = q[r * steps + d];
        for (int i = 0; i < NV; i++) {
          if constexpr (PAIRS<T>) {
            uint32_t bits;
            memcpy(&bits, &x, 4);
            acc[r][i] = dot_pairs(acc[r][i], bits, (vu)kv[i]);
          } else {
            acc[r][i] += x * kv[i];
          }
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < NV; i++) store(scores[r] + key + i * W, acc[r][i]);
  }
}

// Scores of R rows → weights 2^(score·scale - max) in place (as bf16 pairs where PAIRS), with each row's running max and
// sum moved on; `scale` holds log2(e). Keys from limits[r] on have weight 0, and those before starts[r], where starts is
// not null. keep[r] is what the row's sums so far must be
// multiplied by. Step by step over all rows, so that one row's waits are filled with the others' work.
template <class T, int R>
void weigh_rows(float (*scores)[TILE], float scale, const int* limits, const int* starts, float* running_max,
                float* running_sum, float* keep) {
  constexpr int N = TILE / W;
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  float new_max[R];
  for (int r = 0; r < R; r++) {
    if (limits[r] < TILE)
      for (int i = 0; i < N; i++)
        store(scores[r] + i * W, select(lane + i * W < limits[r], load(scores[r] + i * W), splat(MASKED)));
    if (starts && starts[r] > 0)
      for (int i = 0; i < N; i++)
        store(scores[r] + i * W, select(lane + i * W < starts[r], splat(MASKED), load(scores[r] + i * W)));
    vf top = load(scores[r]);
    for (int i = 1; i < N; i++) top = vmax(top, load(scores[r] + i * W));
    new_max[r] = std::max(running_max[r], max(top) * scale);
  }
  for (int r = 0; r < R; r++) {
    keep[r] = running_max[r] == new_max[r] ? 1.0f : vexp2(splat(running_max[r] - new_max[r]))[0];
    running_max[r] = new_max[r];
  }
  for (int r = 0; r < R; r++) {
    vf total = splat(0);
    for (int i = 0; i < N; i++) {
      vf weight = vexp2(load(scores[r] + i * W) * scale - new_max[r]);
      if (limits[r] < TILE) weight = select(lane + i * W < limits[r], weight, splat(0));
      if (starts && starts[r] > 0) weight = select(lane + i * W < starts[r], splat(0), weight);
      total += weight;
      if constexpr (PAIRS<T>)
        store(reinterpret_cast<bf16*>(scores[r]) + i * W, weight);
      else
        store(scores[r] + i * W, weight);
    }
    running_sum[r] = running_sum[r] * keep[r] + sum(total);
  }
}

// out[r][d .. d + N·W] = out·keep[r] + weights[r] · values.
template <class T, int R, int N>
void add_values(float* out, const float (*weights)[TILE], const float* keep, const float* v, int64_t dim, int num_keys,
                Fetcher* fetcher) {
  vf acc[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) acc[r][i] = load(out + r * dim + i * W) * keep[r];
  int steps = PAIRS<T> ? (num_keys + 1) / 2 : num_keys;
  for (int key = 0; key < steps; key++) {
    fetcher->step();
    vf vv[N];
    for (int i = 0; i < N; i++) vv[i] = load(v + key * dim + i * W);
    for (int r = 0; r < R; r++) {
      float x = weights[r][key];
      for (int i = 0; i < N; i++) {
        if constexpr (PAIRS<T>) {
          uint32_t bits;
          memcpy(&bits, &x, 4);
          acc[r][i] = dot_pairs(acc[r][i], bits, (vu)vv[i]);
        } else {
          acc[r][i] += x * vv[i];
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) store(out + r * dim + i * W, acc[r][i]);
}

// R rows against one packed tile. limits[r]: keys of the tile that row r sees, at least 0; starts[r], where starts is not
// null: those before it are out of the row's window.
template <class T, int R>
void attend_rows(const float* q, const float* k, const float* v, float* out, float* max, float* sum, const int* limits,
                 const int* starts, int64_t dim, int num_keys, float scale, Fetcher* fetcher) {
  alignas(64) float scores[R][TILE];
  float keep[R];
  score_rows<T, R>(scores, q, k, dim, num_keys, fetcher);
  weigh_rows<T, R>(scores, scale, limits, starts, max, sum, keep);
  int64_t d = 0;
  for (; d + NV * W <= dim; d += NV * W) add_values<T, R, NV>(out + d, scores, keep, v + d, dim, num_keys, fetcher);
  for (; d < dim; d += W) add_values<T, R, 1>(out + d, scores, keep, v + d, dim, num_keys, fetcher);
}

template <class T>
using RowsFunction = void (*)(const float*, const float*, const float*, float*, float*, float*, const int*, const int*,
                              int64_t, int, float, Fetcher*);
template <class T>
constexpr RowsFunction<T> ATTEND_ROWS[ROWS] = {attend_rows<T, 1>, attend_rows<T, 2>, attend_rows<T, 3>,
                                               attend_rows<T, 4>, attend_rows<T, 5>, attend_rows<T, 6>};

}  // namespace attention
