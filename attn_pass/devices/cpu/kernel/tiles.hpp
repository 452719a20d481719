// What becomes of a tile of scores: scaled, biased, masked, made weights of, multiplied with the values, and written.
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
  if (a.bias.data || a.lookups[0].data || a.replaces || !(scale2 > 0)) return {a.scale, LOG2E, false};
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

// Scores are computed in steps of so many keys, of which the last may end behind the keys that count.
template <class T> constexpr i64 step_of_keys() { return ANY_WIDTH && !T::TILES ? W : std::max(ANY_WIDTH ? 2 : Isa::NR, 2) * W; }
static_assert(!ANY_WIDTH || PANEL == 4 * W, "`score_strip` knows four widths");
static_assert(PANEL % (std::max(ANY_WIDTH ? 2 : Isa::NR, 2) * W) == 0, "a step would leave the panel");
// Of n keys of a panel so many scores are made weights of: two vectors at a time.
ATTN_INLINE i64 whole_steps(i64 n) { return std::min<i64>(PANEL, round_up(n, 2 * W)); }

// Scores that are more than products: scaled, biased, replaced, and -inf where a key does not count. Returns the largest.
ATTN_ONCE vec finish_row(const Args& a, const Scale& scale, const Row& row, u64 word, i64 key, i64 there, float* s, vec top) {
  const vec lowest = Isa::set1(-std::numeric_limits<float>::infinity());
  const vec by = Isa::set1(scale.before), fill = Isa::set1(a.fill);
  const u64 kept = a.replaces ? kept_by_tensor(a, row, key) : 0;
  float looked_up[PANEL];
  if (a.lookups[0].data) look_up(a, row, a.replaces ? kept : word, key, looked_up);
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
      if (a.lookups[0].data) x = Isa::add(x, Isa::load(looked_up + n));
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
    const auto of_width = [&](auto NR) ATTN_LAMBDA { score_panel<T::PAIR, MR, NR>(q, ldq, columns, keys, there, done, s, ld, top, next); };
    if (!ANY_WIDTH || there == PANEL) return of_width(Number<Isa::NR>{});
    if constexpr (ANY_WIDTH) {
      if (there == W) return of_width(Number<1>{});
      if (there == 2 * W) return of_width(Number<2>{});
      of_width(Number<3>{});
    }
  });
}
template <class T, class Next>
ATTN_INLINE void score_rows(const Args& a, const Scale& scale, const i32* q, i64 ldq, i64 columns, const i32* keys, i64 key, i64 there,
                            const Row* rows, i64 count, const u64* words, bool full, float* s, i64 ld, vec* top, Next& next) {
  const bool done = full && scale.as_they_are;
  score_strip<T>(q, ldq, columns, keys, there, count, done, s, ld, top, next);
  if (done) return;
  const bool biased_only = a.bias.data && !a.lookups[0].data && !a.has_score && !a.replaces;
  if (full && biased_only && a.bias.stride[3] == 1 && key + there <= a.S)
    return add_biases(a, scale.before, rows, count, key, there, s, ld, top);
  for (i64 r = 0; r < count; ++r) top[r] = finish_row(a, scale, rows[r], full ? ~u64(0) : words[r], key, there, s + r * ld, top[r]);
}

// Scores -> weights in columns, in place; their sum is added to `sum`. Those that are not in `left` are 0 then.
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

// The same of rows in lanes. Where a vector has its rows twice, each of the two has a part of the sum.
struct RunningLanes {
  vec top, sum;
};
ATTN_INLINE void give(const RunningLanes& lanes, Running* rows, i64 count) {
  float tops[W], sums[W];
  Isa::store(tops, lanes.top), Isa::store(sums, lanes.sum);
  for (i64 i = 0; i < count; ++i) rows[i] = {tops[i], sums[i]};
}
// Takes larger maxima in. Returns whose are larger: what they summed is to be made smaller, as the sum here is, by `by`,
// which is 1 for the others.
template <class I = Isa> ATTN_INLINE u32 raise(RunningLanes& r, vec top, float factor, vec& by) {
  const vec old = r.top;
  r.top = I::keep(I::differ(old, old), old, I::max(old, top));
  const u32 changed = I::differ(r.top, old);
  if (!changed) return 0;
  const vec smaller = exp2_of<5>(I::mul(I::sub(old, r.top), I::set1(factor)));
  by = I::keep(I::differ(old, I::set1(-std::numeric_limits<float>::infinity())), smaller, I::zero());
  by = I::keep(changed, by, I::set1(1.0f));
  r.sum = I::mul(r.sum, by);
  return changed;
}
// What is to be taken off the scores of each row.
template <class I = Isa> ATTN_INLINE vec taken_off(const RunningLanes& r) {
  return I::keep(I::differ(r.top, I::set1(-std::numeric_limits<float>::infinity())), r.top, I::zero());
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
template <bool PAIR, int MR, int NR, class V = Isa, class Next>
ATTN_ONCE void add_columns(const i32* p, i64 ldp, u32 active, const i32* const* values, const i64* counts, i64 ldv, float* o, i64 ldo, Next& following) {
  Next next = following;
  typename V::vec c[MR][NR];
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) c[m][n] = V::zero();
  for (u32 x = active; x; x &= x - 1) {
    const int panel = __builtin_ctz(x);
    multiply<PAIR, MR, NR, V>(p + panel * PANEL, ldp, values[panel], ldv, counts[panel], c, next);
  }
  following = next;
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) {
      float* at = o + m * ldo + n * V::W;
      V::store(at, V::add(V::load(at), c[m][n]));
    }
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
  const auto from = [&](i64 d) ATTN_LAMBDA {
    for (u32 x = active; x; x &= x - 1) at[__builtin_ctz(x)] = values[__builtin_ctz(x)] + d;
    return at;
  };
  const i64 rest = dim % W;
  const bool half = !std::is_void_v<Isa::Half> && rest && rest <= W / 2;
  for_columns(half ? dim - rest : dim, [&](auto NR, i64 d) ATTN_LAMBDA {
    add_columns<PAIR, MR, NR>(p, ldp, active, from(d), counts, ldv, o + d, ldo, next);
  });
  if constexpr (!std::is_void_v<Isa::Half>) {
    const i64 d = dim - rest;
    if (half) add_columns<PAIR, MR, 1, Isa::Half>(p, ldp, active, from(d), counts, ldv, o + d, ldo, next);
  }
}
