// Which keys count for a query row: bounds first, then tensors of truth values and biases, a bit for each key of a panel.
struct Row {
  i64 lo, hi;         // keys, before tensors are asked
  i64 b, h, i;
  const u8* keep;     // of the row, or null
  const u64* words;   // the same in bits, a word for each panel from `panel` on, where that was done beforehand
  i64 panel, step;    // .. and how far these words are apart
  const void* bias;   // of the row, or null
};

// The keys that rows from one position to another may keep.
struct Reach {
  i64 lo, hi;
};
ATTN_INLINE i64 round_down(i64 x, i64 size) { return (x >= 0 ? x / size : -((size - 1 - x) / size)) * size; }
// What bounds say of a batch entry.
struct Bounds {
  Reach all;  // keys that any row may keep
  i64 shift;  // where its rows begin; as far as that can matter, so that bounds around it can be added
  i64 before, after, prefix, chunk, chunk_rows, chunk_keys;
  ATTN_METHOD Reach reach(i64 first, i64 last) const {
    Reach r = {std::max<i64>(all.lo, first - before), std::min<i64>(all.hi, std::max<i64>(last + after + 1, prefix))};
    if (chunk > 0) {
      r.lo = std::max<i64>(r.lo, round_down(first + chunk_rows, chunk) - chunk_keys);
      r.hi = std::min<i64>(r.hi, round_down(last + chunk_rows, chunk) + chunk - chunk_keys);
    }
    return r;
  }
  ATTN_METHOD Reach of_row(i64 i) const {
    const Reach r = reach(i + shift, i + shift);
    return r.hi > r.lo ? r : Reach{0, 0};
  }
};
ATTN_INLINE Bounds bounds_of(const Args& a, i64 b) {
  const Reach all = {std::max<i64>({0, a.start, a.starts.at(b, 0)}), std::min<i64>({a.S, a.end, a.ends.at(b, a.S)})};
  const i64 shift = std::max<i64>(-UNBOUNDED / 2, std::min<i64>(UNBOUNDED / 2, a.shift.at(b, 0)));
  return {all, shift, a.before, a.after, a.prefix, a.chunk, a.chunk_rows, a.chunk_keys};
}

ATTN_INLINE Row row_of(const Args& a, const Bounds& bounds, i64 b, i64 h, i64 i) {
  Row r;
  r.b = b, r.h = h, r.i = i;
  const Reach reach = bounds.of_row(i);
  r.lo = reach.lo, r.hi = reach.hi;
  const i64* s = a.keep.stride;
  r.keep = a.keep.data ? static_cast<const u8*>(a.keep.data) + b * s[0] + h * s[1] + i * s[2] : nullptr;
  r.words = nullptr, r.panel = 0, r.step = 1;
  s = a.bias.stride;
  const i64 size = a.bias_type == FLOAT32 ? 4 : 2;
  r.bias = a.bias.data ? static_cast<const char*>(a.bias.data) + (b * s[0] + h * s[1] + i * s[2]) * size : nullptr;
  return r;
}

// Calls for the type that the bias has, once for many vectors of it.
template <class Call> ATTN_INLINE auto for_bias_type(const Args& a, const Call& call) {
  if (a.bias_type == FLOAT32) return call(F32{});
  if (a.bias_type == BFLOAT16) return call(BF16{});
  return call(F16{});
}
// W contiguous biases, of which n are there; floats also where the kernel multiplies pairs.
template <class B> ATTN_INLINE vec some_biases(const typename B::st* p, i64 n) {
  if (n >= W) return B::widen(p);
  n = std::max<i64>(n, 0);
  if constexpr (B::CODE == BFLOAT16) return Isa::load_some_bf16(p, n);
  else return B::some(p, n);
}
// W biases from key on, of which n are there, as floats.
ATTN_INLINE vec bias_at(const Args& a, const Row& r, i64 key, i64 n) {
  const i64 stride = a.bias.stride[3];
  if (stride == 0) return Isa::set1(element_at(r.bias, 0, a.bias_type));
  if (stride == 1)
    return for_bias_type(a, [&](auto type) ATTN_LAMBDA {
      using B = decltype(type);
      return some_biases<B>(static_cast<const typename B::st*>(r.bias) + key, n);
    });
  float part[W] = {};
  for (i64 i = 0; i < std::min<i64>(n, W); ++i) part[i] = element_at(r.bias, (key + i) * stride, a.bias_type);
  return Isa::load(part);
}

// Whether every key of a whole panel has a bias above -inf in each of some rows; false where that takes more than a look.
ATTN_INLINE bool biases_keep_all(const Args& a, const Row* rows, i64 count, i64 key) {
  if (a.bias.stride[3] != 1 || key + PANEL > a.S) return false;
  return for_bias_type(a, [&](auto type) ATTN_LAMBDA {
    using B = decltype(type);
    const vec lowest = Isa::set1(-std::numeric_limits<float>::infinity());
    u32 kept = ~u32(0);
    for (i64 r = 0; r < count; ++r) {
      const auto* p = static_cast<const typename B::st*>(rows[r].bias) + key;
      // What the row reads next: rows are too far apart for the processor to see it.
      for (i64 n = 0; n < PANEL; n += 64 / i64(sizeof(*p))) __builtin_prefetch(p + PANEL + n, 0, 2);
#pragma GCC unroll 4
      for (i64 n = 0; n < PANEL; n += W) kept &= Isa::above(B::widen(p + n), lowest);
    }
    return (kept & ((u64(1) << W) - 1)) == (u64(1) << W) - 1;
  });
}

// What a row of `keep` says of a panel, a bit for each key; n of them are there.
ATTN_INLINE u64 kept_word(const u8* keep, i64 stride, i64 n) {
  if (stride == 0) return keep[0] ? ~u64(0) : 0;
  if (stride == 1 && n == PANEL) return Isa::nonzero_bytes(keep);
  u64 kept = 0;
  for (i64 i = 0; i < n; ++i) kept |= u64(keep[i * stride] != 0) << i;
  return kept;
}
ATTN_INLINE u64 kept_of_panel(const Args& a, const u8* keep, i64 panel) {
  const i64 stride = a.keep.stride[3], key = panel * PANEL;
  return kept_word(keep + key * stride, stride, std::min<i64>(PANEL, a.S - key));
}
// The words of panels [from, to), read in the order of memory.
inline void read_words(const Args& a, const u8* keep, i64 from, i64 to, u64* words) {
  i64 panel = from;
  if (a.keep.stride[3] == 1)
    for (; panel < std::min(to, a.S / PANEL); ++panel) {
      __builtin_prefetch(keep + panel * PANEL + 4096);  // the next page, which the processor does not read ahead of
      words[panel - from] = Isa::nonzero_bytes(keep + panel * PANEL);
    }
  for (; panel < to; ++panel) words[panel - from] = kept_of_panel(a, keep, panel);
}
// What tensors of truth values say of a panel.
ATTN_INLINE u64 kept_by_tensor(const Args& a, const Row& r, i64 key) {
  if (r.words) return r.words[(key / PANEL - r.panel) * r.step];
  return r.keep ? kept_of_panel(a, r.keep, key / PANEL) : ~u64(0);
}
// What biases say of a panel: keys of which they are above -inf.
ATTN_INLINE u64 kept_by_bias(const Args& a, const Row& r, i64 key) {
  const i64 n = std::min<i64>(PANEL, a.S - key);
  if (a.bias.stride[3] == 1) {  // what the row reads next: rows are too far apart for the processor to see it
    const i64 size = a.bias_type == FLOAT32 ? 4 : 2;
    const char* next = static_cast<const char*>(r.bias) + (key + PANEL) * size;
    for (i64 byte = 0; byte < PANEL * size; byte += 64) __builtin_prefetch(next + byte, 0, 2);
  }
  const vec lowest = Isa::set1(-std::numeric_limits<float>::infinity());
  u64 kept = 0;
  if (a.bias.stride[3] == 1) {
    for_bias_type(a, [&](auto type) ATTN_LAMBDA {
      using B = decltype(type);
      const auto* p = static_cast<const typename B::st*>(r.bias) + key;
      for (i64 i = 0; i < n; i += W) kept |= u64(Isa::above(some_biases<B>(p + i, n - i), lowest)) << i;
    });
    return kept;
  }
  for (i64 i = 0; i < n; i += W) kept |= u64(Isa::above(bias_at(a, r, key + i, n - i), lowest)) << i;
  return kept;
}
// The keys of a panel that count for a row, a bit each.
ATTN_INLINE u64 word_of(const Args& a, const Row& r, i64 key) {
  u64 word = range_word(r.lo, r.hi, key);
  if (!word || a.replaces) return word;
  word &= kept_by_tensor(a, r, key);
  if (r.bias && word) word &= kept_by_bias(a, r, key);
  return word;
}
