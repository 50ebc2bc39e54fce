// A weight in panels, and the multiplication of this CPU for it.
#pragma once

#include <cstdint>

#include "linear.h"
#include "linear_amx.h"
#include "panels.h"
#include "vec.h"

// Mirrored in compiled.py.
struct Matrix {
  const void* panels;   // bf16 or int8, see panels.h
  const float* scales;  // of int8 panels; null: they are bf16
  const float* bias;    // [out rounded up to PANEL]
  int64_t in, out;

  // By a team: x [rows, in] → result [rows, out].
  void multiply(const bf16* x, bf16* result, int64_t rows) const {
    if (scales)
      multiply(linear::Int8Panels{(const int8_t*)panels, scales, in}, x, result, rows);
    else
      multiply(linear::Bf16Panels{(const uint32_t*)panels, in}, x, result, rows);
  }

 private:
  template <class Panels>
  void multiply(const Panels& from, const bf16* x, bf16* result, int64_t rows) const {
#if defined(DSPARK_AMX)
    if (in % amx::TILE_INPUTS == 0 && amx::allowed()) return amx::multiply(x, from, bias, result, rows, in, out);
#endif
#if defined(__AVX512BF16__)
    linear::multiply(x, from, bias, result, rows, in, out);
#else
    (void)from, (void)x, (void)result, (void)rows;  // never reached, see dspark_has_linear
#endif
  }
};
