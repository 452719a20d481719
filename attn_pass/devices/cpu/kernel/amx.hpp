// Products of bfloat16 in tiles of 16 rows of 64 bytes (AMX), which take keys and values as `pack_keys` and `pack_values`
// lay out pairs. The processor multiplies tiles beside the exponentials of other scores if both stand close together in the
// code: so the pieces here are small, 16 rows times a panel (`in_tiles` of `many.hpp` says in which order).
#if ATTN_TILES
constexpr i64 TILE = 16, RESULTS = 4;  // rows, and columns of 32 bits; tiles that add results up

// While it lives this thread has eight such tiles: 0 to 3 for results, 4 and 5 for operands, 6 and 7 for scores.
struct TilesOfThread {
  TilesOfThread() {
    struct alignas(64) {
      u8 palette = 1, start = 0, reserved[14] = {};
      u16 bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    // GCC's intrinsic says of the first 8 bytes alone that they are read.
    __asm__ volatile("" ::"r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
  }
  ~TilesOfThread() { _tile_release(); }
};
// The intrinsics do not say that they read memory.
ATTN_INLINE void written() { __asm__ volatile("" ::: "memory"); }

// Scores of 16 rows and the first keys of a panel, whose number is a multiple of 32.
ATTN_ONCE void score_tiles(const i32* q, i64 ldq, const i32* keys, i64 ldk, i64 there, float* s, i64 ld) {
  written();
  for (i64 at = 0; at < there; at += 2 * TILE) {
    _tile_zero(6);
    _tile_zero(7);
    for (i64 c = 0; c < ldq; c += TILE) {
      const i32* k = keys + c * ldk + at;
      _tile_loadd(4, q + c, ldq * 4);
      _tile_loadd(5, k, ldk * 4);
      _tile_dpbf16ps(6, 4, 5);
      _tile_loadd(5, k + TILE, ldk * 4);
      _tile_dpbf16ps(7, 4, 5);
    }
    _tile_stored(6, s + at, ld * 4);
    _tile_stored(7, s + at + TILE, ld * 4);
  }
  written();
}

// 16 rows of up to 64 columns of the result, which is in tiles between these two.
ATTN_INLINE void load_results(const float* o, i64 ld, i64 columns) {
  written();
  _tile_loadd(0, o, ld * 4);
  if (columns > TILE) _tile_loadd(1, o + TILE, ld * 4);
  if (columns > 2 * TILE) _tile_loadd(2, o + 2 * TILE, ld * 4);
  if (columns > 3 * TILE) _tile_loadd(3, o + 3 * TILE, ld * 4);
}
ATTN_INLINE void store_results(float* o, i64 ld, i64 columns) {
  _tile_stored(0, o, ld * 4);
  if (columns > TILE) _tile_stored(1, o + TILE, ld * 4);
  if (columns > 2 * TILE) _tile_stored(2, o + 2 * TILE, ld * 4);
  if (columns > 3 * TILE) _tile_stored(3, o + 3 * TILE, ld * 4);
  written();
}
// Adds weights times the values of a panel to these. What lies behind the last pair is finite, and its weights are 0.
template <int N> ATTN_INLINE void add_tiles(const i32* p, i64 ldp, const i32* values, i64 ldv, i64 pairs) {
  written();
  for (i64 k = 0; k < pairs; k += TILE, values += TILE * ldv) {
    _tile_loadd(4, p + k, ldp * 4);
    _tile_loadd(5, values, ldv * 4);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (N > 1) {
      _tile_loadd(5, values + TILE, ldv * 4);
      _tile_dpbf16ps(1, 4, 5);
    }
    if constexpr (N > 2) {
      _tile_loadd(5, values + 2 * TILE, ldv * 4);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (N > 3) {
      _tile_loadd(5, values + 3 * TILE, ldv * 4);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  written();
}
ATTN_INLINE void add_panel(const i32* p, i64 ldp, const i32* values, i64 ldv, i64 pairs, i64 columns) {
  switch (columns < RESULTS * TILE ? (columns + TILE - 1) / TILE : RESULTS) {
    case 1: return add_tiles<1>(p, ldp, values, ldv, pairs);
    case 2: return add_tiles<2>(p, ldp, values, ldv, pairs);
    case 3: return add_tiles<3>(p, ldp, values, ldv, pairs);
    default: return add_tiles<4>(p, ldp, values, ldv, pairs);
  }
}
#endif
