// The linear layer of linear.h on the matrix units of AMX, over the same panels: 16 consecutive pairs of one half of a
// panel are one tile. Up to 32 rows share one pass over the weights, and reading those is most of the time: 1 row and
// 32 rows cost nearly the same.
//
// Tiles always sum 32 inputs at a time in the same order, so here, too, a row's result does not depend on the batch.
#pragma once

#if defined(__AMX_BF16__) && defined(__linux__)
#define DSPARK_AMX 1

#include <algorithm>
#include <cstdint>

#include <sys/syscall.h>
#include <unistd.h>

#include "panels.h"
#include "vec.h"

namespace amx {

using linear::PANEL;

constexpr int TILE_ROWS = 16;
constexpr int64_t TILE_INPUTS = 32;        // bf16 values in a tile's row of x
constexpr int64_t GROUP = 2 * TILE_ROWS;   // rows that share a pass over a panel
constexpr int64_t STEP_BYTES = TILE_INPUTS * PANEL * 2;  // of a panel that one step consumes
constexpr int64_t FETCH_AHEAD = 4 * STEP_BYTES;

// Linux hands out the tile registers on request, once a process.
static bool allowed() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool yes = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return yes;
}

// Tiles 0–3 are sums, 4–5 rows of x, 6–7 weights. With at most 16 rows the second of each pair of rows is unused.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int64_t count) {
    uint8_t upper = uint8_t(std::min<int64_t>(count, TILE_ROWS));
    uint8_t lower = uint8_t(std::max<int64_t>(count - TILE_ROWS, 1));
    for (int tile : {0, 1, 4}) set(tile, upper);
    for (int tile : {2, 3, 5}) set(tile, lower);
    for (int tile : {6, 7}) set(tile, TILE_ROWS);
  }

 private:
  void set(int tile, uint8_t count) { rows[tile] = count, row_bytes[tile] = 64; }
};

static void write_rows(const float* sums, bf16* out, int64_t out_stride, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++) store_some(out + r * out_stride, load(sums + r * W), columns);
}

// The tiles are configured for `rows` ≤ GROUP. BOTH: more than 16 rows. FETCH: the panel is not in the cache yet.
template <bool BOTH, bool FETCH>
void multiply_group(const char* panel, const bf16* x, const float* bias, int64_t in, bf16* out, int64_t out_stride,
                    int64_t rows, int64_t columns) {
  const int64_t x_stride = in * 2, weight_stride = PANEL * 4;
  const bf16* x_lower = x + TILE_ROWS * in;
  _tile_loadd(0, bias, 0);  // a stride of 0 gives every row the same bias
  _tile_loadd(1, bias + W, 0);
  if constexpr (BOTH) {
    _tile_loadd(2, bias, 0);
    _tile_loadd(3, bias + W, 0);
  }
  for (int64_t i = 0; i < in; i += TILE_INPUTS, panel += STEP_BYTES) {
    if constexpr (FETCH)
      for (int64_t line = 0; line < STEP_BYTES; line += 64) __builtin_prefetch(panel + FETCH_AHEAD + line, 0, 2);
    _tile_loadd(6, panel, weight_stride);
    _tile_loadd(7, panel + 64, weight_stride);
    _tile_loadd(4, x + i, x_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (BOTH) {
      _tile_loadd(5, x_lower + i, x_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[TILE_ROWS * W];
  const int64_t upper = std::min<int64_t>(rows, TILE_ROWS);
  _tile_stored(0, sums, 64);
  write_rows(sums, out, out_stride, upper, std::min<int64_t>(columns, W));
  _tile_stored(1, sums, 64);
  if (columns > W) write_rows(sums, out + W, out_stride, upper, columns - W);
  if constexpr (BOTH) {
    bf16* lower = out + TILE_ROWS * out_stride;
    _tile_stored(2, sums, 64);
    write_rows(sums, lower, out_stride, rows - TILE_ROWS, std::min<int64_t>(columns, W));
    _tile_stored(3, sums, 64);
    if (columns > W) write_rows(sums, lower + W, out_stride, rows - TILE_ROWS, columns - W);
  }
}

// As linear::multiply, by a team; `in` is a multiple of TILE_INPUTS.
template <class Panels>
void multiply(const bf16* x, const Panels& panels, const float* bias, bf16* result, int64_t rows, int64_t in,
              int64_t out) {
  constexpr bool FETCH = Panels::FROM_MEMORY;
  const int64_t num_panels = (out + PANEL - 1) / PANEL;
  int64_t configured = 0;
#pragma omp for schedule(static)
  for (int64_t p = 0; p < num_panels; p++) {
    const char* panel = reinterpret_cast<const char*>(panels.at(p));
    const int64_t columns = std::min(PANEL, out - p * PANEL);
    for (int64_t row = 0; row < rows; row += GROUP) {
      const int64_t count = std::min(GROUP, rows - row);
      if (count != configured) {
        const TileConfig config(count);
        _tile_loadconfig(&config);
        configured = count;
      }
      auto run = count <= TILE_ROWS ? multiply_group<false, FETCH> : multiply_group<true, FETCH>;
      if (row > 0) run = count <= TILE_ROWS ? multiply_group<false, false> : multiply_group<true, false>;
      run(panel, x + row * in, bias + p * PANEL, in, result + row * out + p * PANEL, out, count, columns);
    }
  }
  if (configured) _tile_release();
}

}  // namespace amx

#endif
