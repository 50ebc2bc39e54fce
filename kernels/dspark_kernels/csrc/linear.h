// x · weightᵀ in bf16 for CPUs with AVX-512 BF16 (linear_amx.h: with AMX). With a few rows the time is that of reading the
// weights once, so they are laid out in the order they are read.
//
// A panel is 32 outputs: [in / 2][32] pairs of consecutive inputs. Each output sums its inputs in the same order whatever
// the number of rows, so a row's result does not depend on the batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panels.h"
#include "vec.h"

namespace linear {

constexpr int ROWS = 12;       // rows in registers at once, two vectors each

// weight [out, in] → panels; outputs past the last are zeros. `in` is even.
static void pack(const bf16* weight, int64_t out, int64_t in, uint32_t* panels) {
  for (int64_t first = 0; first < out; first += PANEL)
    for (int64_t pair = 0; pair < in / 2; pair++)
      for (int64_t o = first; o < first + PANEL; o++, panels++) {
        *panels = 0;
        if (o < out) memcpy(panels, weight + o * in + 2 * pair, 4);
      }
}

#if defined(__AVX512BF16__)

// With many rows the multiplications delay the reads that the CPU would start by itself; with few rows it needs no help,
// and help slows it down (measured on Zen 4).
constexpr int FETCH_FROM_ROWS = 6;
constexpr int64_t FETCH_AHEAD = 8192;  // bytes

template <int R>
void multiply_rows(const uint32_t* panel, const bf16* x, const float* bias, int64_t in, bf16* out, int64_t out_stride,
                   int64_t count) {
  vf acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = load(bias), acc[r][1] = load(bias + W);
  for (int64_t pair = 0; pair < in / 2; pair++, panel += PANEL) {
    if constexpr (R >= FETCH_FROM_ROWS) {
      const char* later = reinterpret_cast<const char*>(panel) + FETCH_AHEAD;
      __builtin_prefetch(later, 0, 2);
      __builtin_prefetch(later + 64, 0, 2);
    }
    __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + W);
    for (int r = 0; r < R; r++) {
      int32_t bits;
      memcpy(&bits, x + r * in + 2 * pair, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(bits);
      acc[r][0] = (vf)_mm512_dpbf16_ps((__m512)acc[r][0], low, both);
      acc[r][1] = (vf)_mm512_dpbf16_ps((__m512)acc[r][1], high, both);
    }
  }
  for (int r = 0; r < R; r++) {
    store_some(out + r * out_stride, acc[r][0], count);
    if (count > W) store_some(out + r * out_stride + W, acc[r][1], count - W);
  }
}

using MultiplyFunction = void (*)(const uint32_t*, const bf16*, const float*, int64_t, bf16*, int64_t, int64_t);
constexpr MultiplyFunction MULTIPLY_ROWS[ROWS] = {
    multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,  multiply_rows<5>,  multiply_rows<6>,
    multiply_rows<7>, multiply_rows<8>, multiply_rows<9>, multiply_rows<10>, multiply_rows<11>, multiply_rows<12>};

// By a team: x [rows, in], panels of either kind, bias [out rounded up to PANEL] fp32 → result [rows, out].
template <class Panels>
void multiply(const bf16* x, const Panels& panels, const float* bias, bf16* result, int64_t rows, int64_t in,
              int64_t out) {
  const int64_t num_panels = (out + PANEL - 1) / PANEL, groups = (rows + ROWS - 1) / ROWS;
#pragma omp for schedule(static)
  for (int64_t p = 0; p < num_panels; p++) {
    const uint32_t* panel = panels.at(p);
    for (int64_t g = 0; g < groups; g++) {
      int64_t row = rows * g / groups, n = rows * (g + 1) / groups - row;
      MULTIPLY_ROWS[n - 1](panel, x + row * in, bias + p * PANEL, in, result + row * out + p * PANEL, out,
                           std::min(PANEL, out - p * PANEL));
    }
  }
}

#endif

}  // namespace linear
