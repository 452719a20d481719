// What is looked up in tables for a row and added to its scores, as DeBERTa's products of queries and keys with distances.

// Rows that are read ahead where a table has rows of its own, and where it has those of keys: a line serves many rows then.
constexpr i64 AHEAD_IN_ROW = 8, AHEAD_AT_KEYS = 32;

// Fetches what rows soon after this one read: what they look up is too far apart for the processor to see it coming.
template <class S>
ATTN_INLINE void fetch_ahead(const Lookup& x, const S* table, const i32* place, i64 i, i64 rows, i64 first, i64 end) {
  const i64 *s = x.stride, *ps = x.place.stride, step = s[4];
  const i64 ahead = s[3] == 0 ? AHEAD_IN_ROW : AHEAD_AT_KEYS;
  if (i + ahead >= rows) return;
  table += ahead * s[2], place += ahead * ps[2];
  const i64 from = s[3] == 0 ? first : first + (i - first & AHEAD_AT_KEYS - 1), by = s[3] == 0 ? 16 : AHEAD_AT_KEYS;
  for (i64 n = from; n < end; n += by) __builtin_prefetch(table + n * s[3] + place[n * ps[3]] * step, 0, 3);
}

// Those of keys [first, end) of a panel that begins at `key`; of `rows` rows.
template <class T>
ATTN_INLINE void add_looked_up(const Lookup& x, const Row& r, i64 rows, i64 key, i64 first, i64 end, float* sums) {
  using st = typename T::st;
  const i64 *s = x.stride, *ps = x.place.stride, step = s[4];
  const st* table = static_cast<const st*>(x.data) + r.b * s[0] + r.h * s[1] + r.i * s[2] + key * s[3];
  const i32* place = static_cast<const i32*>(x.place.data) + r.b * ps[0] + r.h * ps[1] + r.i * ps[2] + key * ps[3];
  fetch_ahead(x, table, place, r.i, rows, first, end);
  st numbers[PANEL] = {};  // one by one: `vpgatherdd` took longer (Zen 4); then in vectors
  table += first * s[3];
  if (step == 1 && ps[3] == 1) {
#pragma GCC unroll 8
    for (i64 n = first; n < end; ++n, table += s[3]) numbers[n] = table[place[n]];
  } else {
    for (i64 n = first; n < end; ++n, table += s[3]) numbers[n] = table[place[n * ps[3]] * step];
  }
  const vec factor = Isa::set1(*x.factor);
  for (i64 n = first / W * W; n < end; n += W)
    Isa::store(sums + n, Isa::fma(T::widen(numbers + n), factor, Isa::load(sums + n)));
}

// The sums for the keys of a panel: of those that count, by `word`, and of any between two of them.
ATTN_ONCE void look_up(const Args& a, const Row& r, u64 word, i64 key, float* sums) {
  std::memset(sums, 0, PANEL * sizeof(*sums));
  word &= range_word(0, a.S, key);
  if (!word) return;
  const i64 first = __builtin_ctzll(word), end = 64 - __builtin_clzll(word);
  for (const Lookup& x : a.lookups) {
    if (!x.data) return;
    if (x.type == FLOAT32) add_looked_up<F32>(x, r, a.L, key, first, end, sums);
    else if (x.type == BFLOAT16) add_looked_up<BF16>(x, r, a.L, key, first, end, sums);
    else add_looked_up<F16>(x, r, a.L, key, first, end, sums);
  }
}
