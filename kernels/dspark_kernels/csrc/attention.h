// Paged attention for the CPU. One task is some rows of one request with the query heads of one key/value head; it walks
// that head's keys once, TILE at a time, with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).
//
// Keys are cut into segments of SEGMENT at fixed places. A segment's (max, sum, output) never depends on other segments,
// and they are merged in order, so a row's result is the same bits whoever computes its segments: threads may share one
// long request, and the batch around a row does not change it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "vec.h"

namespace attention {

constexpr int TILE = 64;            // keys whose scores are held at once
constexpr int SEGMENT = 2 * TILE;   // keys between merges
constexpr int ROWS = 6;             // rows in registers at once
constexpr int NV = W == 16 ? 4 : 2; // vectors per row in registers at once
constexpr int TASK_ROWS = 48;       // (query row, head) pairs of a task, roughly
constexpr float MASKED = -1e30f;    // a score that exp() turns into 0, without the NaNs of infinities
constexpr int64_t SERIAL_WORK = 1 << 16;  // multiply-adds below which a parallel region costs more than it saves

struct Args {
  const void *q, *k_block, *v_block;  // k_block null: causal over the cache alone
  const void *k_cache, *v_cache;
  void* out;
  const int32_t *query_start, *kv_len, *block_tables;
  int64_t table_stride, requests, heads, kv_heads, dim, block_size, k_stride, v_stride;
  float scale;
};

struct Task {
  int64_t request, kv_head, first_row, num_rows;  // rows of the flat batch
  int64_t num_keys;                               // keys that any of its rows sees
  int64_t first_limit;                            // keys that its first row sees; causal: one more for each next row
  int64_t partial;                                // index of its first segment's partial result
};

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

// Scratch of one thread. All sizes in 32-bit words; grown, never shrunk.
struct Scratch {
  float *q, *k, *v, *out, *segment_out, *max, *sum, *segment_max, *segment_sum;

  explicit Scratch(int64_t rows, int64_t dim) {
    int64_t wanted = rows * dim * 3 + 2 * TILE * dim + 4 * rows + 64;
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < wanted) memory.resize(wanted);
    uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63);
    k = reinterpret_cast<float*>(aligned);
    v = k + TILE * dim;
    q = v + TILE * dim;
    out = q + rows * dim;
    segment_out = out + rows * dim;
    max = segment_out + rows * dim;
    sum = max + rows;
    segment_max = sum + rows;
    segment_sum = segment_max + rows;
  }
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
void score_rows(float (*scores)[TILE], const float* q, const float* k, int64_t dim, int num_keys) {
  int64_t steps = PAIRS<T> ? dim / 2 : dim;
  for (int key = 0; key < num_keys; key += NV * W) {
    vf acc[R][NV] = {};
    for (int64_t d = 0; d < steps; d++) {
      const float* column = k + d * TILE + key;
      vf kv[NV];
      for (int i = 0; i < NV; i++) kv[i] = load(column + i * W);
      for (int r = 0; r < R; r++) {
        float x = q[r * dim + d];
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

// One row's scores → weights exp(score·scale - max) in place (as bf16 pairs where PAIRS), with the running max and sum
// moved on. Keys from `limit` on have weight 0. Returns what the sums so far must be multiplied by.
template <class T>
float weigh_row(float* scores, float scale, int limit, float* running_max, float* running_sum) {
  constexpr int N = TILE / W;
  vf s[N];
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  vf top = splat(MASKED);
  for (int i = 0; i < N; i++) {
    s[i] = load(scores + i * W) * scale;
    if (limit < TILE) s[i] = select(lane + i * W < limit, s[i], splat(MASKED));
    top = vmax(top, s[i]);
  }
  float old_max = *running_max, new_max = std::max(old_max, max(top));
  vf total = splat(0);
  for (int i = 0; i < N; i++) {
    s[i] = vexp(s[i] - new_max);
    if (limit < TILE) s[i] = select(lane + i * W < limit, s[i], splat(0));
    total += s[i];
  }
  for (int i = 0; i < N; i++) {
    if constexpr (PAIRS<T>)
      store(reinterpret_cast<bf16*>(scores) + i * W, s[i]);
    else
      store(scores + i * W, s[i]);
  }
  float keep = old_max == new_max ? 1.0f : vexp(splat(old_max - new_max))[0];
  *running_max = new_max;
  *running_sum = *running_sum * keep + sum(total);
  return keep;
}

// out[r][d .. d + N·W] = out·keep[r] + weights[r] · values.
template <class T, int R, int N>
void add_values(float* out, const float (*weights)[TILE], const float* keep, const float* v, int64_t dim, int num_keys) {
  vf acc[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) acc[r][i] = load(out + r * dim + i * W) * keep[r];
  int steps = PAIRS<T> ? (num_keys + 1) / 2 : num_keys;
  for (int key = 0; key < steps; key++) {
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

// R rows against one packed tile. limits[r]: keys of the tile that row r sees, at least 0.
template <class T, int R>
void attend_rows(const float* q, const float* k, const float* v, float* out, float* max, float* sum, const int* limits,
                 int64_t dim, int num_keys, float scale) {
  alignas(64) float scores[R][TILE];
  float keep[R];
  score_rows<T, R>(scores, q, k, dim, num_keys);
  for (int r = 0; r < R; r++) keep[r] = weigh_row<T>(scores[r], scale, limits[r], max + r, sum + r);
  int64_t d = 0;
  for (; d + NV * W <= dim; d += NV * W) add_values<T, R, NV>(out + d, scores, keep, v + d, dim, num_keys);
  for (; d < dim; d += W) add_values<T, R, 1>(out + d, scores, keep, v + d, dim, num_keys);
}

template <class T>
using RowsFunction = void (*)(const float*, const float*, const float*, float*, float*, float*, const int*, int64_t,
                              int, float);
template <class T>
constexpr RowsFunction<T> ATTEND_ROWS[ROWS] = {attend_rows<T, 1>, attend_rows<T, 2>, attend_rows<T, 3>,
                                               attend_rows<T, 4>, attend_rows<T, 5>, attend_rows<T, 6>};

// Where the keys and values first_key .. first_key + count of a task are: the cache through the block table, then the
// request's own block. The rest of the tile points to zeros.
template <class T>
void locate(const Args& a, const Task& task, int64_t first_key, int count, const T** keys, const T** values) {
  alignas(64) static const T zeros[1024] = {};
  int64_t context = a.kv_len[task.request], head = task.kv_head * a.dim;
  const T *k_cache = static_cast<const T*>(a.k_cache) + head, *v_cache = static_cast<const T*>(a.v_cache) + head;
  const int32_t* table = a.block_tables + task.request * a.table_stride;
  int i = 0;
  int64_t key = first_key;
  int64_t cached = std::min<int64_t>(count, std::max<int64_t>(context - first_key, 0));
  while (i < cached) {
    int64_t offset = key % a.block_size, row = table[key / a.block_size] * a.block_size + offset;
    int64_t run = std::min<int64_t>(a.block_size - offset, cached - i);
    for (int64_t j = 0; j < run; j++, i++, key++, row++) {
      keys[i] = k_cache + row * a.k_stride;
      values[i] = v_cache + row * a.v_stride;
    }
  }
  for (; i < count; i++, key++) {
    int64_t at = (a.query_start[task.request] + key - context) * a.kv_heads * a.dim + head;
    keys[i] = static_cast<const T*>(a.k_block) + at;
    values[i] = static_cast<const T*>(a.v_block) + at;
  }
  for (; i < TILE; i++) keys[i] = values[i] = zeros;
}

// The task's query rows, one (row, head) pair after the other, in the form score_rows reads.
template <class T>
void gather_queries(const Args& a, const Task& task, float* to) {
  int64_t group = a.heads / a.kv_heads;
  for (int64_t row = 0; row < task.num_rows; row++) {
    const T* q = static_cast<const T*>(a.q) + ((task.first_row + row) * a.heads + task.kv_head * group) * a.dim;
    for (int64_t h = 0; h < group; h++, q += a.dim, to += a.dim) {
      if constexpr (PAIRS<T>)
        memcpy(to, q, a.dim * sizeof(T));
      else
        for (int64_t d = 0; d < a.dim; d += W) store(to + d, load(q + d));
    }
  }
}

// One segment of a task's keys: out [rows, dim] unnormalised, max and sum [rows].
template <class T>
void attend_segment(const Args& a, const Task& task, int64_t segment, const Scratch& s, float* out, float* max,
                    float* sum) {
  int64_t group = a.heads / a.kv_heads, rows = task.num_rows * group;
  std::fill(out, out + rows * a.dim, 0.0f);
  std::fill(max, max + rows, MASKED);
  std::fill(sum, sum + rows, 0.0f);
  int64_t end = std::min<int64_t>((segment + 1) * SEGMENT, task.num_keys);
  for (int64_t first_key = segment * SEGMENT; first_key < end; first_key += TILE) {
    int count = int(std::min<int64_t>(TILE, end - first_key));
    const T *keys[TILE], *values[TILE];
    locate(a, task, first_key, count, keys, values);
    pack_keys(s.k, keys, a.dim, count);
    pack_values(s.v, values, a.dim, count);
    for (int64_t row = 0; row < rows; row += ROWS) {
      int n = int(std::min<int64_t>(ROWS, rows - row)), limits[ROWS];
      for (int r = 0; r < n; r++) {
        int64_t seen = a.k_block ? task.num_keys : task.first_limit + (row + r) / group;
        limits[r] = int(std::clamp<int64_t>(seen - first_key, 0, count));
      }
      if (limits[n - 1] == 0) continue;  // limits grow with the row
      ATTEND_ROWS<T>[n - 1](s.q + row * a.dim, s.k, s.v, out + row * a.dim, max + row, sum + row, limits, a.dim, count,
                            a.scale);
    }
  }
}

// Fold a segment's result into the running one.
static void merge(float* out, float* max, float* sum, const float* more_out, const float* more_max,
                  const float* more_sum, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; r++) {
    float top = std::max(max[r], more_max[r]);
    float keep = max[r] == top ? 1.0f : vexp(splat(max[r] - top))[0];
    float take = more_sum[r] == 0.0f ? 0.0f : more_max[r] == top ? 1.0f : vexp(splat(more_max[r] - top))[0];
    for (int64_t d = r * dim; d < (r + 1) * dim; d += W) store(out + d, load(out + d) * keep + load(more_out + d) * take);
    sum[r] = sum[r] * keep + more_sum[r] * take;
    max[r] = top;
  }
}

template <class T>
void write_rows(const Args& a, const Task& task, const float* out, const float* sum) {
  int64_t group = a.heads / a.kv_heads;
  for (int64_t row = 0; row < task.num_rows; row++) {
    T* to = static_cast<T*>(a.out) + ((task.first_row + row) * a.heads + task.kv_head * group) * a.dim;
    for (int64_t h = 0; h < group; h++, out += a.dim, sum++, to += a.dim) {
      float inverse = 1.0f / *sum;
      for (int64_t d = 0; d < a.dim; d += W) store(to + d, load(out + d) * inverse);
    }
  }
}

static int64_t num_segments(const Task& task) { return (task.num_keys + SEGMENT - 1) / SEGMENT; }

static std::vector<Task>& make_tasks(const Args& a) {
  static thread_local std::vector<Task> tasks;
  tasks.clear();
  int64_t group = a.heads / a.kv_heads, step = std::max<int64_t>(1, TASK_ROWS / group), partial = 0;
  for (int64_t r = 0; r < a.requests; r++) {
    int64_t begin = a.query_start[r], end = a.query_start[r + 1], context = a.kv_len[r];
    for (int64_t row = begin; row < end; row += step)
      for (int64_t g = 0; g < a.kv_heads; g++) {
        int64_t count = std::min(step, end - row);
        int64_t first_limit = context - (end - row) + 1;
        int64_t keys = a.k_block ? context + (end - begin) : first_limit + count - 1;
        tasks.push_back({r, g, row, count, keys, first_limit, partial});
        partial += num_segments(tasks.back());
      }
  }
  return tasks;
}

// Whole tasks to threads; each walks its segments and merges as it goes.
template <class T>
void run_tasks(const Args& a, const std::vector<Task>& tasks, int64_t max_rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (size_t i = 0; i < tasks.size(); i++) {
    const Task& task = tasks[i];
    int64_t rows = task.num_rows * (a.heads / a.kv_heads);
    Scratch s(max_rows, a.dim);
    gather_queries<T>(a, task, s.q);
    attend_segment<T>(a, task, 0, s, s.out, s.max, s.sum);
    for (int64_t segment = 1; segment < num_segments(task); segment++) {
      attend_segment<T>(a, task, segment, s, s.segment_out, s.segment_max, s.segment_sum);
      merge(s.out, s.max, s.sum, s.segment_out, s.segment_max, s.segment_sum, rows, a.dim);
    }
    write_rows<T>(a, task, s.out, s.sum);
  }
}

// Fewer tasks than threads can share fairly: segments to threads, partial results merged afterwards.
template <class T>
void run_segments(const Args& a, const std::vector<Task>& tasks, int64_t max_rows, int threads) {
  int64_t total = tasks.back().partial + num_segments(tasks.back()), size = max_rows * (a.dim + 2);
  static thread_local std::vector<float> memory;
  static thread_local std::vector<int32_t> owner;
  if (int64_t(memory.size()) < total * size) memory.resize(total * size);
  owner.resize(total);
  for (size_t i = 0; i < tasks.size(); i++)
    std::fill_n(owner.begin() + tasks[i].partial, num_segments(tasks[i]), int32_t(i));
  float* partials = memory.data();
  const int32_t* owners = owner.data();
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < total; i++) {
      const Task& task = tasks[owners[i]];
      float* out = partials + i * size;
      Scratch s(max_rows, a.dim);
      gather_queries<T>(a, task, s.q);
      attend_segment<T>(a, task, i - task.partial, s, out, out + max_rows * a.dim, out + max_rows * (a.dim + 1));
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.size(); i++) {
      const Task& task = tasks[i];
      float* out = partials + task.partial * size;
      float *max = out + max_rows * a.dim, *sum = max + max_rows;
      for (int64_t n = 1; n < num_segments(task); n++) {
        const float* more = out + n * size;
        merge(out, max, sum, more, more + max_rows * a.dim, more + max_rows * (a.dim + 1),
              task.num_rows * (a.heads / a.kv_heads), a.dim);
      }
      write_rows<T>(a, task, out, sum);
    }
  }
}

template <class T>
void run(const Args& a, int threads) {
  const std::vector<Task>& tasks = make_tasks(a);
  if (tasks.empty()) return;
  int64_t group = a.heads / a.kv_heads, max_rows = 0, work = 0, segments = 0;
  for (const Task& task : tasks) {
    max_rows = std::max(max_rows, task.num_rows * group);
    work += task.num_rows * group * task.num_keys * a.dim;
    segments = std::max(segments, num_segments(task));
  }
  if (work < SERIAL_WORK) threads = 1;
  if (threads > 1 && segments > 1 && int64_t(tasks.size()) < 4 * threads)
    run_segments<T>(a, tasks, max_rows, threads);
  else
    run_tasks<T>(a, tasks, max_rows, threads);
}

}  // namespace attention
