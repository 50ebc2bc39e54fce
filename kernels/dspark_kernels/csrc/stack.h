// Decoder layers, one after the other, in one call: with a few rows a layer takes 0.2 ms, and nine calls from Python with
// as many wake-ups of the threads would add a third to it. One team works through all layers and meets at barriers.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "rowwise.h"
#include "team.h"
#include "vec.h"

namespace stack {

// Both mirrored in compiled.py.
struct Layer {
  Matrix qkv, o, gate_up, down;
  const void *q_norm, *k_norm;         // [dim] or null
  const void *post_norm, *next_norm;  // [hidden]; next_norm: the next layer's first norm, or the final one
};

struct Args {
  const Layer* layers;
  int64_t num_layers;
  const void* first_norm;  // [hidden] of the first layer
  void* residual;          // [N, hidden] the first layer's input; becomes the last one's output
  void* normed;            // [N, hidden] out: the final norm's output
  void* taps;               // [N, taps_width]
  const int64_t* tap_at;    // [num_layers] where a layer's output goes in a row of taps; below 0: nowhere
  int64_t taps_width;
  const float *cos, *sin;      // [N, dim / 2], or [any position, dim / 2] with `positions`
  const int64_t* positions;    // [N] or null
  void *k_cache, *v_cache;     // [layers, slots, kv_heads, dim]
  int64_t cache_layer_stride;  // elements
  const int64_t* slots;        // [N] where the rows' keys and values go; null: they are a block of their own (drafting)
  const int32_t *query_start, *kv_len, *block_tables;
  int64_t table_stride, block_size, requests;
  int64_t rows, hidden, heads, kv_heads, dim;
  float scale, eps;
};

// The rows' vectors between the ops of a layer.
struct Scratch {
  bf16 *qkv, *q, *k, *v, *attended, *branch, *gate_up, *activated;

  Scratch(const Args& a, attention::Buffer* buffer) {
    const int64_t q_width = a.heads * a.dim, kv_width = a.kv_heads * a.dim, inner = a.layers[0].down.in;
    const int64_t widths[] = {q_width + 2 * kv_width, q_width, kv_width, kv_width, q_width, a.hidden, 2 * inner, inner};
    bf16** const pointers[] = {&qkv, &q, &k, &v, &attended, &branch, &gate_up, &activated};
    int64_t words = 0;
    for (int64_t width : widths) words += padded(a.rows * width);
    float* memory = buffer->reserve(words);
    for (int i = 0; i < 8; i++) *pointers[i] = (bf16*)memory, memory += padded(a.rows * widths[i]);
  }

 private:
  static int64_t padded(int64_t values) { return (values + 31) / 32 * 16; }  // in words of two values, whole cache lines
};

static attention::Args attention_args(const Args& a, const Scratch& s) {
  return {s.q,
          a.slots ? nullptr : s.k,
          a.slots ? nullptr : s.v,
          a.k_cache,
          a.v_cache,
          s.attended,
          a.query_start,
          a.kv_len,
          a.block_tables,
          a.table_stride,
          a.requests,
          a.heads,
          a.kv_heads,
          a.dim,
          a.block_size,
          a.kv_heads * a.dim,
          a.kv_heads * a.dim,
          a.scale,
          0};
}

// By a team.
static void run_layer(const Args& a, int64_t index, const Scratch& s, attention::Args attend, attention::Plan& plan,
                      std::atomic<int64_t>& next_unit) {
  const Layer& layer = a.layers[index];
  bf16 *const residual = (bf16*)a.residual, *const normed = (bf16*)a.normed;
  bf16* const k_cache = (bf16*)a.k_cache + index * a.cache_layer_stride;
  bf16* const v_cache = (bf16*)a.v_cache + index * a.cache_layer_stride;
  attend.k_cache = k_cache, attend.v_cache = v_cache;
  const int64_t kv_width = a.kv_heads * a.dim;

  layer.qkv.multiply(normed, s.qkv, a.rows);
  rowwise::rope<bf16>({s.qkv, layer.qkv.out, a.cos, a.sin, a.positions, layer.q_norm, layer.k_norm, s.q,
                       a.slots ? k_cache : s.k, a.slots ? v_cache : s.v, a.slots, a.rows, a.heads, a.kv_heads, a.dim,
                       kv_width, kv_width, a.eps});
  attention::attend<bf16>(attend, plan, next_unit);
  layer.o.multiply(s.attended, s.branch, a.rows);
  rowwise::rms_norm(normed, residual, s.branch, residual, (const bf16*)layer.post_norm, a.rows, a.hidden, a.eps);
  layer.gate_up.multiply(normed, s.gate_up, a.rows);
  rowwise::silu_mul(s.activated, s.gate_up, a.rows, layer.down.in);
  layer.down.multiply(s.activated, s.branch, a.rows);
  rowwise::rms_norm(normed, residual, s.branch, residual, (const bf16*)layer.next_norm, a.rows, a.hidden, a.eps);
  if (a.tap_at[index] < 0) return;
#pragma omp for schedule(static) nowait  // the residual stays as it is until the next layer's first norm
  for (int64_t n = 0; n < a.rows; n++)
    memcpy((bf16*)a.taps + n * a.taps_width + a.tap_at[index], residual + n * a.hidden, a.hidden * sizeof(bf16));
}

// What is laid out before the team begins. One at a time in a thread: the memory is the thread's own, and kept.
struct Run {
  const Args& args;
  const Scratch scratch;
  const attention::Args attend;
  attention::Plan& plan;
  std::vector<std::atomic<int64_t>> next_units;

  Run(const Args& a, int threads)
      : args(a), scratch(a, kept_buffer()), attend(attention_args(a, scratch)), plan(kept_plan()), next_units(a.num_layers) {
    attention::make_plan(attend, threads, &plan);
  }

  // By a team.
  void all_layers() {
    const Args& a = args;
    rowwise::rms_norm<bf16>((bf16*)a.normed, nullptr, (const bf16*)a.residual, nullptr, (const bf16*)a.first_norm, a.rows,
                            a.hidden, a.eps);
    for (int64_t i = 0; i < a.num_layers; i++) run_layer(a, i, scratch, attend, plan, next_units[i]);
  }

 private:
  static attention::Buffer* kept_buffer() {
    static thread_local attention::Buffer buffer;
    return &buffer;
  }
  static attention::Plan& kept_plan() {
    static thread_local attention::Plan plan;
    return plan;
  }
};

static void run(const Args& a, int threads) {
  Run run(a, threads);
  on_team(threads, [&] { run.all_layers(); });
}

}  // namespace stack
