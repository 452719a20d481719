// Few query rows (those of a KV head's group together): keys and values are read once, where they lie, by tasks that take
// a part of the keys each; a second pass joins the parts in order.
constexpr i64 FEW = 16;  // most rows

struct Few {
  Args a;
  Scale scale;
  Dropout dropout;
  i64 group, rows, columns, packed_columns, ldv, parts, panels_each;
  float* partial;  // (B HK parts, rows, ldv + 2); null where there is one part
  size_t at_q, at_s, at_o, at_before, at_keys, at_copies, at_room, at_words, at_lanes[5];
  Parts parts_of_task;
};

template <class T> ATTN_INLINE vec product(vec c, vec a, vec b) {
  if constexpr (T::PAIR) return Isa::dot(c, a, b);
  else return Isa::fma(a, b, c);
}

// Scores of MR rows and W / MR keys, keys as they lie: dot products, summed across lanes together; lane m W / MR + i is
// of row m and key i. All of these keys are there, or `n` of them. Lines of the keys ahead are fetched in between.
template <class T, int MR, bool ALL>
ATTN_INLINE vec dots(const i32* q, i64 ldq, const typename T::st* k, i64 stride, i64 n, i64 dim) {
  constexpr int KEYS = W / MR, STEP = W * T::PER_COLUMN, LINE = 64 / sizeof(*k);
  vec x[W], row[MR];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) x[i] = Isa::zero();
  const auto add = [&](i64 c, auto fetch, const auto& load) ATTN_LAMBDA {
#pragma GCC unroll 4
    for (int m = 0; m < MR; ++m) row[m] = Isa::load_bits(q + m * ldq + c);
    const auto* at = k + c * T::PER_COLUMN;
#pragma GCC unroll 16
    for (int i = 0; i < (ALL ? KEYS : n); ++i, at += stride) {
      if constexpr (ALL && fetch) __builtin_prefetch(at + FETCH * stride, 0, 2);
      const vec key = load(at);
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m) x[m * KEYS + i] = product<T>(x[m * KEYS + i], row[m], key);
    }
  };
  const auto all = [](const auto* at) ATTN_LAMBDA { return whole_columns<T>(at); };
  const i64 whole = dim / STEP * W;
  i64 c = 0;
  for (constexpr i64 COLUMNS = LINE / T::PER_COLUMN; c + COLUMNS <= whole; c += COLUMNS) {
    add(c, Number<1>{}, all);  // the first vector of a line fetches it
    for (i64 more = W; more < COLUMNS; more += W) add(c + more, Number<0>{}, all);
  }
  for (; c < whole; c += W) add(c, Number<1>{}, all);
  const i64 rest = dim - whole * T::PER_COLUMN;
  if (rest) add(whole, Number<1>{}, [&](const auto* at) ATTN_LAMBDA { return some_columns<T>(at, rest); });
  return sums_of<W>(x);
}
// Those of MR rows and all n keys of a panel.
template <class T, int MR>
ATTN_ONCE void all_dots(const i32* q, i64 ldq, const typename T::st* k, i64 stride, i64 n, i64 dim, float* s) {
  constexpr int KEYS = W / MR;
  const auto give = [&](i64 g, vec c) ATTN_LAMBDA {
    if constexpr (MR == 1) return Isa::store(s + g, c);
    float lanes[W];
    Isa::store(lanes, c);
    for (int m = 0; m < MR; ++m) std::memcpy(s + m * PANEL + g, lanes + m * KEYS, KEYS * sizeof(float));
  };
  i64 g = 0;
  for (; g + KEYS <= n; g += KEYS) give(g, dots<T, MR, true>(q, ldq, k + g * stride, stride, KEYS, dim));
  if (g < n) give(g, dots<T, MR, false>(q, ldq, k + g * stride, stride, n - g, dim));
}

// Rows of weights times a panel's values, as they lie; NR vectors of columns, the last perhaps not whole. Of the values
// ahead every `strips`th is fetched from `strip` on; none where that is none of them.
template <class T, int MR, int NR>
ATTN_ONCE void add_lying(const i32* p, const typename T::st* v, i64 stride, i64 n, i64 elements, i64 strip, i64 strips, float* o, i64 ldo) {
  vec c[MR][NR];
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) c[m][j] = Isa::zero();
  const bool whole = elements >= NR * W && (!T::PAIR || NR > 1);
  for (i64 k = 0, turn = 0; k < n; k += T::PER_COLUMN, turn = turn + 1 == strips ? 0 : turn + 1) {
    vec x[NR];
    const auto* at = v + k * stride;
    if (turn == strip)
      for (int i = 0; i < T::PER_COLUMN; ++i)
        for (size_t byte = 0; byte < NR * W * sizeof(*at); byte += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(at + (FETCH + i) * stride) + byte, 0, 2);
    if constexpr (T::PAIR) {
      const bool two = k + 1 < n;
#pragma GCC unroll 2
      for (int j = 0; j < NR; j += 2) {
        vec a, b = Isa::zero(), high;
        if (whole) {
          a = whole_columns<T>(at + j * W);
          if (two) b = whole_columns<T>(at + stride + j * W);
        } else {
          a = some_columns<T>(at + j * W, elements - j * W);
          if (two) b = some_columns<T>(at + stride + j * W, elements - j * W);
        }
        Isa::interleave(a, b, x[j], high);
        if constexpr (NR > 1) x[j + 1] = high;
      }
    } else if (whole) {
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) x[j] = whole_columns<T>(at + j * W);
    } else {
      for (int j = 0; j < NR; ++j) x[j] = some_columns<T>(at + j * W, elements - j * W);
    }
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m) {
      const vec w = Isa::splat_bits(p + m * PANEL + k / T::PER_COLUMN);
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) c[m][j] = product<T>(c[m][j], w, x[j]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) Isa::store(o + m * ldo + j * W, Isa::add(Isa::load(o + m * ldo + j * W), c[m][j]));
}
template <class T, int MR>
ATTN_INLINE void add_all_lying(const i32* p, const typename T::st* v, i64 stride, i64 n, i64 dim, i64 strip, i64 strips, float* o, i64 ldo) {
  i64 d = 0;
  while (d < dim) {
    const i64 rest = dim - d;
    if (Isa::NR >= 4 && rest >= 4 * W) {
      add_lying<T, MR, 4>(p, v + d, stride, n, rest, strip, strips, o + d, ldo);
      d += 4 * W;
    } else if (rest >= 2 * W) {
      add_lying<T, MR, 2>(p, v + d, stride, n, rest, strip, strips, o + d, ldo);
      d += 2 * W;
    } else {
      add_lying<T, MR, 1>(p, v + d, stride, n, rest, strip, strips, o + d, ldo);
      d += W;
    }
  }
}

inline bool all_finite(const float* x, i64 n) {  // n is a multiple of W
  vec check = Isa::zero();  // NaN once a number was none
  for (i64 i = 0; i < n; i += W) check = Isa::fma(Isa::load(x + i), Isa::zero(), check);
  const float sum = Isa::reduce_add(check);
  return sum == sum;
}

// The words of rows: between the bytes of a mask for two panels lie their keys and values.
inline void words_of_rows(const Args& a, Row* rows, i64 R, i64 from, i64 to, i64 distance, u64* words) {
  for (i64 r = 0; r < R; ++r) {
    const bool again = r > 0 && rows[r].keep == rows[r - 1].keep;
    rows[r].words = again ? rows[r - 1].words : words + r * distance, rows[r].panel = from;
    if (!again) read_words(a, rows[r].keep, from, to, words + r * distance);
  }
}

// Whether every row keeps every key of a panel, before biases are asked; `all` are the keys of all rows, by their bounds.
inline bool keeps_panel(const Args& a, const Row* rows, i64 R, Reach all, i64 panel) {
  const i64 key = panel * PANEL;
  if (key < all.lo || key + PANEL > all.hi) return false;
  u64 kept = ~u64(0);
  for (i64 r = 0; r < R && a.keep.data; ++r) kept &= kept_by_tensor(a, rows[r], key);
  return !~kept;
}

inline i64 lanes_for(const Few& j) { return j.rows <= W / 2 ? W / 2 : W; }
// Whether panels that keep everything are computed with rows in lanes: few of these are empty (measured), scores are
// products, and rows of keys lie as columns.
template <class T> ATTN_INLINE bool takes_lanes(const Few& j) {
  const Args& a = j.a;
  return 5 * j.rows >= 4 * lanes_for(j) && j.scale.as_they_are && !a.seed && a.D % T::PER_COLUMN == 0 && a.k.stride[3] == 1 && a.v.stride[3] == 1;
}
// Those panels of a task, before any other.
template <class T, class V>
void panels_in_lanes(const Few& j, const Row* rows, Reach all, i64 b, i64 hk, i64 from, i64 to, char* memory, Running* running) {
  const Args& a = j.a;
  const auto at = [&](int which) ATTN_LAMBDA { return memory + j.at_lanes[which]; };
  const LanesMemory lanes = {reinterpret_cast<i32*>(at(0)), reinterpret_cast<float*>(at(1)), reinterpret_cast<float*>(at(2)),
                             reinterpret_cast<i32*>(at(3)), reinterpret_cast<i32*>(at(4))};
  auto* room = reinterpret_cast<typename T::st*>(memory + j.at_room);
  RunningLanes of_rows = nothing_yet();
  bool none = true;
  for (i64 w = from; w < to; ++w) {
    if (!keeps_panel(a, rows, j.rows, all, w)) continue;
    if (none) {
      into_lanes<V>(reinterpret_cast<const i32*>(memory + j.at_q), j.packed_columns, j.packed_columns, j.rows, lanes.queries);
      std::memset(lanes.results, 0, size_t(j.ldv * V::W) * 4);
      none = false;
    }
    attend_lanes<T, V>(a, j.scale, lanes, j.columns, j.ldv, rows_at<T>(a.k, b, hk, w * PANEL), rows_at<T>(a.v, b, hk, w * PANEL), w + 1 < to, room, of_rows);
  }
  if (none) return;
  out_of_lanes<V>(lanes.results, j.ldv, j.rows, reinterpret_cast<float*>(memory + j.at_o));
  Running in_lanes[W];
  give(of_rows, in_lanes, W);
  for (i64 r = 0; r < j.rows; ++r) {
    running[r] = in_lanes[r];
    for (i64 more = r + V::W; more < W; more += V::W) running[r].sum += in_lanes[more].sum;
  }
}

template <class T> void part_task(const void* job, i64 task) {
  const Few& j = *static_cast<const Few*>(job);
  const Args& a = j.a;
  using st = typename T::st;
  const i64 bh = task / j.parts, b = bh / a.HK, hk = bh % a.HK, part = task % j.parts, R = j.rows;
  char* memory = task_arena().take(j.parts_of_task);
  i32* q = reinterpret_cast<i32*>(memory + j.at_q);
  float* s = reinterpret_cast<float*>(memory + j.at_s);
  float* o = reinterpret_cast<float*>(memory + j.at_o);
  float* before = reinterpret_cast<float*>(memory + j.at_before);
  i32* packed = reinterpret_cast<i32*>(memory + j.at_keys);
  st* copies = reinterpret_cast<st*>(memory + j.at_copies);
  st* room = reinterpret_cast<st*>(memory + j.at_room);

  Row rows[FEW + 2];
  Running running[FEW + 2];
  u64 words[FEW + 2] = {};
  vec top[FEW + 2];
  const i64 padded = R / 6 * 6 + (R % 6 ? strip_rows(R % 6) : 0);
  i64 lo = a.S, hi = 0, all_lo = 0, all_hi = a.S;
  const Bounds bounds = bounds_of(a, b);
  for (i64 r = 0; r < R; ++r) {
    const i64 h = hk * j.group + r / a.L, i = r % a.L;
    rows[r] = row_of(a, bounds, b, h, i);
    lo = std::min(lo, rows[r].lo), hi = std::max(hi, rows[r].hi);
    all_lo = std::max(all_lo, rows[r].lo), all_hi = std::min(all_hi, rows[r].hi);
    const st* from = rows_at<T>(a.q, b, h, i);
    for (i64 c = 0; c < j.columns; c += W) {
      const i64 at = c * T::PER_COLUMN, rest = std::min<i64>(a.D - at, W * T::PER_COLUMN);
      Isa::store_bits(q + r * j.packed_columns + c, some_columns<T>(contiguous<T>(from + at * a.q.stride[3], a.q.stride[3], rest, room), rest));
    }
    running[r] = {-std::numeric_limits<float>::infinity(), 0.0f};
  }
  for (i64 r = R; r < padded; ++r) {
    rows[r] = Row{};
    std::memset(q + r * j.packed_columns, 0, size_t(j.packed_columns) * 4);
  }
  std::memset(o, 0, size_t(padded * j.ldv) * 4);
  std::memset(s, 0, size_t(padded * PANEL) * 4);
  // From so many rows on transposing a panel once is cheaper than adding up lanes; measured.
  const bool tensors = a.keep.data || a.bias.data, transposed = R >= 5;
  const i64 from = std::max(lo / PANEL, part * j.panels_each), to = std::min(blocks_of(hi, PANEL), (part + 1) * j.panels_each);
  if (a.keep.data) words_of_rows(a, rows, R, from, to, j.panels_each, reinterpret_cast<u64*>(memory + j.at_words));
  bool in_lanes = false;
  if constexpr (!std::is_void_v<Isa::Half>) {
    in_lanes = takes_lanes<T>(j);
    const auto panels = [&](auto which) ATTN_LAMBDA { panels_in_lanes<T, decltype(which)>(j, rows, {all_lo, all_hi}, b, hk, from, to, memory, running); };
    // Clang before 20 checks what is discarded here, too, where no template makes it wait: there is no `void{}`.
    using Half = std::conditional_t<std::is_void_v<Isa::Half>, Isa, Isa::Half>;
    if (in_lanes && lanes_for(j) < W) panels(Half{});
    else if (in_lanes) panels(Isa{});
  }
  for (i64 w = from; w < to; ++w) {
    if (in_lanes && keeps_panel(a, rows, R, {all_lo, all_hi}, w)) continue;
    const i64 key = w * PANEL, n = std::min<i64>(PANEL, std::min(hi, a.S) - key), there = whole_steps(n);
    const bool more = w + 1 < to;  // panels to read ahead
    bool full = n == PANEL && all_lo <= key && all_hi >= key + PANEL && !tensors;
    bool whole = full;  // every row keeps all keys there are, perhaps fewer than a panel's
    u64 any = ~u64(0), all = ~u64(0);
    if (!full) {
      any = 0;
      for (i64 r = 0; r < R; ++r) words[r] = word_of(a, rows[r], key), any |= words[r], all &= words[r];
      if (!any) continue;
      full = !~all;
      whole = !(~all & range_word(0, n, 0));
    }
    const st* k = rows_at<T>(a.k, b, hk, key);
    const st* v = rows_at<T>(a.v, b, hk, key);
    i64 k_stride[4] = {0, 0, a.k.stride[2], a.k.stride[3]}, v_stride = a.v.stride[2];
    if (a.v.stride[3] != 1) {
      for (i64 x = 0; x < n; ++x) contiguous<T>(v + x * v_stride, a.v.stride[3], a.DV, copies + x * a.DV);
      v = copies, v_stride = a.DV;
    }
    for (i64 r = 0; r < padded; ++r) top[r] = Isa::set1(-std::numeric_limits<float>::infinity());
    if (transposed || k_stride[3] != 1) {
      pack_keys<T>(k, k_stride, n, a.D, room, packed);
      const bool lie = k_stride[3] == 1;  // where they do not, a row is no row of memory
      Lines next = lines_of<T>(k + PANEL * k_stride[2], k_stride[2], more && lie ? PANEL : 0, a.D, blocks_of(R, 6) * j.columns * (PANEL / WIDE));
      for (i64 r = 0; r < R; r += 6)
        score_rows<T>(a, j.scale, q + r * j.packed_columns, j.packed_columns, j.columns, packed, key, there, rows + r,
                      std::min<i64>(6, R - r), words + r, full, s + r * PANEL, PANEL, top + r, next);
    } else {
      for (i64 r = 0; r < R;) {
        const i64 left = R - r, taken = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for_rows(taken, [&](auto MR) ATTN_LAMBDA {
          if constexpr (MR <= 4) all_dots<T, MR>(q + r * j.packed_columns, j.packed_columns, k, k_stride[2], n, a.D, s + r * PANEL);
        });
        r += taken;
      }
      if (full && j.scale.as_they_are) {
        for (i64 r = 0; r < R; ++r)
          for (i64 g = 0; g < PANEL; g += W) top[r] = Isa::max(Isa::load(s + r * PANEL + g), top[r]);
      } else {
        for (i64 r = 0; r < R; ++r)
          top[r] = finish_row(a, j.scale, rows[r], full ? ~u64(0) : words[r], key, there, s + r * PANEL, top[r]);
      }
    }
    for (i64 r = 0; r < R; ++r) {
      const float off = rescale(running[r], Isa::reduce_max(top[r]), j.scale.factor, o + r * j.ldv, j.ldv);
      float* at = s + r * PANEL;
      i32* weights = reinterpret_cast<i32*>(at);
      vec sum = Isa::zero();
      if (a.seed) {
        const u64 left = left_word(j.dropout, a.first_head + b * a.H + rows[r].h, rows[r].i, key);
        sum = weigh<T, true>(at, weights, there, j.scale.factor, off, left, sum);
      } else {
        sum = weigh<T, false>(at, weights, there, j.scale.factor, off, 0, sum);
      }
      running[r].sum += Isa::reduce_add(sum);
    }
    for (i64 r = R; r < padded; ++r) std::memset(s + r * PANEL, 0, PANEL * 4);
    const i32* weights = reinterpret_cast<const i32*>(s);
    const i64 strips = blocks_of(R, 6), columns = blocks_of(n, T::PER_COLUMN);
    // Widening values once for every strip costs more than packing them, but for one strip. A masked key whose value is
    // no number shows in the sums, since zero times it is none: then they are computed again.
    if (strips == 1 || T::CODE == FLOAT32) {
      if (!whole) std::memcpy(before, o, size_t(R * j.ldv) * 4);
      for (i64 x = 0; x < strips; ++x) {
        const i64 r = x * 6, strip = more ? x : -1;
        for_rows(R - r, [&](auto MR) ATTN_LAMBDA {
          add_all_lying<T, MR>(weights + r * PANEL, v, v_stride, n, a.DV, strip, strips, o + r * j.ldv, j.ldv);
        });
      }
      if (whole || all_finite(o, R * j.ldv)) continue;
      std::memcpy(o, before, size_t(R * j.ldv) * 4);
    }
    i32* values = packed;  // the keys of this panel are done with
    const i64 stride[4] = {0, 0, v_stride, 1};
    if (!pack_values<T>(v, stride, n, a.DV, j.ldv, room, values) && !whole) {
      for (i64 r = 0; r < R; ++r) add_kept<T>(weights + r * PANEL, words[r], values, j.ldv, a.DV, o + r * j.ldv);
      continue;
    }
    Lines next = lines_of<T>(v + PANEL * v_stride, v_stride, more ? PANEL : 0, a.DV, strips * columns * blocks_of(a.DV, WIDE));
    for (i64 r = 0; r < R; r += 6)
      for_rows(R - r, [&](auto MR) ATTN_LAMBDA {
        const Part part = {weights + r * PANEL, values, columns};
        add_values<T::PAIR, MR>(&part, 1, PANEL, j.ldv, o + r * j.ldv, j.ldv, a.DV, next);
      });
  }
  if (!j.partial) {
    const st* mean_row = nullptr;
    for (i64 r = 0; r < R; ++r) write_row<T>(a, b, hk * j.group + r / a.L, r % a.L, running[r], j.scale.factor, j.dropout.factor, o + r * j.ldv, &mean_row);
    return;
  }
  for (i64 r = 0; r < R; ++r) {
    float* out = j.partial + (task * R + r) * (j.ldv + 2);
    std::memcpy(out, o + r * j.ldv, size_t(j.ldv) * 4);
    out[j.ldv] = running[r].top, out[j.ldv + 1] = running[r].sum;
  }
}

template <class T> void join_task(const void* job, i64 task) {
  const Few& j = *static_cast<const Few*>(job);
  const Args& a = j.a;
  const i64 bh = task / j.rows, r = task % j.rows, step = j.rows * (j.ldv + 2);
  const float* in = j.partial + (bh * j.parts * j.rows + r) * (j.ldv + 2);
  float* o = reinterpret_cast<float*>(task_arena().take(j.parts_of_task) + j.at_o);
  Running whole = {-std::numeric_limits<float>::infinity(), 0.0f};
  for (i64 x = 0; x < j.parts; ++x) {
    const float top = in[x * step + j.ldv];
    if (top > whole.top || top != top) whole.top = top;
  }
  std::memset(o, 0, size_t(j.ldv) * 4);
  for (i64 x = 0; x < j.parts; ++x) {
    const float* one = in + x * step;
    if (one[j.ldv + 1] == 0) continue;
    const float by = std::exp2((one[j.ldv] - whole.top) * j.scale.factor);
    whole.sum += by * one[j.ldv + 1];
    const vec v = Isa::set1(by);
    for (i64 d = 0; d < j.ldv; d += W) Isa::store(o + d, Isa::fma(v, Isa::load(one + d), Isa::load(o + d)));
  }
  const typename T::st* mean_row = nullptr;
  write_row<T>(a, bh / a.HK, (bh % a.HK) * j.group + r / a.L, r % a.L, whole, j.scale.factor, j.dropout.factor, o, &mean_row);
}

template <class T> void attend_few(const Args& a) {
  Few j;
  j.a = a;
  j.scale = scale_of(a);
  j.dropout = dropout_of(a);
  j.group = a.H / a.HK;
  j.rows = j.group * a.L;
  j.columns = blocks_of(a.D, T::PER_COLUMN);
  j.packed_columns = round_up(j.columns, W);
  j.ldv = round_up(a.DV, W);
  // Parts follow from sizes alone, so that results do not depend on the number of threads.
  const i64 panels = blocks_of(a.S, PANEL), heads = a.B * a.HK;
  j.panels_each = std::max<i64>(4, blocks_of(panels * heads, 64));
  j.panels_each = std::min(j.panels_each, std::max<i64>(1, panels));
  j.parts = std::max<i64>(1, blocks_of(panels, j.panels_each));
  Parts task;
  const size_t as_keys = size_t(j.packed_columns * PANEL) * 4, as_values = size_t(PANEL / T::PER_COLUMN * j.ldv) * 4;
  j.at_q = task.add(size_t((FEW + 2) * j.packed_columns) * 4);
  j.at_s = task.add(size_t((FEW + 2) * PANEL) * 4);
  j.at_o = task.add(size_t((FEW + 2) * j.ldv) * 4);
  j.at_before = task.add(size_t(FEW * j.ldv) * 4);
  j.at_keys = task.add(std::max(as_keys, as_values));
  j.at_copies = task.add(a.v.stride[3] != 1 ? size_t(PANEL * a.DV) * sizeof(typename T::st) : 0);
  j.at_room = task.add(size_t(2 * round_up(std::max(a.D, a.DV), 2 * W)) * 4);
  j.at_words = task.add(a.keep.data ? size_t(FEW * j.panels_each) * 8 : 0);
  if constexpr (!std::is_void_v<Isa::Half>) {
    if (takes_lanes<T>(j)) {
      const i64 lanes = lanes_for(j);
      const i64 counts[] = {j.packed_columns * lanes, PANEL * lanes, j.ldv * lanes, 8 * j.packed_columns, PANEL / T::PER_COLUMN * j.ldv};
      for (int i = 0; i < 5; ++i) j.at_lanes[i] = task.add(size_t(counts[i]) * 4);
    }
  }
  j.parts_of_task = task;
  j.partial = nullptr;
  if (j.parts > 1) {
    Parts call;
    call.add(size_t(heads * j.parts * j.rows * (j.ldv + 2)) * 4);
    j.partial = reinterpret_cast<float*>(call_arena().take(call));
  }
  const int threads = threads_for(a);
  run_tasks(heads * j.parts, part_task<T>, &j, threads);
  if (j.partial) run_tasks(heads * j.rows, join_task<T>, &j, heads * j.rows * j.ldv * j.parts < 100000 ? 1 : threads);
  call_arena().give_back();
}

// What a backward reads is left by many: its scores are added up in the same order there, and come out the same bits.
template <class T> void attend_whole(const Args& a) {
  if (a.H / a.HK * a.L <= FEW && !a.statistics) attend_few<typename T::Few>(a);
  else attend_many<T>(a);
}

struct Segments {
  Args a;
  int threads;
};
template <class T> void segment_task(const void* job, i64 task) {
  const Segments& j = *static_cast<const Segments*>(job);
  const Segment at = segment_at(j.a, task);
  if (at.rows > 0) attend_whole<T>(segment_of<T>(j.a, at, j.threads));
}

template <class T> void attend_type(const Args& a) {
  if (!a.offsets.data) return attend_whole<T>(a);
  const int threads = threads_for(a);
  const i64 tasks = a.segments * a.HK;
  // One thread for a task, unless the tasks are fewer than what one of them can be divided into: then all for each.
  const i64 inner = a.H / a.HK * (a.L / std::max<i64>(1, a.segments)) / ROWS;
  const bool each = tasks >= 4 * threads || tasks >= inner;
  const Segments j = {a, each ? 1 : threads};
  run_tasks(tasks, segment_task<T>, &j, each ? threads : 1);
}
