// A block drafter's pass in one call: the context that has come since the last one, the layers over [anchor, mask, mask, …], the
// LM head, the chain of greedy choices and their confidences. With one request each of these takes 0.1 to 0.6 ms, and a
// call from Python with a wake-up of the threads as much again.
#pragma once

#include <cstdint>
#include <cstring>

#include "choose.h"
#include "matrix.h"
#include "rowwise.h"
#include "stack.h"
#include "team.h"
#include "vec.h"

namespace draft {

// Both mirrored in compiled.py.
struct Network {
  Matrix fc, context_kv, head;
  const void* context_norm;  // [hidden]
  const void* embedding;     // [V, hidden]
  const void *w1, *w2;       // [V, rank], [rank, vocab]; null with rank 0
  const int64_t* vocab_map;  // [vocab] or null
  const float *confidence_hidden, *confidence_markov;  // [hidden], [rank]; null: no such head, no such part
  float confidence_bias;
  int64_t rank, mask_token;
};

struct Args {
  const Network* network;
  // Rows whose keys and values are stored first.
  const void* taps;  // [context_rows, fc.in]
  const int64_t *context_positions, *context_slots;
  int64_t context_rows;
  // The blocks: `stack.requests` of `block` slots each, of which the last `wanted` predict. Of `stack`, the layers and what
  // they attend to are given; residual, normed, positions, query_start and rows are filled in here.
  stack::Args stack;
  int64_t block, wanted;
  const int64_t *anchors, *anchor_positions;  // [requests]
  void *hidden, *base;      // out: [requests, wanted, hidden], [requests, wanted, vocab]
  int64_t *ids, *previous;  // out: [requests, wanted]; null: no greedy chain is wanted
  float* confidence;        // out: [requests, wanted] logits, with the chain
};

// The vectors of all rows, in memory of the calling thread's own.
struct Scratch {
  bf16 *projected, *context, *kv, *residual, *normed;
  int64_t* positions;
  int32_t* query_start;

  explicit Scratch(const Args& a) {
    static thread_local attention::Buffer buffer;
    const int64_t rows = a.stack.requests * a.block, hidden = a.stack.hidden;
    const int64_t sizes[] = {2 * a.context_rows * hidden, 2 * a.context_rows * hidden, 2 * a.context_rows * a.network->context_kv.out,
                             2 * rows * hidden, 2 * rows * hidden, 8 * rows, 4 * (a.stack.requests + 1)};  // bytes
    int64_t words = 0;
    for (int64_t size : sizes) words += padded(size);
    float* memory = buffer.reserve(words);
    void* starts[7];
    for (int i = 0; i < 7; i++) starts[i] = memory, memory += padded(sizes[i]);
    projected = (bf16*)starts[0], context = (bf16*)starts[1], kv = (bf16*)starts[2];
    residual = (bf16*)starts[3], normed = (bf16*)starts[4];
    positions = (int64_t*)starts[5], query_start = (int32_t*)starts[6];
  }

 private:
  static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 16; }  // in words, whole cache lines
};

// By a team, as are those below: K and V of RMSNorm(fc · taps) for every layer, written to the rows' slots.
static void store_context(const Args& a, const Scratch& s) {
  const stack::Args& of = a.stack;
  const Network& net = *a.network;
  const int64_t width = of.kv_heads * of.dim;
  net.fc.multiply((const bf16*)a.taps, s.projected, a.context_rows);
  rowwise::rms_norm<bf16>(s.context, nullptr, s.projected, nullptr, (const bf16*)net.context_norm, a.context_rows, of.hidden,
                          of.eps);
  net.context_kv.multiply(s.context, s.kv, a.context_rows);
  for (int64_t i = 0; i < of.num_layers; i++)
    rowwise::rope<bf16>({s.kv + i * 2 * width, net.context_kv.out, of.cos, of.sin, a.context_positions, nullptr,
                         of.layers[i].k_norm, nullptr, (bf16*)of.k_cache + i * of.cache_layer_stride,
                         (bf16*)of.v_cache + i * of.cache_layer_stride, a.context_slots, a.context_rows, 0, of.kv_heads,
                         of.dim, width, width, of.eps});
}

static void lay_out_blocks(const Args& a, const Scratch& s) {
  const int64_t hidden = a.stack.hidden;
#pragma omp for schedule(static)
  for (int64_t n = 0; n < a.stack.requests * a.block; n++) {
    const int64_t request = n / a.block, slot = n % a.block;
    const int64_t token = slot ? a.network->mask_token : a.anchors[request];
    s.positions[n] = a.anchor_positions[request] + slot;
    memcpy(s.residual + n * hidden, (const bf16*)a.network->embedding + token * hidden, hidden * sizeof(bf16));
  }
}

static void keep_predicting_slots(const Args& a, const Scratch& s) {
  const int64_t hidden = a.stack.hidden;
#pragma omp for schedule(static)
  for (int64_t r = 0; r < a.stack.requests; r++)
    memcpy((bf16*)a.hidden + r * a.wanted * hidden, s.normed + ((r + 1) * a.block - a.wanted) * hidden,
           a.wanted * hidden * sizeof(bf16));
}

// w · [h_k; W1[x_{k−1}]] + b in fp32.
static void judge(const Args& a) {
  const Network& net = *a.network;
  const int64_t hidden = a.stack.hidden;
#pragma omp for schedule(static)
  for (int64_t at = 0; at < a.stack.requests * a.wanted; at++) {
    auto dot = [](const bf16* x, const float* w, int64_t size) {
      vf total = splat(0);
      for (int64_t i = 0; i < size; i += W) total += load_some(x + i, size - i) * load_some(w + i, size - i);
      return sum(total);
    };
    float logit = net.confidence_bias + dot((const bf16*)a.hidden + at * hidden, net.confidence_hidden, hidden);
    if (net.confidence_markov) logit += dot((const bf16*)net.w1 + a.previous[at] * net.rank, net.confidence_markov, net.rank);
    a.confidence[at] = logit;
  }
}

static void run(Args a, int threads) {
  const Network& net = *a.network;
  const Scratch scratch(a);
  stack::Args& blocks = a.stack;
  blocks.rows = blocks.requests * a.block;
  blocks.residual = scratch.residual, blocks.normed = scratch.normed;
  blocks.positions = scratch.positions, blocks.query_start = scratch.query_start;
  for (int64_t r = 0; r <= blocks.requests; r++) scratch.query_start[r] = int32_t(r * a.block);
  stack::Run layers(blocks, threads);
  const choose::Chain chain{a.base, net.w1, net.w2, a.anchors, net.vocab_map, a.ids, a.previous,
                            blocks.requests, a.wanted, net.rank, net.head.out};
  choose::Bests bests(threads);
  on_team(threads, [&] {
    if (a.context_rows) store_context(a, scratch);
    if (!blocks.requests) return;
    lay_out_blocks(a, scratch);
    layers.all_layers();
    keep_predicting_slots(a, scratch);
    net.head.multiply((const bf16*)a.hidden, (bf16*)a.base, blocks.requests * a.wanted);
    if (!a.ids) return;
    choose::run_chain<bf16>(chain, bests);
    if (net.confidence_hidden) judge(a);
  });
}

}  // namespace draft
