// Packing: a panel of keys with its keys side by side, and a panel of values, as the micro-kernel reads them. With FETCHES
// lines of the next panel are fetched in between.

// n keys of a panel -> [column][PANEL], zeros behind them; `columns` is rounded up to W in `out`.
template <class T, bool FETCHES = false>
void pack_keys(const typename T::st* k, const i64* stride, i64 n, i64 dim, typename T::st* room, i32* out) {
  const i64 columns = blocks_of(dim, T::PER_COLUMN);
  for (i64 g = 0; g < PANEL; g += W) {
    for (i64 c = 0; c < columns; c += W) {
      vec x[W];
      const i64 at = c * T::PER_COLUMN;
      if (g + W <= n && stride[3] == 1 && dim - at >= W * T::PER_COLUMN) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
          if constexpr (FETCHES) __builtin_prefetch(k + (PANEL + g + i) * stride[2] + at);
          x[i] = whole_columns<T>(k + (g + i) * stride[2] + at);
        }
      } else {
        for (int i = 0; i < W; ++i) {
          if (g + i >= n) {
            x[i] = Isa::zero();
            continue;
          }
          const auto* row = k + (g + i) * stride[2] + at * stride[3];
          const i64 rest = std::min<i64>(dim - at, W * T::PER_COLUMN);
          x[i] = some_columns<T>(contiguous<T>(row, stride[3], rest, room), rest);
        }
      }
      Isa::transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) Isa::store_bits(out + (c + i) * PANEL + g, x[i]);
    }
  }
}
// n values of a panel -> rows of `ld` columns of floats, or pairs of rows; says whether all are finite, where that is asked.
// In tiles zeros make up for the last step's.
template <class T, bool ASKED = true, bool FETCHES = false>
bool pack_values(const typename T::st* v, const i64* stride, i64 n, i64 dim, i64 ld, typename T::st* room, i32* out) {
  vec check = Isa::zero();
  bool finite = true;
  for (i64 s = 0; s < n; s += T::PER_COLUMN) {
    const auto* row = contiguous<T>(v + s * stride[2], stride[3], dim, room);
    if constexpr (T::PAIR) {
      const bool two = s + 1 < n;
      const auto* next = two ? contiguous<T>(v + (s + 1) * stride[2], stride[3], dim, room + round_up(dim, 2 * W)) : row;
      for (i64 d = 0; d < dim; d += 2 * W) {
        if constexpr (FETCHES) __builtin_prefetch(row + PANEL * stride[2] + d), __builtin_prefetch(next + PANEL * stride[2] + d);
        const vec a = some_columns<T>(row + d, dim - d), b = two ? some_columns<T>(next + d, dim - d) : Isa::zero();
        if constexpr (ASKED) finite = finite && Isa::finite_pairs(a) && Isa::finite_pairs(b);
        vec low, high;
        Isa::interleave(a, b, low, high);
        Isa::store_bits(out + s / 2 * ld + d, low);
        if (d + W < ld) Isa::store_bits(out + s / 2 * ld + d + W, high);
      }
    } else {
      for (i64 d = 0; d < dim; d += W) {
        const vec x = some_columns<T>(row + d, dim - d);
        if constexpr (ASKED) check = Isa::fma(x, Isa::zero(), check);
        Isa::store_bits(out + s * ld + d, x);
      }
    }
  }
  if constexpr (T::TILES) {
    const i64 there = blocks_of(n, 2);
    std::memset(out + there * ld, 0, size_t((round_up(there, W) - there) * ld) * 4);
  }
  const float sum = Isa::reduce_add(check);
  return finite && sum == sum;
}
