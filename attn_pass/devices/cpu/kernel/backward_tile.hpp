// What the backward does with a tile of a block of rows and a panel of keys: weights as the forward had them, gradients
// of the scores, and products with a transposed tile.
constexpr i64 BACK_ROWS = 96, BACK_STRIPS = BACK_ROWS / 6;
constexpr i64 LDT = PANEL + W;  // from row to row of a tile: not a multiple of what makes lines share a place in the cache

// What the forward left of a row, and delta: the sum of the result times its gradient.
struct Left {
  float top, share, delta;  // share: 1 over the sum of exponentials, 0 where no key is kept
};

// Where the gradient of a bias, or of what a score function captures, is summed up; null where it is not wanted. Of a bias
// by distance that is one vector for all rows, in which every row begins one element before the row above it.
struct Sums {
  void* data;
  i64 stride[4];
  bool fresh;  // what is there is none of it: nobody cleared it
  i32 type;    // of what is there: float32, but where each element is written once
  char* row(const Row& r, i64 key) const {
    return static_cast<char*>(data) + (r.b * stride[0] + r.h * stride[1] + r.i * stride[2] + key) * (type == FLOAT32 ? 4 : 2);
  }
  bool is_matrix() const { return data && stride[2] > 0 && stride[3]; }
};

struct Gradients {
  Scale scale;
  Dropout dropout;
  bool any_fresh;
  Sums sums[1 + CAPTURED];
};

// ---- o[MR][NR] += the transpose of MR columns of A (rows `step` apart) times B
template <bool PAIR, int MR, int NR>
ATTN_ONCE void add_transposed(const i32* A, i64 step, const i32* B, i64 ldb, i64 K, float* o, i64 ldo) {
  vec c[MR][NR];
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) c[m][n] = Isa::zero();
  for (i64 k = 0; k < K; ++k) {
    vec b[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) b[n] = Isa::load_bits(B + k * ldb + n * W);
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m) {
      const vec x = Isa::splat_bits(A + k * step + m);
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) c[m][n] = plus_product<PAIR>(c[m][n], x, b[n]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) Isa::store(o + m * ldo + n * W, Isa::add(Isa::load(o + m * ldo + n * W), c[m][n]));
}
// o[keys][dim] += the transpose of A's first columns times B, of which there are K rows.
template <bool PAIR> ATTN_INLINE void add_all_transposed(const i32* A, i64 step, const i32* B, i64 ld, i64 K, float* o, i64 keys, i64 dim) {
  for (i64 k = 0; k < keys; k += 6)
    for_rows(keys - k, [&](auto MR) ATTN_LAMBDA {
      for_columns(dim, [&](auto NR, i64 d) ATTN_LAMBDA { add_transposed<PAIR, decltype(MR)::value, NR>(A + k, step, B + d, ld, K, o + k * ld + d, ld); });
    });
}

// W gradients of a row from key on, added where they belong; `total` collects those of one number for all keys.
ATTN_INLINE void add_up(const Sums& to, const Row& row, i64 key, i64 n, vec x, vec& total) {
  if (to.stride[3] == 0) {
    total = Isa::add(total, x);
    return;
  }
  if (to.type != FLOAT32) {
    u16* half = reinterpret_cast<u16*>(to.row(row, key));
    if (n > 0 && to.type == BFLOAT16) narrow_some<BF16>(half, x, n);
    else if (n > 0) narrow_some<F16>(half, x, n);
    return;
  }
  float* p = reinterpret_cast<float*>(to.row(row, key));
  if (n >= W) return Isa::store(p, to.fresh ? x : Isa::add(Isa::load(p), x));
  float part[W];
  Isa::store(part, x);
  for (i64 i = 0; i < n; ++i) p[i] = to.fresh ? part[i] : p[i] + part[i];
}
// Clears a row of a tile whose gradients are 0, where nobody did.
ATTN_INLINE void clear_row(const Gradients& j, const Row& row, i64 key, i64 end) {
  for (const Sums& to : j.sums)
    if (to.data && to.fresh) std::memset(to.row(row, key), 0, size_t(to.row(row, end) - to.row(row, key)));
}
ATTN_INLINE void add_total(const Sums& to, const Row& row, vec total) {
  if (to.data && to.stride[3] == 0)
    *reinterpret_cast<float*>(to.row(row, 0)) += Isa::reduce_add(total);
}

// What rows of a tile read and write beside products, fetched meanwhile: rows are too far apart for the processor to see it.
ATTN_INLINE void fetch_row(const Args& a, const Gradients& j, const Row& row, i64 key, i64 there) {
  if (row.bias && a.bias.stride[2] && a.bias.stride[3] == 1) {
    const i64 size = a.bias_type == FLOAT32 ? 4 : 2;
    const char* p = static_cast<const char*>(row.bias) + key * size;
    for (i64 byte = 0; byte < there * size; byte += 64) __builtin_prefetch(p + byte, 0, 2);
  }
  const Sums& to = j.sums[0];
  if (!to.is_matrix()) return;
  const char* p = to.row(row, key);
  for (i64 byte = 0; byte < to.row(row, key + there) - p; byte += 64) __builtin_prefetch(p + byte, 1, 2);
}

// A row of a tile: products `s` become weights, and gradients of the weights `g` those of the products. Where the tile is
// all of the row (WHOLE), delta is summed up from the very numbers it is taken off: what adds up to nothing does so.
template <class T, bool WHOLE>
ATTN_ONCE void weigh_back(const Args& a, const Gradients& j, const Row& row, const Left& left, u64 word, i64 key, i64 there, float* s, float* g) {
  const vec by = Isa::set1(j.scale.before), factor = Isa::set1(j.scale.factor), top = Isa::set1(-left.top);
  const vec share = Isa::set1(left.share), zero = Isa::zero();
  const vec of_left = Isa::set1(j.dropout.factor), fill = Isa::set1(a.fill);
  const u64 drawn = a.seed ? left_word(j.dropout, a.first_head + row.b * a.H + row.h, row.i, key) : ~u64(0);
  const u64 kept = a.replaces ? word & kept_by_tensor(a, row, key) : word;
  const u64 passing = a.replaces == 2 ? word : kept;  // a score that was replaced passes no gradient on
  vec delta = Isa::set1(-left.delta), total = zero;
#ifdef ATTN_SCORE
  vec totals[CAPTURED];
  for (int c = 0; c < CAPTURED; ++c) totals[c] = zero;
#endif
  const auto weigh = [&](int n, vec x) __attribute__((always_inline)) {
#ifdef ATTN_SCORE
    x = Isa::mul(x, by);
    vec score = ATTN_SCORE;
    if (row.bias) score = Isa::add(score, bias_at(a, row, key + n, a.S - key - n));
#else
    vec score = row.bias ? Isa::fma(x, by, bias_at(a, row, key + n, a.S - key - n)) : Isa::mul(x, by);
#endif
    if (a.replaces) score = Isa::keep(u32(kept >> n), score, fill);
    const vec e = exp2_of<T::DEGREE>(Isa::mul(Isa::add(score, top), factor));
    return Isa::keep(u32(word >> n), Isa::mul(e, share), zero);
  };
  const auto drop = [&](int n, vec x) __attribute__((always_inline)) { return a.seed ? Isa::keep(u32(drawn >> n), Isa::mul(x, of_left), zero) : x; };
  vec weights[PANEL / W];
  if constexpr (WHOLE) {
    vec sum = zero;
    for (int n = 0; n < there; n += W) {
      weights[n / W] = weigh(n, Isa::load(s + n));
      sum = Isa::add(sum, Isa::keep(u32(word >> n), Isa::mul(weights[n / W], drop(n, Isa::load(g + n))), zero));
    }
    delta = Isa::add(delta, Isa::set1(-Isa::reduce_add(sum)));
  }
  for (int n = 0; n < there; n += W) {
    vec x = Isa::load(s + n), weight;
    if constexpr (WHOLE) weight = weights[n / W];
    else weight = weigh(n, x);
    const u32 bits = u32(passing >> n);
    vec gradient = Isa::keep(bits, Isa::mul(weight, Isa::add(drop(n, Isa::load(g + n)), delta)), zero);
    Isa::store(s + n, drop(n, weight));
    if (j.sums[0].data) add_up(j.sums[0], row, key + n, a.S - key - n, gradient, total);
#ifdef ATTN_SCORE
    x = Isa::mul(x, by);
#define ATTN_CALL(which, slope) \
  if (j.sums[1 + which].data) add_up(j.sums[1 + which], row, key + n, a.S - key - n, Isa::keep(bits, slope, zero), totals[which]);
    ATTN_SLOPES(ATTN_CALL)
#undef ATTN_CALL
    gradient = Isa::keep(bits, ATTN_SLOPE, zero);
#endif
    Isa::store(g + n, gradient);
  }
  add_total(j.sums[0], row, total);
#ifdef ATTN_SCORE
  for (int c = 0; c < CAPTURED; ++c) add_total(j.sums[1 + c], row, totals[c]);
#endif
}

// ---- rows of a tile in bfloat16: as pairs of columns, and as pairs of rows
template <class T> ATTN_INLINE void as_pairs(const float* from, i64 there, i32* to) {
  for (i64 n = 0; n < there; n += 2 * W) Isa::store_pairs(to + n / 2, Isa::load(from + n), Isa::load(from + n + W));
}
ATTN_INLINE void pair_rows(const i32* one, const i32* other, i64 there, i32* to) {
  for (i64 n = 0; n < there; n += 2 * W) {
    vec low, high;
    Isa::interleave(Isa::load_bits(one + n / 2), Isa::load_bits(other + n / 2), low, high);
    Isa::store_bits(to + n, low);
    Isa::store_bits(to + n + W, high);
  }
}

// A row in columns, as the first operand of a product takes it.
template <class T> ATTN_INLINE void in_columns(const typename T::st* from, i64 stride, i64 dim, typename T::st* room, i32* to) {
  for (i64 at = 0; at < dim; at += W * T::PER_COLUMN) {
    const i64 rest = std::min<i64>(dim - at, W * T::PER_COLUMN);
    Isa::store_bits(to + at / T::PER_COLUMN, some_columns<T>(contiguous<T>(from + at * stride, stride, rest, room), rest));
  }
}
// Floats times a factor into a row of the result's type.
template <class T> ATTN_INLINE void write_times(const float* from, float factor, void* to, i64 stride, i64 dim) {
  using st = typename T::st;
  st* out = static_cast<st*>(to);
  const vec by = Isa::set1(factor);
  for (i64 d = 0; d < dim; d += W) {
    const vec x = Isa::mul(by, Isa::load(from + d));
    if (stride == 1) {
      narrow_some<T>(out + d, x, dim - d);
      continue;
    }
    st part[W];
    T::narrow(part, x);
    for (i64 n = 0; n < std::min<i64>(W, dim - d); ++n) out[(d + n) * stride] = part[n];
  }
}
