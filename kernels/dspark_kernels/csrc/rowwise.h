// Ops on rows by themselves, by a team: norm, activation, RoPE with cache stores.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "team.h"
#include "vec.h"

namespace rowwise {

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
              float eps) {
#pragma omp for schedule(static)
  for (int64_t n = 0; n < rows; n++) {
    int64_t at = n * size;
    norm_row(out + at, residual ? total + at : nullptr, x + at, residual ? residual + at : nullptr, weight, size, eps);
  }
}

template <class T>
void silu_mul(T* out, const T* gate_up, int64_t rows, int64_t size) {
#pragma omp for schedule(static)
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
  const void* qkv;  // [N, (heads + 2·kv_heads)·dim], heads is 0 for a K/V projection; rows `stride` apart
  int64_t stride;
  const float *cos, *sin;    // [N, dim / 2], or [any position, dim / 2] with `positions`
  const int64_t* positions;  // [N] or null
  const void *q_norm, *k_norm;  // [dim] or null
  void* q;
  void *k, *v;           // cache rows, or row n when slots is null
  const int64_t* slots;  // [N] or null
  int64_t rows, heads, kv_heads, dim, k_stride, v_stride;
  float eps;
};

template <class T>
void rope(const Rope& a) {
  const int64_t kv_width = a.kv_heads * a.dim;
#pragma omp for schedule(static)
  for (int64_t n = 0; n < a.rows; n++) {
    const T* x = static_cast<const T*>(a.qkv) + n * a.stride;
    const int64_t angles = (a.positions ? a.positions[n] : n) * a.dim / 2;
    const float *cos = a.cos + angles, *sin = a.sin + angles;
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

}  // namespace rowwise
