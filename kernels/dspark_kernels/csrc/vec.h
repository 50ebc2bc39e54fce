// Vectors of W floats in GCC/Clang vector extensions, so that one source serves x86 and ARM; loads and stores that
// convert from and to bf16; exp. Intrinsics only where the compiler would not find the instruction by itself.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};

static inline vf splat(float x) { return vf{} + x; }

static inline vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

static inline vf load(const bf16* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}

// Round to nearest even; a NaN stays a NaN.
static inline vh to_bf16(vf v) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
  vu u = (vu)v;
  vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  vi is_nan = v != v;
  rounded = ((vu)is_nan & 0x7fc0) | (~(vu)is_nan & rounded);
  return __builtin_convertvector(rounded, vh);
#endif
}
static inline void store(bf16* p, vf v) {
  vh h = to_bf16(v);
  memcpy(p, &h, sizeof h);
}

// The value as it would come back from memory of type T.
template <class T>
static inline vf round_to(vf v);
template <>
inline vf round_to<float>(vf v) {
  return v;
}
template <>
inline vf round_to<bf16>(vf v) {
  return (vf)(__builtin_convertvector(to_bf16(v), vu) << 16);
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
static inline vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

static inline float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
#endif
}
static inline float max(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// exp(x) = 2^n · exp(r), n = round(x / ln 2), |r| ≤ ln 2 / 2, exp(r) by its degree-6 polynomial (relative error < 3e-7).
// x is clamped to [-87, 88], so that 2^n stays a normal number.
static inline vf vexp(vf x) {
  x = select(x < splat(-87.0f), splat(-87.0f), x);
  x = select(x > splat(88.0f), splat(88.0f), x);
  const vf magic = splat(12582912.0f);  // 1.5 · 2^23: adding it leaves round(x) in the low bits
  vf t = x * 1.44269504f + magic;
  vi n = (vi)t - (vi)magic;
  vf whole = t - magic;
  vf r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (vf)((vi)p + (n << 23));
}
