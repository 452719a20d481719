// Packing, the micro-kernel, and what becomes of a tile of scores. All in columns of 32 bits: a float, or a pair of
// bfloat16 where the instruction set multiplies them as they are.
using vec = Isa::vec;
constexpr int W = Isa::W, PANEL = 64;  // keys of a panel, one bit of a word each
constexpr int WIDE = Isa::NR * W;      // columns of the micro-kernel
constexpr int HALF = WIDE >= PANEL ? Isa::NR / 2 : Isa::NR;  // vectors of keys that it takes at least

struct F32 {
  using st = float;
  using Few = F32;
  static constexpr int CODE = FLOAT32, PER_COLUMN = 1, DEGREE = 5, STRIP = 6, PANELS = 4;
  static constexpr bool PAIR = false, TILES = false;
  ATTN_INLINE vec widen(const st* p) { return Isa::load(p); }
  ATTN_INLINE vec some(const st* p, i64 n) { return Isa::load_some(p, n); }
  ATTN_INLINE void narrow(st* p, vec x) { Isa::store(p, x); }
  ATTN_INLINE float one(st x) { return x; }
};
template <bool PAIRS, bool IN_TILES> struct BFloat16 {
  using st = u16;
  using Few = BFloat16<PAIRS && !IN_TILES, false>;  // of few rows tiles would be empty, and pairs are no faster there
  static constexpr int CODE = BFLOAT16, PER_COLUMN = PAIRS ? 2 : 1, DEGREE = 3, STRIP = IN_TILES ? 16 : 6, PANELS = IN_TILES ? 8 : 4;
  static constexpr bool PAIR = PAIRS, TILES = IN_TILES;
  ATTN_INLINE vec widen(const st* p) { return Isa::load_bf16(p); }
  ATTN_INLINE vec some(const st* p, i64 n) { return PAIR ? Isa::load_some_pairs(p, n) : Isa::load_some_bf16(p, n); }
  ATTN_INLINE void narrow(st* p, vec x) { Isa::store_bf16(p, x); }
  ATTN_INLINE float one(st x) { return from_bf16(x); }
};
using BF16 = BFloat16<Isa::PAIRS, ATTN_TILES>;
struct F16 {
  using st = u16;
  using Few = F16;
  static constexpr int CODE = FLOAT16, PER_COLUMN = 1, DEGREE = 4, STRIP = 6, PANELS = 4;
  static constexpr bool PAIR = false, TILES = false;
  ATTN_INLINE vec widen(const st* p) { return Isa::load_f16(p); }
  ATTN_INLINE vec some(const st* p, i64 n) { return Isa::load_some_f16(p, n); }
  ATTN_INLINE void narrow(st* p, vec x) { Isa::store_f16(p, x); }
  ATTN_INLINE float one(st x) { return from_f16(x); }
};

// W columns from contiguous elements, of which `elements` are there; zeros behind them.
template <class T> ATTN_INLINE vec whole_columns(const typename T::st* p) {
  if constexpr (T::PAIR) return Isa::load_bits(reinterpret_cast<const i32*>(p));
  else return T::widen(p);
}
template <class T> ATTN_INLINE vec some_columns(const typename T::st* p, i64 elements) {
  return elements >= W * T::PER_COLUMN ? whole_columns<T>(p) : T::some(p, elements > 0 ? elements : 0);
}
template <class T> ATTN_INLINE void narrow_some(typename T::st* p, vec x, i64 elements) {
  if (elements >= W) return T::narrow(p, x);
  typename T::st part[W];
  T::narrow(part, x);
  std::memcpy(p, part, size_t(elements) * sizeof(part[0]));
}

// A row that is not contiguous, gathered: most are, and this returns the row itself.
template <class T>
ATTN_INLINE const typename T::st* contiguous(const typename T::st* row, i64 stride, i64 n, typename T::st* room) {
  if (stride == 1) return row;
  for (i64 i = 0; i < n; ++i) room[i] = row[i * stride];
  return room;
}

// ---- 2^t, by a polynomial on [-1/2, 1/2] as exact as the type needs; 0 for -inf, NaN for NaN. 2^0 is 1 to the bit: the
// weight of a row's only key is then 1, and the gradient of its score 0.
template <int DEGREE> ATTN_INLINE vec exp2_of(vec t) {
  t = Isa::max(Isa::set1(-200.0f), t);
  const vec n = Isa::round(t), f = Isa::add(t, Isa::mul(n, Isa::set1(-1.0f)));
  vec p;
  if constexpr (DEGREE == 3) {
    p = Isa::fma(Isa::set1(5.50089305e-2f), f, Isa::set1(2.42210959e-1f));
    p = Isa::fma(p, f, Isa::set1(6.93282927e-1f));
  } else if constexpr (DEGREE == 4) {
    p = Isa::fma(Isa::set1(9.58285304e-3f), f, Isa::set1(5.59064247e-2f));
    p = Isa::fma(p, f, Isa::set1(2.40240986e-1f));
    p = Isa::fma(p, f, Isa::set1(6.93124193e-1f));
  } else {
    p = Isa::fma(Isa::set1(1.32647271e-3f), f, Isa::set1(9.67151264e-3f));
    p = Isa::fma(p, f, Isa::set1(5.55073371e-2f));
    p = Isa::fma(p, f, Isa::set1(2.40222421e-1f));
    p = Isa::fma(p, f, Isa::set1(6.93146978e-1f));
  }
  return Isa::times_exp2(Isa::fma(p, f, Isa::set1(1.0f)), n);
}

// As exact as 3 degrees, on [0, 1): beside products in tiles the exponentials are most of the work.
#if ATTN_TILES
ATTN_INLINE vec quick_exp2(vec t) {
  const vec f = Isa::fraction(t);
  vec p = Isa::fma(Isa::set1(7.70672411e-2f), f, Isa::set1(2.27644980e-1f));
  p = Isa::fma(p, f, Isa::set1(6.95116639e-1f));
  return Isa::times_exp2_floor(Isa::fma(p, f, Isa::set1(1.0f)), t);
}
#else
ATTN_INLINE vec quick_exp2(vec t) { return exp2_of<3>(t); }
#endif
template <class T> ATTN_INLINE vec weight_of(vec t) {
  if constexpr (T::TILES) return quick_exp2(t);
  else return exp2_of<T::DEGREE>(t);
}

// ---- memory that is read next, line by line beside the products: in one go it would wait for the lines before it
struct Nothing {
  ATTN_METHOD void step() {}
};
struct Lines {
  const char* row;
  i64 stride, bytes, rows, each, at;  // bytes from row to row, of a row, rows that are left, lines a step, the next byte
  ATTN_METHOD void step() {
    for (i64 n = 0; n < each && rows > 0; ++n) {
      __builtin_prefetch(row + at, 0, 2);
      at += 64;
      if (at >= bytes) at = 0, row += stride, --rows;
    }
  }
};
// `rows` rows of n elements, in about `steps` steps.
template <class T> ATTN_INLINE Lines lines_of(const typename T::st* from, i64 stride, i64 rows, i64 n, i64 steps) {
  const i64 size = sizeof(*from), bytes = n * size;
  return {reinterpret_cast<const char*>(from), stride * size, bytes, rows, blocks_of(rows * blocks_of(bytes, 64), std::max<i64>(1, steps)), 0};
}

// Several of them, one after the other.
struct Ahead {
  Lines *at, *end;
  ATTN_METHOD void step() {
    if (at == end) return;
    at->step();
    if (at->rows <= 0) ++at;
  }
  // Adds `rows` rows of n elements, a line a step; none where the elements of a row lie apart.
  template <class S> ATTN_METHOD void add(const S* from, const i64* stride, i64 rows, i64 n) {
    const i64 size = sizeof(S);
    if (from && stride[3] == 1) *end++ = {reinterpret_cast<const char*>(from), stride[2] * size, n * size, rows, 1, 0};
  }
};

// ---- c[MR][NR] += A (MR rows of columns) times B (rows of NR vectors of columns)
template <bool PAIR> ATTN_INLINE vec plus_product(vec c, vec x, vec y) {
  if constexpr (PAIR) return Isa::dot(c, x, y);
  else return Isa::fma(x, y, c);
}
template <bool PAIR, int MR, int NR, class Next>
ATTN_INLINE void multiply(const i32* A, i64 lda, const i32* B, i64 ldb, i64 K, vec (&c)[MR][NR], Next& next) {
  for (i64 k = 0; k < K; ++k) {
    next.step();
    vec b[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) b[n] = Isa::load_bits(B + k * ldb + n * W);
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m) {
      const vec x = Isa::splat_bits(A + m * lda + k);
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) c[m][n] = plus_product<PAIR>(c[m][n], x, b[n]);
    }
  }
}

// ---- packing
// n keys of a panel -> [column][PANEL], zeros behind them; `columns` is rounded up to W in `out`.
template <class T>
void pack_keys(const typename T::st* k, const i64* stride, i64 n, i64 dim, typename T::st* room, i32* out) {
  const i64 columns = blocks_of(dim, T::PER_COLUMN);
  for (i64 g = 0; g < PANEL; g += W) {
    for (i64 c = 0; c < columns; c += W) {
      vec x[W];
      const i64 at = c * T::PER_COLUMN;
      if (g + W <= n && stride[3] == 1 && dim - at >= W * T::PER_COLUMN) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) x[i] = whole_columns<T>(k + (g + i) * stride[2] + at);
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
// n values of a panel -> rows of `ld` columns of floats, or pairs of rows; says whether all are finite. In tiles zeros
// make up for the last step's.
template <class T>
bool pack_values(const typename T::st* v, const i64* stride, i64 n, i64 dim, i64 ld, typename T::st* room, i32* out) {
  vec check = Isa::zero();
  bool finite = true;
  for (i64 s = 0; s < n; s += T::PER_COLUMN) {
    const auto* row = contiguous<T>(v + s * stride[2], stride[3], dim, room);
    if constexpr (T::PAIR) {
      const bool two = s + 1 < n;
      const auto* next = two ? contiguous<T>(v + (s + 1) * stride[2], stride[3], dim, room + round_up(dim, 2 * W)) : row;
      for (i64 d = 0; d < dim; d += 2 * W) {
        const vec a = some_columns<T>(row + d, dim - d), b = two ? some_columns<T>(next + d, dim - d) : Isa::zero();
        finite = finite && Isa::finite_pairs(a) && Isa::finite_pairs(b);
        vec low, high;
        Isa::interleave(a, b, low, high);
        Isa::store_bits(out + s / 2 * ld + d, low);
        if (d + W < ld) Isa::store_bits(out + s / 2 * ld + d + W, high);
      }
    } else {
      for (i64 d = 0; d < dim; d += W) {
        const vec x = some_columns<T>(row + d, dim - d);
        check = Isa::fma(x, Isa::zero(), check);
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

// ---- what a query row sees
struct Row {
  i64 lo, hi;         // keys, before tensors are asked
  i64 b, h, i;
  const u8* keep;     // of the row, or null
  const u64* words;   // the same in bits, a word for each panel from `panel` on, where that was done beforehand
  i64 panel;
  const void* bias;   // of the row, or null
};

// The keys that rows from one position to another may keep.
struct Reach {
  i64 lo, hi;
};
ATTN_INLINE i64 round_down(i64 x, i64 size) { return (x >= 0 ? x / size : -((size - 1 - x) / size)) * size; }
ATTN_INLINE Reach reach_of(const Args& a, i64 b, i64 first, i64 last) {
  Reach r = {std::max<i64>({0, a.start, a.starts.at(b, 0), first - a.before}),
             std::min<i64>({a.S, a.end, a.ends.at(b, a.S), std::max<i64>(last + a.after + 1, a.prefix)})};
  if (a.chunk > 0) {
    r.lo = std::max<i64>(r.lo, round_down(first + a.chunk_rows, a.chunk) - a.chunk_keys);
    r.hi = std::min<i64>(r.hi, round_down(last + a.chunk_rows, a.chunk) + a.chunk - a.chunk_keys);
  }
  return r;
}

// Where a batch entry's rows begin; as far as that can matter, so that bounds around it can be added.
ATTN_INLINE i64 shift_of(const Args& a, i64 b) { return std::max<i64>(-UNBOUNDED / 2, std::min<i64>(UNBOUNDED / 2, a.shift.at(b, 0))); }

ATTN_INLINE Row row_of(const Args& a, i64 b, i64 h, i64 i) {
  Row r;
  r.b = b, r.h = h, r.i = i;
  const i64 position = i + shift_of(a, b);
  const Reach reach = reach_of(a, b, position, position);
  r.lo = reach.lo, r.hi = reach.hi;
  if (r.hi <= r.lo) r.lo = r.hi = 0;
  const i64* s = a.keep.stride;
  r.keep = a.keep.data ? static_cast<const u8*>(a.keep.data) + b * s[0] + h * s[1] + i * s[2] : nullptr;
  r.words = nullptr, r.panel = 0;
  s = a.bias.stride;
  const i64 size = a.bias_type == FLOAT32 ? 4 : 2;
  r.bias = a.bias.data ? static_cast<const char*>(a.bias.data) + (b * s[0] + h * s[1] + i * s[2]) * size : nullptr;
  return r;
}

// W biases from key on, of which n are there, as floats.
ATTN_INLINE vec bias_at(const Args& a, const Row& r, i64 key, i64 n) {
  const i64 stride = a.bias.stride[3];
  if (stride == 0) return Isa::set1(element_at(r.bias, 0, a.bias_type));
  if (stride == 1) {
    const float* p = static_cast<const float*>(r.bias) + key;
    const u16* half = static_cast<const u16*>(r.bias) + key;
    if (n >= W) return a.bias_type == FLOAT32 ? Isa::load(p) : a.bias_type == BFLOAT16 ? Isa::load_bf16(half) : Isa::load_f16(half);
    n = std::max<i64>(n, 0);
    return a.bias_type == FLOAT32 ? Isa::load_some(p, n) : a.bias_type == BFLOAT16 ? Isa::load_some_bf16(half, n) : Isa::load_some_f16(half, n);
  }
  float part[W] = {};
  for (i64 i = 0; i < std::min<i64>(n, W); ++i) part[i] = element_at(r.bias, (key + i) * stride, a.bias_type);
  return Isa::load(part);
}

// Calls for the type that the bias has, once for many vectors of it.
template <class Call> ATTN_INLINE auto for_bias_type(const Args& a, const Call& call) {
  if (a.bias_type == FLOAT32) return call(F32{});
  if (a.bias_type == BFLOAT16) return call(BF16{});
  return call(F16{});
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
  for (i64 panel = from; panel < to; ++panel) words[panel - from] = kept_of_panel(a, keep, panel);
}
// What tensors of truth values say of a panel.
ATTN_INLINE u64 kept_by_tensor(const Args& a, const Row& r, i64 key) {
  if (r.words) return r.words[key / PANEL - r.panel];
  return r.keep ? kept_of_panel(a, r.keep, key / PANEL) : ~u64(0);
}
// The keys of a panel that count for a row, a bit each.
ATTN_INLINE u64 word_of(const Args& a, const Row& r, i64 key) {
  u64 word = range_word(r.lo, r.hi, key);
  if (!word || a.replaces) return word;
  word &= kept_by_tensor(a, r, key);
  if (r.bias && word) {
    const i64 n = std::min<i64>(PANEL, a.S - key);
    if (a.bias.stride[3] == 1) {  // what the row reads next: rows are too far apart for the processor to see it
      const i64 size = a.bias_type == FLOAT32 ? 4 : 2;
      const char* next = static_cast<const char*>(r.bias) + (key + PANEL) * size;
      for (i64 byte = 0; byte < PANEL * size; byte += 64) __builtin_prefetch(next + byte, 0, 2);
    }
    const vec lowest = Isa::set1(-std::numeric_limits<float>::infinity());
    u64 kept = 0;
    for (i64 i = 0; i < n; i += W) kept |= u64(Isa::above(bias_at(a, r, key + i, n - i), lowest)) << i;
    word &= kept;
  }
  return word;
}

constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// How scores enter the exponential of 2: times `factor`, either as products are, or multiplied by `before` and biased.
struct Scale {
  float before, factor;
  bool as_they_are;
};
ATTN_INLINE Scale scale_of(const Args& a) {
  const float scale2 = a.scale * LOG2E;
  // The largest score decides what is taken off: a negative factor would turn them round, and 0 times -inf is NaN.
  if (a.has_score) return {1.0f, LOG2E, false};
  if (a.bias.data || a.replaces || !(scale2 > 0)) return {a.scale, LOG2E, false};
  return {1.0f, scale2, true};
}

// A strip's micro-kernel for the number of rows it has: rows of zeros make up for what is not there.
ATTN_INLINE int strip_rows(i64 n) { return n >= 5 ? 6 : n == 3 ? 4 : int(n); }
template <class Call> ATTN_INLINE void for_rows(i64 n, const Call& call) {
  switch (strip_rows(n)) {
    case 1: return call(Number<1>{});
    case 2: return call(Number<2>{});
    case 4: return call(Number<4>{});
    default: return call(Number<6>{});
  }
}
// `dim` columns of results, in so many vectors at a time; from which column on.
template <class Call> ATTN_INLINE void for_columns(i64 dim, const Call& call) {
  for (i64 d = 0; d < dim;) {
    const i64 rest = blocks_of(dim - d, W);
    if (Isa::NR >= 4 && rest >= 4) call(Number<4>{}, d), d += 4 * W;
    else if (rest >= 2) call(Number<2>{}, d), d += 2 * W;
    else call(Number<1>{}, d), d += W;
  }
}

// ---- what a score function is made of (`scores.py` writes it)
ATTN_INLINE vec number(float x) { return Isa::set1(x); }
ATTN_INLINE vec add(vec a, vec b) { return Isa::add(a, b); }
ATTN_INLINE vec mul(vec a, vec b) { return Isa::mul(a, b); }
ATTN_INLINE vec div(vec a, vec b) { return Isa::div(a, b); }
ATTN_INLINE vec neg(vec a) { return Isa::mul(a, number(-1.0f)); }
ATTN_INLINE vec sub(vec a, vec b) { return Isa::add(a, neg(b)); }
ATTN_INLINE vec maximum(vec a, vec b) { return Isa::keep(Isa::above(a, a), a, Isa::max(a, b)); }  // NaN stays
ATTN_INLINE vec minimum(vec a, vec b) { return neg(maximum(neg(a), neg(b))); }
ATTN_INLINE vec abs(vec a) { return maximum(a, neg(a)); }
ATTN_INLINE vec where(vec condition, vec a, vec b) { return Isa::keep(Isa::above(condition, number(0.0f)), a, b); }
ATTN_INLINE vec exp(vec a) {  // of infinity, too, which is no whole number
  return exp2_of<5>(neg(Isa::max(number(-200.0f), mul(a, number(-LOG2E)))));
}
ATTN_INLINE vec sigmoid(vec a) { return div(number(1.0f), add(number(1.0f), exp(neg(a)))); }
ATTN_INLINE vec tanh(vec a) {
  const vec e = exp(mul(minimum(maximum(a, number(-20.0f)), number(20.0f)), number(2.0f)));
  return sub(number(1.0f), div(number(2.0f), add(e, number(1.0f))));
}
// W elements of a captured tensor from key on.
ATTN_INLINE vec captured_at(const Args& a, const Row& r, int which, i64 key) {
  const Operand& x = a.captured[which];
  const float* p = static_cast<const float*>(x.data) + r.b * x.stride[0] + r.h * x.stride[1] + r.i * x.stride[2];
  const i64 n = std::min<i64>(W, a.S - key);
  if (x.stride[3] == 0) return number(*p);
  if (x.stride[3] == 1 && n == W) return Isa::load(p + key);
  float part[W] = {};
  for (i64 j = 0; j < n; ++j) part[j] = p[(key + j) * x.stride[3]];
  return Isa::load(part);
}
#define captured(which) captured_at(a, row, which, key + n)

// Of n keys of a panel so many scores are computed, and made weights of.
ATTN_INLINE i64 whole_steps(i64 n) { return std::min<i64>(PANEL, round_up(n, 2 * W)); }

// Scores that are more than products: scaled, biased, replaced, and -inf where a key does not count. Returns the largest.
ATTN_ONCE vec finish_row(const Args& a, const Scale& scale, const Row& row, u64 word, i64 key, i64 there, float* s, vec top) {
  const vec lowest = Isa::set1(-std::numeric_limits<float>::infinity());
  const vec by = Isa::set1(scale.before), fill = Isa::set1(a.fill);
  const u64 kept = a.replaces ? kept_by_tensor(a, row, key) : 0;
  for (int n = 0; n < there; n += W) {
    vec x = Isa::load(s + n);
    if (!scale.as_they_are) {
#ifdef ATTN_SCORE
      x = Isa::mul(x, by);
      x = ATTN_SCORE;
      if (row.bias) x = Isa::add(x, bias_at(a, row, key + n, a.S - key - n));
#else
      x = row.bias ? Isa::fma(x, by, bias_at(a, row, key + n, a.S - key - n)) : Isa::mul(x, by);
#endif
      if (a.replaces) x = Isa::keep(u32(kept >> n), x, fill);
    }
    x = Isa::keep(u32(word >> n), x, lowest);
    Isa::store(s + n, x);
    top = Isa::max(x, top);
  }
  return top;
}

// The same for rows that keep all keys of a panel, where contiguous biases are all there is to do.
ATTN_INLINE void add_biases(const Args& a, float scale, const Row* rows, i64 count, i64 key, i64 there, float* s, i64 ld, vec* top) {
  for_bias_type(a, [&](auto type) ATTN_LAMBDA {
    using B = decltype(type);
    const vec by = Isa::set1(scale);
    for (i64 r = 0; r < count; ++r) {
      const auto* p = static_cast<const typename B::st*>(rows[r].bias) + key;
      float* at = s + r * ld;
      vec largest = top[r];
#pragma GCC unroll 4
      for (i64 n = 0; n < there; n += W) {
        const vec x = Isa::fma(Isa::load(at + n), by, B::widen(p + n));
        Isa::store(at + n, x);
        largest = Isa::max(x, largest);
      }
      top[r] = largest;
    }
  });
}

// ---- the first keys of a panel for MR rows: scores into s (rows of `ld`), the largest of each row into `top`
template <bool PAIR, int MR, int NR, class Next>
ATTN_ONCE void score_panel(const i32* q, i64 ldq, i64 columns, const i32* keys, i64 there, bool done, float* s, i64 ld, vec* top, Next& following) {
  Next next = following;
#pragma GCC unroll 1
  for (int at = 0; at < there; at += NR * W) {
    vec c[MR][NR];
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) c[m][n] = Isa::zero();
    multiply<PAIR, MR, NR>(q, ldq, keys + at, PANEL, columns, c, next);
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) Isa::store(s + m * ld + at + n * W, c[m][n]);
      if (done) {
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) top[m] = Isa::max(c[m][n], top[m]);
      }
    }
  }
  following = next;
}
// The same for as many rows as a strip has.
template <class T, class Next>
ATTN_INLINE void score_strip(const i32* q, i64 ldq, i64 columns, const i32* keys, i64 there, i64 count, bool done, float* s, i64 ld, vec* top, Next& next) {
#if ATTN_TILES
  if constexpr (T::TILES) {
    score_tiles(q, ldq, keys, PANEL, there, s, ld);
    for (i64 r = 0; r < count && done; ++r) {
      vec first = top[r], second = Isa::load(s + r * ld);
      for (i64 n = 0; n < there; n += 2 * W) {
        first = Isa::max(Isa::load(s + r * ld + n), first);
        second = Isa::max(Isa::load(s + r * ld + n + W), second);
      }
      top[r] = Isa::max(first, second);
    }
    return;
  }
#endif
  for_rows(count, [&](auto MR) ATTN_LAMBDA {
    if (there > HALF * W) score_panel<T::PAIR, MR, Isa::NR>(q, ldq, columns, keys, there, done, s, ld, top, next);
    else score_panel<T::PAIR, MR, HALF>(q, ldq, columns, keys, there, done, s, ld, top, next);
  });
}
template <class T, class Next>
ATTN_INLINE void score_rows(const Args& a, const Scale& scale, const i32* q, i64 ldq, i64 columns, const i32* keys, i64 key, i64 there,
                            const Row* rows, i64 count, const u64* words, bool full, float* s, i64 ld, vec* top, Next& next) {
  const bool done = full && scale.as_they_are;
  score_strip<T>(q, ldq, columns, keys, there, count, done, s, ld, top, next);
  if (done) return;
  if (full && a.bias.data && a.bias.stride[3] == 1 && key + there <= a.S && !a.has_score && !a.replaces)
    return add_biases(a, scale.before, rows, count, key, there, s, ld, top);
  for (i64 r = 0; r < count; ++r) top[r] = finish_row(a, scale, rows[r], full ? ~u64(0) : words[r], key, there, s + r * ld, top[r]);
}

// Scores -> weights in columns, in place from the row's first column on; their sum is added to `sum`. Those that are not
// in `left` are 0 then.
template <class T, bool DROPS> ATTN_INLINE vec weigh(const float* s, i32* p, i64 there, float factor, float taken, u64 left, vec sum) {
  // Taken off first: multiplied, the lowest numbers that masks are made of are infinite.
  const vec by = Isa::set1(factor), off = Isa::set1(-taken);
#pragma GCC unroll 4
  for (int i = 0; i < there; i += 2 * W) {
    vec e0 = weight_of<T>(Isa::mul(Isa::add(Isa::load(s + i), off), by));
    vec e1 = weight_of<T>(Isa::mul(Isa::add(Isa::load(s + i + W), off), by));
    sum = Isa::add(sum, Isa::add(e0, e1));
    if constexpr (DROPS) e0 = Isa::keep(u32(left >> i), e0, Isa::zero()), e1 = Isa::keep(u32(left >> (i + W)), e1, Isa::zero());
    if constexpr (T::PAIR) {
      Isa::store_pairs(p + i / 2, e0, e1);
    } else {
      Isa::store(reinterpret_cast<float*>(p) + i, e0);
      Isa::store(reinterpret_cast<float*>(p) + i + W, e1);
    }
  }
  return sum;
}

// A row's running maximum (of scores before their factor) and sum of exponentials.
struct Running {
  float top, sum;
};
// Takes a larger maximum in: what was summed is made smaller. Returns what is to be taken off the row's scores.
ATTN_INLINE float rescale(Running& r, float top, float factor, float* o, i64 ld) {
  const float lowest = -std::numeric_limits<float>::infinity(), m = top > r.top || top != top ? top : r.top;
  if (m != r.top) {
    const float by = r.top == lowest ? 0.0f : std::exp2((r.top - m) * factor);
    r.sum *= by;
    const vec v = Isa::set1(by);
    for (i64 d = 0; d < ld; d += W) Isa::store(o + d, Isa::mul(v, Isa::load(o + d)));
    r.top = m;
  }
  return m == lowest ? 0.0f : m;
}

// Weights times values where some value is no number: row by row, kept keys alone.
template <class T>
void add_kept(const i32* p, u64 word, const i32* values, i64 ld, i64 dim, float* o) {
  for (; word; word &= word - 1) {
    const int k = __builtin_ctzll(word);
    float by;
    if constexpr (T::PAIR) by = from_bf16(reinterpret_cast<const u16*>(p)[k]);
    else std::memcpy(&by, p + k, 4);
    for (i64 d = 0; d < dim; ++d) {
      float x;
      if constexpr (T::PAIR) x = from_bf16(reinterpret_cast<const u16*>(values + k / 2 * ld + d)[k % 2]);
      else std::memcpy(&x, values + k * ld + d, 4);
      o[d] += by * x;
    }
  }
}

// Strips of rows, times NR vectors of value columns. The products of these panels are summed before they are added to the
// row's: over all keys in one chain the roundings would add up.
template <bool PAIR, int MR, int NR, class Next>
ATTN_ONCE void add_columns(const i32* p, i64 ldp, u32 active, const i32* const* values, const i64* counts, i64 ldv, float* o, i64 ldo, Next& following) {
  Next next = following;
  vec c[MR][NR];
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) c[m][n] = Isa::zero();
  for (u32 x = active; x; x &= x - 1) {
    const int panel = __builtin_ctz(x);
    multiply<PAIR, MR, NR>(p + panel * PANEL, ldp, values[panel], ldv, counts[panel], c, next);
  }
  following = next;
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) Isa::store(o + m * ldo + n * W, Isa::add(Isa::load(o + m * ldo + n * W), c[m][n]));
}

// The natural logarithm of the sum of a row's exponentials; -inf where no key is kept.
inline float log_of_sum(Running r, float factor) {
  const float infinite = std::numeric_limits<float>::infinity();
  if (r.top == infinite) return infinite;
  return r.sum == 0 ? -infinite : r.top * (factor * LN2) + std::log(r.sum);
}

// The result of a row: what was summed, over the sum of the weights, a sink's among them, times dropout's factor. Fully
// masked rows of a KV head have one mean: `mean_row` is where it was written, once it was.
template <class T>
void write_row(const Args& a, i64 b, i64 h, i64 i, Running r, float factor, float of_left, const float* o, const typename T::st** mean_row) {
  using st = typename T::st;
  if (a.lse) a.lse[(b * a.H + h) * a.rows + i] = log_of_sum(r, factor);
  if (!a.out && !a.statistics) return;
  float share = 1.0f;  // of the sum's own unit in the unit that a larger sink makes
  if (a.sink.data) {
    const i64* s = a.sink.stride;
    const float sink = static_cast<const float*>(a.sink.data)[b * s[0] + h * s[1] + i * s[2]] / (factor * LN2);
    const float top = sink > r.top || sink != sink ? sink : r.top;
    share = r.sum > 0 || r.sum != r.sum ? std::exp2((r.top - top) * factor) : 0.0f;
    r.sum = r.sum * share + (top == -INFINITY ? 0.0f : std::exp2((sink - top) * factor));
    r.top = top;
  }
  if (a.statistics) {
    float* kept = a.statistics + ((b * a.H + h) * a.rows + i) * 2;
    kept[0] = r.top, kept[1] = r.sum;
  }
  if (!a.out) return;
  st* to = static_cast<st*>(a.out) + b * a.out_stride[0] + h * a.out_stride[1] + i * a.out_stride[2];
  const i64 stride = a.out_stride[3];
  double mean[1024];
  vec by = Isa::set1(share / r.sum * of_left);
  if (r.sum == 0) {  // fully masked
    by = Isa::set1(a.fully_masked == GIVES_NAN && a.S ? std::numeric_limits<float>::quiet_NaN() : 0.0f);
    if (a.fully_masked == GIVES_MEAN && a.S) {
      if (*mean_row) {
        for (i64 d = 0; d < a.DV; ++d) to[d * stride] = (*mean_row)[d * stride];
        return;
      }
      *mean_row = to;
      const i64 hk = h / (a.H / a.HK);
      const st* v = static_cast<const st*>(a.v.data) + b * a.v.stride[0] + hk * a.v.stride[1];
      for (i64 d0 = 0; d0 < a.DV; d0 += 1024) {
        const i64 n = std::min<i64>(1024, a.DV - d0);
        for (i64 d = 0; d < n; ++d) mean[d] = 0;
        for (i64 s = 0; s < a.S; ++s)
          for (i64 d = 0; d < n; ++d) mean[d] += T::one(v[s * a.v.stride[2] + (d0 + d) * a.v.stride[3]]);
        for (i64 d = 0; d < n; ++d) {
          st part[W];
          T::narrow(part, Isa::set1(float(mean[d] / double(a.S))));
          to[(d0 + d) * stride] = part[0];
        }
      }
      return;
    }
  }
  st* rest = a.rest ? static_cast<st*>(a.rest) + (to - static_cast<st*>(a.out)) : nullptr;
  for (i64 d = 0; d < a.DV; d += W) {
    const vec x = Isa::mul(by, Isa::load(o + d));
    if (a.rest) {
      st part[W];
      T::narrow(part, x);
      T::narrow(part, Isa::add(x, Isa::mul(T::widen(part), Isa::set1(-1.0f))));
      for (i64 j = 0; j < std::min<i64>(W, a.DV - d); ++j) rest[(d + j) * stride] = part[j];
    }
    if (stride == 1) {
      narrow_some<T>(to + d, x, a.DV - d);
    } else {
      st part[W];
      T::narrow(part, x);
      for (i64 j = 0; j < std::min<i64>(W, a.DV - d); ++j) to[(d + j) * stride] = part[j];
    }
  }
}

template <bool PAIR, int MR, class Next>
ATTN_INLINE void add_values(const i32* p, i64 ldp, u32 active, const i32* const* values, const i64* counts, i64 ldv, float* o, i64 ldo, i64 dim, Next& next) {
  const i32* at[8];
  for_columns(dim, [&](auto NR, i64 d) ATTN_LAMBDA {
    for (u32 x = active; x; x &= x - 1) at[__builtin_ctz(x)] = values[__builtin_ctz(x)] + d;
    add_columns<PAIR, MR, NR>(p, ldp, active, at, counts, ldv, o + d, ldo, next);
  });
}
