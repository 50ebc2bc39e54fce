// The CPU versions of the ops: norm, activation, RoPE with cache stores, paged attention, linear. Plain pointers in, no torch
// headers, so that the file compiles in seconds. Every function takes `type` (0: fp32, 1: bf16) and `threads`, and
// computes each output row the same way whatever else is in the batch and however many threads run.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <omp.h>

#include "vec.h"

#include "attention.h"
#include "choose.h"
#include "linear.h"
#include "linear_amx.h"
#include "noise.h"

namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kSerialElements = 16384;

int team(int threads, int64_t elements) { return elements < kSerialElements ? 1 : threads; }

// out = x / rms(x) · weight; the normalised value is rounded to T before it is scaled, as Hugging Face's Llama does. With a
// residual, x + residual, rounded to T, goes to `total` and takes the place of x.
template <class T>
void norm_row(T* out, T* total, const T* x, const T* residual, const T* weight, int64_t size, float eps) {
  vf squares = splat(0);
  for (int64_t i = 0; i < size; i += W) {
    vf v = load_some(x + i, size - i);
    if (residual) {
      v = round_to<T>(v + load_some(residual + i, size - i));
      store_some(total + i, v, size - i);
    }
    squares += v * v;
  }
  if (residual) x = total;
  float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
  for (int64_t i = 0; i < size; i += W) {
    vf v = round_to<T>(load_some(x + i, size - i) * scale);
    store_some(out + i, v * load_some(weight + i, size - i), size - i);
  }
}

template <class T>
void rms_norm(T* out, T* total, const T* x, const T* residual, const T* weight, int64_t rows, int64_t size,
              float eps, int threads) {
#pragma omp parallel for num_threads(team(threads, rows * size))
  for (int64_t n = 0; n < rows; n++) {
    int64_t at = n * size;
    norm_row(out + at, residual ? total + at : nullptr, x + at, residual ? residual + at : nullptr, weight, size, eps);
  }
}

template <class T>
void silu_mul(T* out, const T* gate_up, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(team(threads, rows * size * 2))
  for (int64_t n = 0; n < rows; n++) {
    const T *gates = gate_up + n * 2 * size, *ups = gates + size;
    for (int64_t i = 0; i < size; i += W) {
      vf gate = load_some(gates + i, size - i), up = load_some(ups + i, size - i);
      store_some(out + n * size + i, gate / (1.0f + vexp2(gate * -LOG2_E)) * up, size - i);
    }
  }
}

// One head: optional norm, then (a·cos - b·sin, b·cos + a·sin) of its halves. dim is a multiple of 2·W.
template <class T>
void rope_head(T* out, const T* x, const float* cos, const float* sin, const T* norm, float eps, int64_t dim) {
  if (norm) {
    norm_row<T>(out, nullptr, x, nullptr, norm, dim, eps);
    x = out;
  }
  int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += W) {
    vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
}

struct Rope {
  const void* qkv;  // [N, (heads + 2·kv_heads)·dim], heads is 0 for a K/V projection
  const float *cos, *sin;
  const void *q_norm, *k_norm;  // [dim] or null
  void* q;
  void *k, *v;           // cache rows, or row n when slots is null
  const int64_t* slots;  // [N] or null
  int64_t rows, heads, kv_heads, dim, k_stride, v_stride;
  float eps;
};

template <class T>
void rope(const Rope& a, int threads) {
  int64_t kv_width = a.kv_heads * a.dim, width = a.heads * a.dim + 2 * kv_width;
#pragma omp parallel for num_threads(team(threads, a.rows* width))
  for (int64_t n = 0; n < a.rows; n++) {
    const T* x = static_cast<const T*>(a.qkv) + n * width;
    const float *cos = a.cos + n * a.dim / 2, *sin = a.sin + n * a.dim / 2;
    T* q = static_cast<T*>(a.q) + n * a.heads * a.dim;
    for (int64_t h = 0; h < a.heads; h++, x += a.dim)
      rope_head(q + h * a.dim, x, cos, sin, static_cast<const T*>(a.q_norm), a.eps, a.dim);
    int64_t slot = a.slots ? a.slots[n] : n;
    if (slot < 0) continue;
    T* k = static_cast<T*>(a.k) + slot * a.k_stride;
    for (int64_t h = 0; h < a.kv_heads; h++, x += a.dim)
      rope_head(k + h * a.dim, x, cos, sin, static_cast<const T*>(a.k_norm), a.eps, a.dim);
    memcpy(static_cast<T*>(a.v) + slot * a.v_stride, x, kv_width * sizeof(T));
  }
}

// The best linear of this CPU; nothing where has_linear says so.
template <class Panels>
void multiply(const void* x, const Panels& panels, const void* bias, void* result, int64_t rows, int64_t in,
              int64_t out, int threads) {
#if defined(DSPARK_AMX)
  if (in % amx::TILE_INPUTS == 0 && amx::allowed())
    return amx::multiply((const bf16*)x, panels, (const float*)bias, (bf16*)result, rows, in, out, threads);
#endif
#if defined(__AVX512BF16__)
  linear::multiply((const bf16*)x, panels, (const float*)bias, (bf16*)result, rows, in, out, threads);
#else
  (void)x, (void)panels, (void)bias, (void)result, (void)rows, (void)in, (void)out, (void)threads;
#endif
}

}  // namespace

extern "C" {

void dspark_rms_norm(int type, void* out, void* total, const void* x, const void* residual, const void* weight,
                     int64_t rows, int64_t size, float eps, int threads) {
  if (type)
    rms_norm((bf16*)out, (bf16*)total, (const bf16*)x, (const bf16*)residual, (const bf16*)weight, rows, size, eps,
             threads);
  else
    rms_norm((float*)out, (float*)total, (const float*)x, (const float*)residual, (const float*)weight, rows, size,
             eps, threads);
}

void dspark_silu_mul(int type, void* out, const void* gate_up, int64_t rows, int64_t size, int threads) {
  if (type)
    silu_mul((bf16*)out, (const bf16*)gate_up, rows, size, threads);
  else
    silu_mul((float*)out, (const float*)gate_up, rows, size, threads);
}

void dspark_rope(int type, const void* qkv, const void* cos, const void* sin, const void* q_norm, const void* k_norm,
                 void* q, void* k, void* v, const void* slots, int64_t rows, int64_t heads, int64_t kv_heads,
                 int64_t dim, int64_t k_stride, int64_t v_stride, float eps, int threads) {
  Rope a{qkv, (const float*)cos, (const float*)sin, q_norm, k_norm, q, k, v, (const int64_t*)slots,
         rows, heads, kv_heads, dim, k_stride, v_stride, eps};
  if (type)
    rope<bf16>(a, threads);
  else
    rope<float>(a, threads);
}

void dspark_attention(int type, const void* q, const void* k_block, const void* v_block, const void* k_cache,
                      const void* v_cache, void* out, const void* query_start, const void* kv_len,
                      const void* block_tables, int64_t table_stride, int64_t requests, int64_t heads,
                      int64_t kv_heads, int64_t dim, int64_t block_size, int64_t k_stride, int64_t v_stride,
                      float scale, int threads) {
  attention::Args a{q, k_block, v_block, k_cache, v_cache, out,
                    (const int32_t*)query_start, (const int32_t*)kv_len, (const int32_t*)block_tables,
                    table_stride, requests, heads, kv_heads, dim, block_size, k_stride, v_stride, scale};
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
  if (type)
    choose::markov_chain((int64_t*)ids, (int64_t*)previous, (const bf16*)base, (const bf16*)w1, (const bf16*)w2,
                         (const int64_t*)anchors, (const int64_t*)vocab_map, requests, slots, rank, vocab, threads);
  else
    choose::markov_chain((int64_t*)ids, (int64_t*)previous, (const float*)base, (const float*)w1, (const float*)w2,
                         (const int64_t*)anchors, (const int64_t*)vocab_map, requests, slots, rank, vocab, threads);
}

void dspark_noisy_argmax(void* out, const void* probs, const void* keys, const void* ids, int64_t rows, int64_t size,
                         int threads) {
  noise::draw_rows((int64_t*)out, (const float*)probs, (const int64_t*)keys, (const int64_t*)ids, rows, size, threads);
}

// Whether dspark_linear and dspark_linear_int8 do anything on this CPU.
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

void dspark_linear(const void* x, const void* panels, const void* bias, void* result, int64_t rows, int64_t in,
                   int64_t out, int threads) {
  multiply(x, linear::Bf16Panels{(const uint32_t*)panels, in}, bias, result, rows, in, out, threads);
}

void dspark_linear_int8(const void* x, const void* panels, const void* scales, const void* bias, void* result,
                        int64_t rows, int64_t in, int64_t out, int threads) {
  multiply(x, linear::Int8Panels{(const int8_t*)panels, (const float*)scales, in}, bias, result, rows, in, out,
           threads);
}

}  // extern "C"
