// Where a linear's weights come from, a panel at a time: bf16 as they lie in memory, or int8 widened on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "vec.h"

namespace linear {

constexpr int64_t PANEL = 32;  // outputs per panel

// [out / PANEL][in / 2][PANEL] pairs of consecutive inputs.
struct Bf16Panels {
  static constexpr bool FROM_MEMORY = true;  // a panel is read from memory while it is multiplied
  const uint32_t* panels;
  int64_t in;

  const uint32_t* at(int64_t p) const { return panels + p * in / 2 * PANEL; }
};

// The same in int8, half the bytes to read; scales [out / PANEL][2 · PANEL] hold each output's twice, once for each of a
// pair. What comes out is the panel of the bf16 weights q · scale, in a buffer of the thread's own that stays in its cache.
struct Int8Panels {
  static constexpr bool FROM_MEMORY = false;
  const int8_t* panels;
  const float* scales;
  int64_t in;

  const uint32_t* at(int64_t p) const {
    constexpr int VECTORS = 2 * PANEL / W;
    constexpr int64_t AHEAD = 2048;  // bytes
    static thread_local std::vector<bf16> buffer;
    const int64_t values = in * PANEL;
    if (int64_t(buffer.size()) < values + 32) buffer.resize(values + 32);
    bf16* const widened = reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) & ~uintptr_t(63));
    const int8_t* from = panels + p * values;
    bf16* to = widened;
    vf scale[VECTORS];
    for (int i = 0; i < VECTORS; i++) scale[i] = load(scales + p * 2 * PANEL + i * W);
    for (int64_t pair = 0; pair < in / 2; pair++, from += 2 * PANEL, to += 2 * PANEL) {
      __builtin_prefetch(from + AHEAD, 0, 2);
      for (int i = 0; i < VECTORS; i += 2)
        store(to + i * W, load(from + i * W) * scale[i], load(from + (i + 1) * W) * scale[i + 1]);
    }
    return reinterpret_cast<const uint32_t*>(widened);
  }
};

}  // namespace linear
