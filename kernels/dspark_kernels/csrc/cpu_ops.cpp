// The CPU versions of the ops: norm, activation, RoPE with cache stores, paged attention, linear, whole layers. Plain pointers
// in, no torch headers, so that the file compiles in seconds. Every function takes `type` (0: fp32, 1: bf16) and `threads`,
// and computes each output row the same way whatever else is in the batch and however many threads run.

#include <cstdint>

#include "attention.h"
#include "choose.h"
#include "draft.h"
#include "matrix.h"
#include "noise.h"
#include "rowwise.h"
#include "sampling.h"
#include "stack.h"
#include "team.h"

namespace {

// Below this much work a parallel region costs more than it saves.
constexpr int64_t SERIAL_ELEMENTS = 16384;
constexpr int64_t SERIAL_WEIGHTS = 1 << 16;

int team(int threads, int64_t elements) { return elements < SERIAL_ELEMENTS ? 1 : threads; }

void multiply(const Matrix& matrix, const void* x, void* result, int64_t rows, int threads) {
  on_team(matrix.in * matrix.out < SERIAL_WEIGHTS ? 1 : threads,
          [&] { matrix.multiply((const bf16*)x, (bf16*)result, rows); });
}

}  // namespace

extern "C" {

void dspark_rms_norm(int type, void* out, void* total, const void* x, const void* residual, const void* weight,
                     int64_t rows, int64_t size, float eps, int threads) {
  on_team(team(threads, rows * size), [&] {
    if (type)
      rowwise::rms_norm((bf16*)out, (bf16*)total, (const bf16*)x, (const bf16*)residual, (const bf16*)weight, rows, size,
                        eps);
    else
      rowwise::rms_norm((float*)out, (float*)total, (const float*)x, (const float*)residual, (const float*)weight, rows,
                        size, eps);
  });
}

void dspark_silu_mul(int type, void* out, const void* gate_up, int64_t rows, int64_t size, int threads) {
  on_team(team(threads, rows * size * 2), [&] {
    if (type)
      rowwise::silu_mul((bf16*)out, (const bf16*)gate_up, rows, size);
    else
      rowwise::silu_mul((float*)out, (const float*)gate_up, rows, size);
  });
}

void dspark_rope(int type, const void* qkv, const void* cos, const void* sin, const void* q_norm, const void* k_norm,
                 void* q, void* k, void* v, const void* slots, int64_t rows, int64_t heads, int64_t kv_heads,
                 int64_t dim, int64_t k_stride, int64_t v_stride, float eps, int threads) {
  const int64_t width = (heads + 2 * kv_heads) * dim;
  rowwise::Rope a{qkv, width, (const float*)cos, (const float*)sin, nullptr, q_norm, k_norm, q, k, v, (const int64_t*)slots,
                  rows, heads, kv_heads, dim, k_stride, v_stride, eps};
  on_team(team(threads, rows * width), [&] {
    if (type)
      rowwise::rope<bf16>(a);
    else
      rowwise::rope<float>(a);
  });
}

void dspark_attention(int type, const void* q, const void* k_block, const void* v_block, const void* k_cache,
                      const void* v_cache, void* out, const void* query_start, const void* kv_len,
                      const void* block_tables, int64_t table_stride, int64_t requests, int64_t heads,
                      int64_t kv_heads, int64_t dim, int64_t block_size, int64_t k_stride, int64_t v_stride,
                      float scale, int64_t window, int threads) {
  attention::Args a{q, k_block, v_block, k_cache, v_cache, out,
                    (const int32_t*)query_start, (const int32_t*)kv_len, (const int32_t*)block_tables,
                    table_stride, requests, heads, kv_heads, dim, block_size, k_stride, v_stride, scale, window};
  if (type)
    attention::run<bf16>(a, threads);
  else
    attention::run<float>(a, threads);
}

void dspark_argmax(int type, void* out, const void* x, int64_t rows, int64_t size, int threads) {
  if (type)
    choose::argmax((int64_t*)out, (const bf16*)x, rows, size, threads);
  else
    choose::argmax((int64_t*)out, (const float*)x, rows, size, threads);
}

void dspark_markov_chain(int type, void* ids, void* previous, const void* base, const void* w1, const void* w2,
                         const void* anchors, const void* vocab_map, int64_t requests, int64_t slots, int64_t rank,
                         int64_t vocab, int threads) {
  const choose::Chain chain{base, w1, w2, (const int64_t*)anchors, (const int64_t*)vocab_map, (int64_t*)ids,
                            (int64_t*)previous, requests, slots, rank, vocab};
  choose::Bests bests(threads);
  on_team(threads, [&] {
    if (type)
      choose::run_chain<bf16>(chain, bests);
    else
      choose::run_chain<float>(chain, bests);
  });
}

void dspark_markov_logits(int type, void* out, const void* base, const void* w1, const void* w2, const void* previous,
                          int64_t requests, int64_t rank, int64_t vocab, int threads) {
  on_team(team(threads, requests * rank * vocab / 4), [&] {
    if (type)
      choose::markov_logits((float*)out, (const bf16*)base, (const bf16*)w1, (const bf16*)w2, (const int64_t*)previous,
                            requests, rank, vocab);
    else
      choose::markov_logits((float*)out, (const float*)base, (const float*)w1, (const float*)w2, (const int64_t*)previous,
                            requests, rank, vocab);
  });
}

void dspark_filtered_probs(int type, void* out, const void* logits, const void* temperature, const void* top_k,
                           const void* top_p, const void* min_p, int64_t rows, int64_t size, int threads) {
  const sampling::Filters filters{(const float*)temperature, (const int64_t*)top_k, (const float*)top_p,
                                  (const float*)min_p};
  on_team(team(threads, rows * size), [&] {
    if (type)
      sampling::filter_rows((float*)out, (const bf16*)logits, filters, rows, size);
    else
      sampling::filter_rows((float*)out, (const float*)logits, filters, rows, size);
  });
}

void dspark_accept(const sampling::Drafts* drafts, int threads) {
  on_team(team(threads, drafts->requests * drafts->vocab), [&] { sampling::accept(*drafts); });
}

void dspark_inverse_cdf(void* out, const void* weights, const void* uniforms, int64_t rows, int64_t size, int threads) {
  on_team(team(threads, rows * size),
          [&] { sampling::draw_rows((int64_t*)out, (const float*)weights, (const double*)uniforms, rows, size); });
}

void dspark_noisy_argmax(void* out, const void* probs, const void* keys, const void* ids, int64_t rows, int64_t size,
                         int threads) {
  noise::draw_rows((int64_t*)out, (const float*)probs, (const int64_t*)keys, (const int64_t*)ids, rows, size, threads);
}

// Whether dspark_linear, dspark_stack and dspark_draft do anything on this CPU.
int dspark_has_linear() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

void dspark_pack_linear(const void* weight, int64_t out, int64_t in, void* panels) {
  linear::pack((const bf16*)weight, out, in, (uint32_t*)panels);
}

void dspark_linear(const Matrix* matrix, const void* x, void* result, int64_t rows, int threads) {
  multiply(*matrix, x, result, rows, threads);
}

void dspark_stack(const stack::Args* args, int threads) { stack::run(*args, threads); }

void dspark_draft(const draft::Args* args, int threads) { draft::run(*args, threads); }

}  // extern "C"
