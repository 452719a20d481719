// Tiles in memory, for processors that have none: what Intel's manual says of the instructions that `amx.hpp` uses. With it
// the address sanitizer sees what tiles load and store, too.
#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>

struct EmulatedTile {
  uint8_t bytes[16][64];
};
inline thread_local EmulatedTile emulated_tiles[8];

inline void emulated_load(int tile, const void* from, long stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(emulated_tiles[tile].bytes[row], static_cast<const char*>(from) + row * stride, 64);
}
inline void emulated_store(int tile, void* to, long stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles[tile].bytes[row], 64);
}
inline float emulated_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline void emulated_product(int result, int left, int right) {
  float c[16][16];
  uint16_t a[16][32], b[16][32];
  std::memcpy(c, &emulated_tiles[result], sizeof c);
  std::memcpy(a, &emulated_tiles[left], sizeof a);
  std::memcpy(b, &emulated_tiles[right], sizeof b);
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 16; ++n)
        for (int one = 0; one < 2; ++one) c[m][n] += emulated_bf16(a[m][2 * k + one]) * emulated_bf16(b[k][2 * n + one]);
  std::memcpy(&emulated_tiles[result], c, sizeof c);
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(shapes) static_cast<void>(shapes)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) static_cast<void>(emulated_tiles[tile] = {})
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(result, left, right) emulated_product(result, left, right)
