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

// The same where rows keep some keys of it, or the last keys are not there.
ATTN_ONCE void add_kept_biases(const Args& a, float scale, const Row* rows, i64 count, const u64* words, bool full, i64 key, i64 there, float* s, i64 ld, vec* top) {
  for_bias_type(a, [&](auto type) ATTN_LAMBDA {
    using B = decltype(type);
    const vec by = Isa::set1(scale), lowest = Isa::set1(-std::numeric_limits<float>::infinity());
    for (i64 r = 0; r < count; ++r) {
      const auto* p = static_cast<const typename B::st*>(rows[r].bias) + key;
      const u64 word = full ? ~u64(0) : words[r];
      float* at = s + r * ld;
      vec largest = top[r];
      for (i64 n = 0; n < there; n += W) {
        const vec x = Isa::keep(u32(word >> n), Isa::fma(Isa::load(at + n), by, some_biases<B>(p + n, a.S - key - n)), lowest);
        Isa::store(at + n, x);
        largest = Isa::max(x, largest);
      }
      top[r] = largest;
    }
  });
}

// ---- the first keys of a panel for MR rows: scores into s (rows of `ld`), -inf where `words` are given and do not have a
// key, and the largest of each row into `top`, where scores are done then
template <bool PAIR, int MR, int NR, class Next>
ATTN_ONCE void score_panel(const i32* q, i64 ldq, i64 columns, const i32* keys, i64 there, bool done, const u64* words, float* s, i64 ld, vec* top, Next& following) {
  const vec lowest = Isa::set1(-std::numeric_limits<float>::infinity());
  Next next = following;
#pragma GCC unroll 1
  for (int at = 0; at < there; at += NR * W) {
    ProductSums<MR, NR> sums;
    sums.template multiply<PAIR>(q, ldq, keys + at, PANEL, columns, next);
    auto& c = sums.whole;
    if (words) {
#pragma GCC unroll 6
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) c[m][n] = Isa::keep(u32(words[m] >> (at + n * W)), c[m][n], lowest);
    }
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
ATTN_INLINE void score_strip(const i32* q, i64 ldq, i64 columns, const i32* keys, i64 there, i64 count, bool done, const u64* words, float* s, i64 ld, vec* top, Next& next) {
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
    const auto of_width = [&](auto NR) ATTN_LAMBDA { score_panel<T::PAIR, MR, NR>(q, ldq, columns, keys, there, done, words, s, ld, top, next); };
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
  const bool done = scale.as_they_are && (full || !T::TILES);
  score_strip<T>(q, ldq, columns, keys, there, count, done, done && !full ? words : nullptr, s, ld, top, next);
  if (done) return;
  const bool biased_only = a.bias.data && !a.lookups[0].data && !a.has_score && !a.replaces;
  if (biased_only && a.bias.stride[3] == 1) {
    if (full && key + there <= a.S) return add_biases(a, scale.before, rows, count, key, there, s, ld, top);
    return add_kept_biases(a, scale.before, rows, count, words, full, key, there, s, ld, top);
  }
  for (i64 r = 0; r < count; ++r) top[r] = finish_row(a, scale, rows[r], full ? ~u64(0) : words[r], key, there, s + r * ld, top[r]);
}

// Scores -> weights in columns, in place; their sum is added to `sum`. Those that are not in `left` are 0 then.
template <class T, bool DROPS> ATTN_INLINE vec weigh(const float* s, i32* p, i64 there, float factor, float taken, u64 left, vec sum) {
  // Taken off first: multiplied, the lowest numbers that masks are made of are infinite.
  const vec by = Isa::set1(factor), off = Isa::set1(-taken);
  const auto weight = [&](i64 i) ATTN_LAMBDA { return weight_of<T>(Isa::mul(Isa::add(Isa::load(s + i), off), by)); };
  const auto dropped = [&](i64 i, vec e) ATTN_LAMBDA { return DROPS ? Isa::keep(u32(left >> i), e, Isa::zero()) : e; };
  const auto write = [&](i64 i, vec e0, vec e1) ATTN_LAMBDA {
    if constexpr (T::PAIR) {
      Isa::store_pairs(p + i / 2, e0, e1);
    } else {
      Isa::store(reinterpret_cast<float*>(p) + i, e0);
      Isa::store(reinterpret_cast<float*>(p) + i + W, e1);
    }
  };
  i64 i = 0;
#pragma GCC unroll 4
  for (; i + W < there; i += 2 * W) {
    const vec e0 = weight(i), e1 = weight(i + W);
    sum = Isa::add(sum, Isa::add(e0, e1));
    write(i, dropped(i, e0), dropped(i + W, e1));
  }
  if (i < there) {
    const vec e = weight(i);
    sum = Isa::add(sum, e);
    write(i, dropped(i, e), Isa::zero());
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
ATTN_INLINE RunningLanes nothing_yet() { return {Isa::set1(-std::numeric_limits<float>::infinity()), Isa::zero()}; }
ATTN_INLINE void give(const RunningLanes& lanes, Running* rows, i64 count) {
  float tops[W], sums[W];
  Isa::store(tops, lanes.top), Isa::store(sums, lanes.sum);
  for (i64 i = 0; i < count; ++i) rows[i] = {tops[i], sums[i]};
}
// Takes larger maxima in. Returns of which rows what was summed is to be made smaller, as the sum here is, by `by`, which is
// 1 for others; rows whose first keys these are have summed nothing.
ATTN_INLINE u32 raise(RunningLanes& r, vec top, float factor, vec& by) {
  const vec old = r.top;
  r.top = Isa::keep(Isa::differ(old, old), old, Isa::max(old, top));
  const u32 changed = Isa::differ(r.top, old), later = Isa::differ(old, Isa::set1(-std::numeric_limits<float>::infinity()));
  if (!(changed & later)) return 0;
  by = Isa::keep(changed & later, exp2_of<5>(Isa::mul(Isa::sub(old, r.top), Isa::set1(factor))), Isa::set1(1.0f));
  r.sum = Isa::mul(r.sum, by);
  return changed & later;
}
// What is to be taken off the scores of each row.
ATTN_INLINE vec taken_off(const RunningLanes& r) {
  return Isa::keep(Isa::differ(r.top, Isa::set1(-std::numeric_limits<float>::infinity())), r.top, Isa::zero());
}

// The running numbers of the rows of a strip.
template <int ROWS_THERE> struct RunningStrip {
  static constexpr int N = ROWS_THERE < W ? ROWS_THERE : W, PARTS = (ROWS_THERE + N - 1) / N;
  RunningLanes part[PARTS];
  RunningStrip() {
    for (RunningLanes& each : part) each = nothing_yet();
  }
  // `rescale` for `rows` rows, whose largest scores are in `tops`; what is to be taken off their scores goes to `off`.
  ATTN_METHOD void rescale(const vec* tops, i64 rows, float factor, float* o, i64 ld, float* off) {
#pragma GCC unroll 2
    for (int x = 0; x < PARTS; ++x) {
      vec by;
      u32 changed = raise(part[x], maxima_of<N>(tops + x * W), factor, by);
      Isa::store(off + x * W, taken_off(part[x]));
      if (!changed) continue;
      float each[W];
      Isa::store(each, by);
      for (i64 r = x * W; r < std::min<i64>(rows, (x + 1) * W); ++r) {
        if (!(changed >> (r - x * W) & 1)) continue;
        const vec smaller = Isa::set1(each[r - x * W]);
        for (i64 d = 0; d < ld; d += W) Isa::store(o + r * ld + d, Isa::mul(smaller, Isa::load(o + r * ld + d)));
      }
    }
  }
  ATTN_METHOD void add(const vec* sums) {
#pragma GCC unroll 2
    for (int x = 0; x < PARTS; ++x) part[x].sum = Isa::add(part[x].sum, sums_of<N>(sums + x * W));
  }
  void give_to(Running* rows, i64 count) const {
    for (int x = 0; x < PARTS; ++x) give(part[x], rows + x * W, std::min<i64>(W, count - x * W));
  }
};

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

// Columns of a strip's weights, and the rows of values that they are multiplied with.
struct Part {
  const i32 *weights, *values;
  i64 count;
};
// Strips of rows, times NR vectors of value columns from d on, and half a one. The products of these parts are summed before
// they are added to the row's: over all keys in one chain the roundings would add up.
template <bool PAIR, int MR, int NR, bool HALF, class Next>
ATTN_ONCE void add_columns(const Part* parts, i64 n_parts, i64 ldp, i64 ldv, i64 d, float* o, i64 ldo, Next& following) {
  Next next = following;
  using Last = typename ProductSums<MR, NR, HALF>::Last;
  ProductSums<MR, NR, HALF> c;
  for (const Part* part = parts; part != parts + n_parts; ++part) c.template multiply<PAIR>(part->weights, ldp, part->values + d, ldv, part->count, next);
  following = next;
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m) {
    float* at = o + m * ldo + d;
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) Isa::store(at + n * W, Isa::add(Isa::load(at + n * W), c.whole[m][n]));
    if constexpr (HALF) Last::store(at + NR * W, Last::add(Last::load(at + NR * W), c.half[m]));
  }
}

// The natural logarithm of the sum of a row's exponentials; -inf where no key is kept.
inline float log_of_sum(Running r, float factor) {
  const float infinite = std::numeric_limits<float>::infinity();
  if (r.top == infinite) return infinite;
  return r.sum == 0 ? -infinite : r.top * (factor * LN2) + std::log(r.sum);
}

// The mean of all values of a KV head, which a fully masked row may become.
template <class T> ATTN_ONCE void write_mean(const Args& a, i64 b, i64 hk, typename T::st* to) {
  const auto* v = static_cast<const typename T::st*>(a.v.data) + b * a.v.stride[0] + hk * a.v.stride[1];
  double mean[1024];
  for (i64 d0 = 0; d0 < a.DV; d0 += 1024) {
    const i64 n = std::min<i64>(1024, a.DV - d0);
    for (i64 d = 0; d < n; ++d) mean[d] = 0;
    for (i64 s = 0; s < a.S; ++s)
      for (i64 d = 0; d < n; ++d) mean[d] += T::one(v[s * a.v.stride[2] + (d0 + d) * a.v.stride[3]]);
    for (i64 d = 0; d < n; ++d) {
      typename T::st part[W];
      T::narrow(part, Isa::set1(float(mean[d] / double(a.S))));
      to[(d0 + d) * a.out_stride[3]] = part[0];
    }
  }
}
// A row's numbers, all times one, in the type of the result; what rounding takes from them goes to `rest`, if that is wanted.
template <class T> ATTN_ONCE void write_apart(const Args& a, const float* o, vec by, typename T::st* to, typename T::st* rest) {
  const i64 stride = a.out_stride[3];
  for (i64 d = 0; d < a.DV; d += W) {
    const vec x = Isa::mul(by, Isa::load(o + d));
    const i64 n = std::min<i64>(W, a.DV - d);
    typename T::st part[W], lost[W];
    T::narrow(part, x);
    if (rest) T::narrow(lost, Isa::add(x, Isa::mul(T::widen(part), Isa::set1(-1.0f))));
    for (i64 j = 0; j < n; ++j) to[(d + j) * stride] = part[j];
    for (i64 j = 0; j < n && rest; ++j) rest[(d + j) * stride] = lost[j];
  }
}
// Takes a sink into a row's numbers. Returns the share of the sum's own unit in the unit that a larger sink makes.
ATTN_ONCE float take_sink(const Args& a, i64 b, i64 h, i64 i, Running& r, float factor) {
  const i64* s = a.sink.stride;
  const float sink = static_cast<const float*>(a.sink.data)[b * s[0] + h * s[1] + i * s[2]] / (factor * LN2);
  const float top = sink > r.top || sink != sink ? sink : r.top;
  const float share = r.sum > 0 || r.sum != r.sum ? std::exp2((r.top - top) * factor) : 0.0f;
  r.sum = r.sum * share + (top == -INFINITY ? 0.0f : std::exp2((sink - top) * factor));
  r.top = top;
  return share;
}

// The result of a row: what was summed, over the sum of the weights, a sink's among them, times dropout's factor. Fully
// masked rows of a KV head have one mean: `mean_row` is where it was written, once it was.
template <class T>
ATTN_INLINE void write_row(const Args& a, i64 b, i64 h, i64 i, Running r, float factor, float of_left, const float* o, const typename T::st** mean_row) {
  using st = typename T::st;
  if (a.lse) a.lse[(b * a.H + h) * a.rows + i] = log_of_sum(r, factor);
  if (!a.out && !a.statistics) return;
  const float share = a.sink.data ? take_sink(a, b, h, i, r, factor) : 1.0f;
  if (a.statistics) {
    float* kept = a.statistics + ((b * a.H + h) * a.rows + i) * 2;
    kept[0] = r.top, kept[1] = r.sum;
  }
  if (!a.out) return;
  const i64 at = b * a.out_stride[0] + h * a.out_stride[1] + i * a.out_stride[2], stride = a.out_stride[3];
  st* to = static_cast<st*>(a.out) + at;
  vec by = Isa::set1(share / r.sum * of_left);
  if (r.sum == 0) {  // fully masked
    by = Isa::set1(a.fully_masked == GIVES_NAN && a.S ? std::numeric_limits<float>::quiet_NaN() : 0.0f);
    if (a.fully_masked == GIVES_MEAN && a.S) {
      if (!*mean_row) write_mean<T>(a, b, h / (a.H / a.HK), to);
      for (i64 d = 0; d < a.DV && *mean_row; ++d) to[d * stride] = (*mean_row)[d * stride];
      if (!*mean_row) *mean_row = to;
      return;
    }
  }
  if (a.rest || stride != 1) return write_apart<T>(a, o, by, to, a.rest ? static_cast<st*>(a.rest) + at : nullptr);
  for (i64 d = 0; d < a.DV; d += W) narrow_some<T>(to + d, Isa::mul(by, Isa::load(o + d)), a.DV - d);
}

template <bool PAIR, int MR, class Next>
ATTN_INLINE void add_values(const Part* parts, i64 n_parts, i64 ldp, i64 ldv, float* o, i64 ldo, i64 dim, Next& next) {
  constexpr bool HALVES = !std::is_void_v<Isa::Half>;
  const i64 rest = dim % W;
  const bool half = HALVES && rest && rest <= W / 2;
  const i64 whole = half ? dim / W : blocks_of(dim, W);
  const auto add = [&](auto NR, auto HALF, i64 x) ATTN_LAMBDA { add_columns<PAIR, MR, NR, HALF>(parts, n_parts, ldp, ldv, x * W, o, ldo, next); };
  // A half alone leaves the processor waiting for its sums: it goes beside what is before it, if there are registers.
  const i64 last = half && whole % 4 ? (whole % 2 ? 1 : 2) : 0;
  i64 x = 0;
  for (; Isa::NR >= 4 && x + 4 <= whole - last; x += 4) add(Number<4>{}, Number<false>{}, x);
  for (; x + 2 <= whole - last; x += 2) add(Number<2>{}, Number<false>{}, x);
  for (; x < whole - last; ++x) add(Number<1>{}, Number<false>{}, x);
  if constexpr (HALVES) {
    if (half && last == 2) add(Number<2>{}, Number<true>{}, x);
    if (half && last == 1) add(Number<1>{}, Number<true>{}, x);
    if (half && !last) add(Number<0>{}, Number<true>{}, x);
  }
}
