// Vectors of W floats in GCC/Clang vector extensions, so that one source serves x86 and ARM; loads and stores that
// convert from and to bf16; powers of two. Intrinsics only where the compiler would not find the instruction by itself.
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
typedef int8_t vb __attribute__((vector_size(W)));

struct bf16 {
  uint16_t bits;
};

static inline vf splat(float x) { return vf{} + x; }
static inline vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

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

static inline vf load(const int8_t* p) {
#if defined(__AVX512F__)  // GCC 12 converts bytes one by one
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  vb b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, vf);
#endif
}

// Round to nearest even; a NaN stays a NaN.
static inline vh to_bf16(vf v) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
  vu u = (vu)v;
  vu rounded = u + 0x7fff + ((u >> 16) & 1);
  rounded = (vu)select(v != v, (vf)(u | 0x400000), (vf)rounded);
  return __builtin_convertvector(rounded >> 16, vh);
#endif
}
static inline void store(bf16* p, vf v) {
  vh h = to_bf16(v);
  memcpy(p, &h, sizeof h);
}

// Two vectors, one after the other.
static inline void store(bf16* p, vf first, vf second) {
#if defined(__AVX512BF16__)
  __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  memcpy(p, &both, sizeof both);
#else
  store(p, first);
  store(p + W, second);
#endif
}

// The same for the last `count` < W elements of a row.
template <class T>
static inline vf load_some(const T* p, int64_t count) {
  if (count >= W) return load(p);
  T part[W] = {};
  memcpy(part, p, count * sizeof(T));
  return load(part);
}
template <class T>
static inline void store_some(T* p, vf v, int64_t count) {
  if (count >= W) return store(p, v);
  T part[W];
  store(part, v);
  memcpy(p, part, count * sizeof(T));
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

// The larger and the smaller of each pair; b where a is a NaN.
static inline vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}
static inline vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return select(a < b, a, b);
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

// 2^x = 2^n · 2^r, n = round(x), 2^r by a degree-6 polynomial on [-½, ½] (relative error < 3e-7). x is clamped to
// [-126, 127], so that 2^n stays a normal number.
static inline vf vexp2(vf x) {
  x = vmin(vmax(x, splat(-126.0f)), splat(127.0f));
  const vf magic = splat(12582912.0f);  // 1.5 · 2^23: adding it leaves round(x) in the low bits
  vf shifted = x + magic;
  vf r = x - (shifted - magic);
  vf p = splat(1.5403530e-4f);
  p = p * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return (vf)((vi)p + ((vi)shifted << 23));
}
constexpr float LOG2_E = 1.44269504f;
