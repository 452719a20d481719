// Columns of 32 bits, in which everything is computed: a float, or a pair of bfloat16 where the instruction set multiplies
// them as they are. What the three types are, exponentials, what is read ahead, and the micro-kernel.
using vec = Isa::vec;
constexpr int W = Isa::W, PANEL = 64;  // keys of a panel, one bit of a word each
constexpr int WIDE = Isa::NR * W;      // columns of the micro-kernel
constexpr bool ANY_WIDTH = WIDE >= PANEL;  // whether it takes a panel at once, or as many vectors of its keys as are needed

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
  t = Isa::within_exp2(t);
  const vec n = Isa::round(t), f = Isa::sub(t, n);
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

// ---- sums of MR rows: NR vectors of columns, and with HALF one of half as many behind them
template <bool PAIR, class V = Isa, class X> ATTN_INLINE X plus_product(X c, X x, X y) {
  if constexpr (PAIR) return V::dot(c, x, y);
  else return V::fma(x, y, c);
}
template <int MR, int NR, bool HALF = false> struct ProductSums {
  using Last = std::conditional_t<HALF, Isa::Half, Isa>;
  vec whole[MR][NR ? NR : 1];
  typename Last::vec half[MR];
  ATTN_METHOD ProductSums() {
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) whole[m][n] = Isa::zero();
      if constexpr (HALF) half[m] = Last::zero();
    }
  }
  // += A (MR rows of columns) times B (K rows of columns).
  template <bool PAIR, class Next> ATTN_METHOD void multiply(const i32* A, i64 lda, const i32* B, i64 ldb, i64 K, Next& next) {
    for (i64 k = 0; k < K; ++k) {
      next.step();
      vec b[NR ? NR : 1];
      typename Last::vec last;
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) b[n] = Isa::load_bits(B + k * ldb + n * W);
      if constexpr (HALF) last = Last::load_bits(B + k * ldb + NR * W);
#pragma GCC unroll 6
      for (int m = 0; m < MR; ++m) {
        if constexpr (NR > 0) {
          const vec x = Isa::splat_bits(A + m * lda + k);
#pragma GCC unroll 4
          for (int n = 0; n < NR; ++n) whole[m][n] = plus_product<PAIR>(whole[m][n], x, b[n]);
          if constexpr (HALF) half[m] = plus_product<PAIR, Last>(half[m], Last::first_of(x), last);
        } else {
          half[m] = plus_product<PAIR, Last>(half[m], Last::splat_bits(A + m * lda + k), last);
        }
      }
    }
  }
};

// Lane i: the sum of x[i], or the largest; of N rows.
template <int N> ATTN_INLINE vec sums_of(const vec* x) {
  return Isa::joined<N>(x, [](vec a, vec b) ATTN_LAMBDA { return Isa::add(a, b); });
}
template <int N> ATTN_INLINE vec maxima_of(const vec* x) {
  return Isa::joined<N>(x, [](vec a, vec b) ATTN_LAMBDA { return Isa::max(a, b); });
}
