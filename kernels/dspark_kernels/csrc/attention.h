// Paged attention for the CPU. A task is some rows of one request; it walks the request's keys once, TILE at a time, all
// heads of a tile before the next, with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022). While one tile is
// computed the next one is fetched: cache blocks lie anywhere in memory, and waiting for them is most of the time.
//
// Keys are cut into segments of SEGMENT at fixed places. A segment's (max, sum, output) never depends on other segments,
// and they are merged in order, so a row's result is the same bits whoever computes its segments: threads may share one
// long request, and the batch around a row does not change it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "attention_tile.h"
#include "team.h"

namespace attention {

constexpr int SEGMENT = 2 * TILE;         // keys between merges
constexpr int TASK_ROWS = 48;             // rows of a task times the query heads of one key/value head, roughly
constexpr int MAX_DIM = 1024;             // largest head size
constexpr int64_t SERIAL_WORK = 1 << 16;  // multiply-adds below which a parallel region costs more than it saves

struct Args {
  const void *q, *k_block, *v_block;  // k_block null: causal over the cache alone
  const void *k_cache, *v_cache;
  void* out;
  const int32_t *query_start, *kv_len, *block_tables;
  int64_t table_stride, requests, heads, kv_heads, dim, block_size, k_stride, v_stride;
  float scale;
  int64_t window;  // keys that a row sees, itself included; 0: all before it. For the cache alone
};

struct Task {
  int64_t request, first_row, num_rows;  // rows of the flat batch
  int64_t num_keys;                      // keys that any of its rows sees
  int64_t first_limit;                   // keys that its first row sees; causal: one more for each next row
  int64_t first_unit;                    // where its units are in the list of units
  int64_t first_segment;                 // the first of which any of its rows sees a key
};

// What one thread does in one go: a whole task, or one segment of one.
struct Unit {
  int64_t task, first_segment, end_segment;
};

// Unnormalised output, running max and sum of a task's (head, row) pairs, key/value head by key/value head.
struct Partial {
  float *out, *max, *sum;  // [rows, dim], [rows], [rows]

  static int64_t words(int64_t rows, int64_t dim) { return (rows * (dim + 2) + 15) / 16 * 16; }
  Partial(float* memory, int64_t rows, int64_t dim) : out(memory), max(out + rows * dim), sum(max + rows) {}
  Partial(const Partial& all, int64_t first_row, int64_t dim)
      : out(all.out + first_row * dim), max(all.max + first_row), sum(all.sum + first_row) {}
};

// Memory that is kept from call to call, aligned to a cache line; grown, never shrunk.
struct Buffer {
  std::vector<float> memory;

  float* reserve(int64_t words) {
    if (int64_t(memory.size()) < words + 16) memory.resize(words + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
  }
};

// The rows of keys first_key .. first_key + count of a task: the cache through the block table, then its own block.
template <class T>
void locate(const Args& a, const Task& task, int64_t first_key, TileRows<T>* rows) {
  int64_t context = a.kv_len[task.request], key = first_key;
  rows->count = int(std::min<int64_t>(TILE, task.num_keys - first_key));
  int64_t cached = std::min<int64_t>(rows->count, std::max<int64_t>(context - first_key, 0));
  const int32_t* table = a.block_tables + task.request * a.table_stride;
  int i = 0;
  while (i < cached) {
    int64_t offset = key % a.block_size, row = table[key / a.block_size] * a.block_size + offset;
    int64_t run = std::min<int64_t>(a.block_size - offset, cached - i);
    for (int64_t j = 0; j < run; j++, i++, key++, row++) {
      rows->keys[i] = static_cast<const T*>(a.k_cache) + row * a.k_stride;
      rows->values[i] = static_cast<const T*>(a.v_cache) + row * a.v_stride;
    }
  }
  for (; i < rows->count; i++, key++) {
    int64_t at = (a.query_start[task.request] + key - context) * a.kv_heads * a.dim;
    rows->keys[i] = static_cast<const T*>(a.k_block) + at;
    rows->values[i] = static_cast<const T*>(a.v_block) + at;
  }
}

// One thread's view of the work: its scratch, the tile at hand and the one to come.
template <class T>
class Worker {
 public:
  Worker(const Args& args, const std::vector<Task>& tasks, int64_t max_rows)
      : a(args), tasks(tasks), group(a.heads / a.kv_heads) {
    static thread_local Buffer buffer;
    int64_t partial = Partial::words(max_rows, a.dim);
    k = buffer.reserve(2 * TILE * a.dim + max_rows * a.dim + 2 * partial);
    v = k + TILE * a.dim;
    q = v + TILE * a.dim;
    first = q + max_rows * a.dim;
    second = first + partial;
  }

  // All segments of a task, to the output. `next` is what this thread will do afterwards, or null.
  void do_task(const Unit& unit, const Unit* next) {
    const Task& task = tasks[unit.task];
    int64_t rows = task.num_rows * a.heads;
    Partial total(first, rows, a.dim), more(second, rows, a.dim);
    gather_queries(task);
    for (int64_t segment = unit.first_segment; segment < unit.end_segment; segment++) {
      bool last = segment + 1 == unit.end_segment;
      attend_segment(task, segment, segment == unit.first_segment ? total : more, last, next);
      if (segment > unit.first_segment) merge(total, more, rows);
    }
    write_rows(task, total);
  }

  // One segment of a task, kept for `finish_task`.
  void do_segment(const Unit& unit, float* memory) {
    const Task& task = tasks[unit.task];
    gather_queries(task);
    attend_segment(task, unit.first_segment, Partial(memory, task.num_rows * a.heads, a.dim), true, nullptr);
  }

  void finish_task(const Task& task, int64_t segments, float* memory, int64_t words) {
    int64_t rows = task.num_rows * a.heads;
    Partial total(memory, rows, a.dim);
    for (int64_t segment = 1; segment < segments; segment++)
      merge(total, Partial(memory + segment * words, rows, a.dim), rows);
    write_rows(task, total);
  }

 private:
  const Args& a;
  const std::vector<Task>& tasks;
  const int64_t group;  // query heads per key/value head
  float *k, *v, *q, *first, *second;
  TileRows<T> tile, ahead;
  Fetcher fetcher;
  bool tile_is_ahead = false;  // `ahead` is the next tile this thread needs

  // The task's queries [kv_heads, rows · group, dim] in the form score_rows reads.
  void gather_queries(const Task& task) {
    float* to = q;
    for (int64_t g = 0; g < a.kv_heads; g++)
      for (int64_t row = 0; row < task.num_rows; row++) {
        const T* from = static_cast<const T*>(a.q) + ((task.first_row + row) * a.heads + g * group) * a.dim;
        if constexpr (PAIRS<T>)
          memcpy(to, from, group * a.dim * sizeof(T));
        else
          for (int64_t d = 0; d < group * a.dim; d += W) store(to + d, load(from + d));
        to += group * a.dim / (PAIRS<T> ? 2 : 1);
      }
  }

  void attend_segment(const Task& task, int64_t segment, const Partial& result, bool last, const Unit* next) {
    int64_t rows = task.num_rows * a.heads;
    std::fill(result.out, result.out + rows * a.dim, 0.0f);
    std::fill(result.max, result.max + rows, MASKED);
    std::fill(result.sum, result.sum + rows, 0.0f);
    int64_t end = std::min<int64_t>((segment + 1) * SEGMENT, task.num_keys);
    for (int64_t first_key = segment * SEGMENT; first_key < end; first_key += TILE) {
      if (tile_is_ahead)
        std::swap(tile, ahead);
      else
        locate(a, task, first_key, &tile);
      look_ahead(task, first_key + TILE, last && first_key + TILE >= end, next);
      for (int64_t g = 0; g < a.kv_heads; g++) {
        attend_tile(task, first_key, g, Partial(result, g * task.num_rows * group, a.dim));
      }
    }
  }

  // Find the tile after this one and start fetching it.
  void look_ahead(const Task& task, int64_t next_key, bool unit_ends, const Unit* next) {
    tile_is_ahead = true;
    if (!unit_ends)
      locate(a, task, next_key, &ahead);
    else if (next)
      locate(a, tasks[next->task], next->first_segment * SEGMENT, &ahead);
    else
      tile_is_ahead = false;
    int64_t row_groups = (task.num_rows * group + ROWS - 1) / ROWS;
    fetcher = tile_is_ahead ? Fetcher(ahead, a.kv_heads * a.dim * int64_t(sizeof(T)), a.kv_heads * row_groups * TILE)
                            : Fetcher();
  }

  // One tile of one key/value head against all rows of the task.
  void attend_tile(const Task& task, int64_t first_key, int64_t g, const Partial& result) {
    alignas(64) static const T zeros[MAX_DIM] = {};
    const T *keys[TILE], *values[TILE];
    for (int i = 0; i < TILE; i++) {
      keys[i] = i < tile.count ? tile.keys[i] + g * a.dim : zeros;
      values[i] = i < tile.count ? tile.values[i] + g * a.dim : zeros;
    }
    pack_keys(k, keys, a.dim, tile.count);
    pack_values(v, values, a.dim, tile.count);
    int64_t rows = task.num_rows * group;
    const int64_t q_words = a.dim / (PAIRS<T> ? 2 : 1);
    const float* queries = q + g * rows * q_words;
    for (int64_t row = 0; row < rows; row += ROWS) {
      int n = int(std::min<int64_t>(ROWS, rows - row)), limits[ROWS], starts[ROWS];
      for (int r = 0; r < n; r++) {
        int64_t seen = a.k_block ? task.num_keys : task.first_limit + (row + r) / group;
        limits[r] = int(std::clamp<int64_t>(seen - first_key, 0, tile.count));
        starts[r] = a.window ? int(std::clamp<int64_t>(seen - a.window - first_key, 0, TILE)) : 0;
      }
      if (limits[n - 1] == 0 || starts[0] >= tile.count) continue;  // both grow with the row
      ATTEND_ROWS<T>[n - 1](queries + row * q_words, k, v, result.out + row * a.dim, result.max + row,
                            result.sum + row, limits, a.window ? starts : nullptr, a.dim, tile.count, a.scale * LOG2_E, &fetcher);
    }
  }

  // Fold a segment's result into the running one.
  void merge(const Partial& total, const Partial& more, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
      if (more.sum[r] == 0.0f) continue;  // a row that sees none of the segment
      float top = std::max(total.max[r], more.max[r]);
      float keep = total.max[r] == top ? 1.0f : vexp2(splat(total.max[r] - top))[0];
      float take = more.max[r] == top ? 1.0f : vexp2(splat(more.max[r] - top))[0];
      for (int64_t d = r * a.dim; d < (r + 1) * a.dim; d += W)
        store(total.out + d, load(total.out + d) * keep + load(more.out + d) * take);
      total.sum[r] = total.sum[r] * keep + more.sum[r] * take;
      total.max[r] = top;
    }
  }

  void write_rows(const Task& task, const Partial& total) {
    const float *from = total.out, *sum = total.sum;
    for (int64_t g = 0; g < a.kv_heads; g++)
      for (int64_t row = 0; row < task.num_rows; row++) {
        T* to = static_cast<T*>(a.out) + ((task.first_row + row) * a.heads + g * group) * a.dim;
        for (int64_t h = 0; h < group; h++, from += a.dim, to += a.dim) {
          float inverse = 1.0f / *sum++;
          for (int64_t d = 0; d < a.dim; d += W) store(to + d, load(from + d) * inverse);
        }
      }
  }
};

static int64_t end_segment(const Task& task) { return (task.num_keys + SEGMENT - 1) / SEGMENT; }
static int64_t num_segments(const Task& task) { return end_segment(task) - task.first_segment; }

static void make_tasks(const Args& a, std::vector<Task>* tasks) {
  tasks->clear();
  int64_t step = std::max<int64_t>(1, TASK_ROWS / (a.heads / a.kv_heads));
  for (int64_t r = 0; r < a.requests; r++) {
    int64_t begin = a.query_start[r], end = a.query_start[r + 1], context = a.kv_len[r];
    for (int64_t row = begin; row < end; row += step) {
      int64_t count = std::min(step, end - row), first_limit = context - (end - row) + 1;
      int64_t keys = a.k_block ? context + (end - begin) : first_limit + count - 1;
      int64_t first_key = a.window ? std::max<int64_t>(first_limit - a.window, 0) : 0;
      tasks->push_back({r, row, count, keys, first_limit, 0, first_key / SEGMENT});
    }
  }
}

// What all layers of a step share: who attends to what, cut into units for the threads. `split`: long requests go to the
// threads a segment at a time, and their results wait in `partials`.
struct Plan {
  std::vector<Task> tasks;
  std::vector<Unit> units;
  int64_t max_rows = 0, words = 0, work = 0;  // work: multiply-adds
  bool split = false;
  Buffer partials;
};

static void make_units(Plan* plan) {
  plan->units.clear();
  for (size_t i = 0; i < plan->tasks.size(); i++) {
    Task& task = plan->tasks[i];
    task.first_unit = int64_t(plan->units.size());
    int64_t end = end_segment(task), step = plan->split ? 1 : num_segments(task);
    for (int64_t s = task.first_segment; s < end; s += step) plan->units.push_back({int64_t(i), s, s + step});
  }
}

static void make_plan(const Args& a, int threads, Plan* plan) {
  make_tasks(a, &plan->tasks);
  plan->max_rows = plan->work = 0;
  for (const Task& task : plan->tasks) {
    plan->max_rows = std::max(plan->max_rows, task.num_rows * a.heads);
    plan->work += task.num_rows * a.heads * task.num_keys * a.dim;
  }
  plan->split = threads > 1 && int64_t(plan->tasks.size()) < 4 * threads;
  plan->words = Partial::words(plan->max_rows, a.dim);
  make_units(plan);
  if (plan->split) plan->partials.reserve(plan->words * int64_t(plan->units.size()));
}

// By a team. `next_unit` is shared, 0 at the start and of no use afterwards.
template <class T>
void attend(const Args& a, Plan& plan, std::atomic<int64_t>& next_unit) {
  const int64_t num_tasks = int64_t(plan.tasks.size()), num_units = int64_t(plan.units.size());
  Worker<T> worker(a, plan.tasks, plan.max_rows);
  if (plan.split) {
    float* kept = plan.partials.reserve(0);
    for (int64_t i; (i = next_unit++) < num_units;) worker.do_segment(plan.units[i], kept + i * plan.words);
#pragma omp barrier
#pragma omp for schedule(static, 1)
    for (int64_t i = 0; i < num_tasks; i++) {
      const Task& task = plan.tasks[i];
      worker.finish_task(task, num_segments(task), kept + task.first_unit * plan.words, plan.words);
    }
  } else {
    for (int64_t i = next_unit++, then; i < num_units; i = then) {
      then = next_unit++;  // claimed early, so that its first tile can be fetched meanwhile
      worker.do_task(plan.units[i], then < num_units ? &plan.units[then] : nullptr);
    }
#pragma omp barrier
  }
}

template <class T>
void run(const Args& a, int threads) {
  static thread_local Plan kept_plan;
  Plan& plan = kept_plan;  // inside the region the name of a thread_local variable means each thread's own
  make_plan(a, threads, &plan);
  if (plan.work < SERIAL_WORK) {
    threads = 1;
    make_plan(a, threads, &plan);
  }
  std::atomic<int64_t> next_unit{0};
  on_team(threads, [&] { attend<T>(a, plan, next_unit); });
}

}  // namespace attention
