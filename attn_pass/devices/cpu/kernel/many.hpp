// Many query rows: tasks of ROWS of them against panels of keys and values that are packed once for a KV head. The heads
// of a group are rows of the same task, so that grouped heads share what is packed.
constexpr i64 ROWS = 96, AHEAD_OF_STORES = 2;
constexpr i64 KEPT = 1 << 20;  // bytes of a head's panels that a core keeps in its second cache

struct Many {
  Args a;
  Scale scale;
  Dropout dropout;
  i64 group, rows, blocks, panels, columns, packed_columns, ldv, key_panel, value_panel;
  i32 *keys, *values;  // null where a task packs for itself
  u8* finite;
  // Of `keep`, read once in the order of memory: (batch, head, block of rows, panel, row of the block), where they are not
  // broadcast. A block's lie together: lines that are far apart would share a set of the first cache. Behind them is, by
  // panel, what some row of the block keeps, and then what all of them do.
  u64* words;
  i64 word_rows, word_step, word_stride[3];  // rows that there are, those of a block; of batch, head and block
  size_t at_keys, at_values, at_finite, at_q, at_s, at_o, at_room;
  Parts parts_of_task;
};
struct Packed {  // the panels of a KV head; null where a task packs what it needs
  const i32 *keys, *values;
  const u8* finite;
};

template <class T> ATTN_INLINE const typename T::st* rows_at(const Operand& x, i64 b, i64 h, i64 row) {
  return static_cast<const typename T::st*>(x.data) + b * x.stride[0] + h * x.stride[1] + row * x.stride[2];
}

template <class T> ATTN_INLINE void pack_panel(const Many& j, i64 b, i64 hk, i64 panel, i32* keys, i32* values, u8* finite, char* room) {
  const Args& a = j.a;
  auto* space = reinterpret_cast<typename T::st*>(room);
  const i64 n = std::min<i64>(PANEL, a.S - panel * PANEL);
  pack_keys<T, true>(rows_at<T>(a.k, b, hk, panel * PANEL), a.k.stride, n, a.D, space, keys);
  *finite = pack_values<T, true, true>(rows_at<T>(a.v, b, hk, panel * PANEL), a.v.stride, n, a.DV, j.ldv, space, values);
}
// Whether a row of a batch entry may keep a key of a panel, before tensors are asked.
inline bool reaches(const Args& a, i64 b, i64 panel) {
  const Bounds bounds = bounds_of(a, b);
  const Reach keys = bounds.reach(bounds.shift, bounds.shift + a.L - 1);
  return panel * PANEL < keys.hi && (panel + 1) * PANEL > keys.lo;
}
// A row's word of the first panel; a word of the next lies `word_step` behind it.
ATTN_INLINE u64* words_of(const Many& j, i64 b, i64 h, i64 i) {
  u64* words = j.words + b * j.word_stride[0] + h * j.word_stride[1];
  return j.word_rows == 1 ? words : words + i / ROWS * j.word_stride[2] + i % ROWS;
}
// Whether a row of a batch entry may keep a key of a panel. A `keep` that differs from head to head is not looked at.
inline bool may_keep(const Many& j, i64 b, i64 panel) {
  const Args& a = j.a;
  if (!reaches(a, b, panel)) return false;
  if (!j.words || j.word_stride[1] || a.replaces) return true;
  for (i64 i = 0; i < j.word_rows; i += ROWS)
    if (words_of(j, b, 0, i)[j.panels * j.word_step + panel]) return true;
  return false;
}
template <class T> void pack_task(const void* job, i64 task) {
  const Many& j = *static_cast<const Many*>(job);
  char* room = task_arena().take(j.parts_of_task) + j.at_room;
  const i64 bh = task / j.panels, panel = task % j.panels;
  if (!may_keep(j, bh / j.a.HK, panel)) return;
  pack_panel<T>(j, bh / j.a.HK, bh % j.a.HK, panel, j.keys + task * j.key_panel, j.values + task * j.value_panel, j.finite + task, room);
}

// Of a block of rows, some at a time: their words of a panel are a line of memory.
constexpr i64 WORD_ROWS = 8;
inline void words_task(const void* job, i64 task) {
  const Many& j = *static_cast<const Many*>(job);
  const Args& a = j.a;
  const i64* s = a.keep.stride;
  const i64 blocks = blocks_of(j.word_rows, ROWS), heads = s[1] ? a.H : 1;
  const i64 begin = task % blocks * ROWS, h = task / blocks % heads, b = task / blocks / heads;
  const i64 end = std::min(begin + ROWS, j.word_rows);
  u64 *of_block = words_of(j, b, h, begin), *any = of_block + j.panels * j.word_step, *all = any + j.panels;
  for (i64 p = 0; p < j.panels; ++p) any[p] = 0, all[p] = ~u64(0);
  constexpr i64 PART = 64;
  for (i64 first = begin; first < end; first += WORD_ROWS) {
    const u8* keep = static_cast<const u8*>(a.keep.data) + b * s[0] + h * s[1] + first * s[2];
    const i64 n = std::min(WORD_ROWS, end - first);
    for (i64 from = 0; from < j.panels; from += PART) {
      const i64 count = std::min(PART, j.panels - from);
      u64 of_row[WORD_ROWS][PART];
      for (i64 r = 0; r < n; ++r) read_words(a, keep + r * s[2], from, from + count, of_row[r]);
      for (i64 p = 0; p < count; ++p) {
        u64 *words = of_block + (from + p) * j.word_step + first - begin, some = 0, every = ~u64(0);
        for (i64 r = 0; r < n; ++r) words[r] = of_row[r][p], some |= of_row[r][p], every &= of_row[r][p];
        any[from + p] |= some, all[from + p] &= every;
      }
    }
  }
}

// What truth values keep of a panel for a block of rows, computed once: a strip of rows asks for each of them.
struct PanelMask {
  bool hides_all, keeps_all;  // of its keys, for every row
};
inline PanelMask mask_of_panel(const Many& j, const Row* rows, i64 n, i64 panel) {
  const Args& a = j.a;
  if (!j.words || a.replaces) return {false, !a.keep.data};
  if (j.group == 1 || (j.word_rows == 1 && !j.word_stride[1])) {  // the rows that were read together
    const u64* joined = rows[0].words + j.panels * j.word_step + panel;
    return {!joined[0], !~joined[j.panels]};
  }
  u64 any = 0, all = ~u64(0);
  const i64 at = panel * j.word_step;
  for (i64 r = 0; r < n; ++r) any |= rows[r].words[at], all &= rows[r].words[at];
  return {!any, !~all};
}

// The distance of two rows of scores; in tiles no multiple of so many bytes that rows share sets of the first cache.
template <class T> constexpr i64 scores_of_row() { return T::PANELS * PANEL + (T::TILES ? W : 0); }

constexpr int MOST_PANELS = 8;
struct Strip {
  i64 row, rows, lo, hi, all_lo, all_hi;  // keys of any of its rows, keys of all of them
  u32 active;                             // panels with kept keys
  u32 careful;                            // of these those whose values are not all finite, and not all rows keep all keys
  // From which key of a panel on there are scores, and how many; of their columns the first that is kept, and one behind the last.
  u8 from[MOST_PANELS], there[MOST_PANELS], first[MOST_PANELS], columns[MOST_PANELS];
};

// The rows of a strip. A last strip of two would leave most registers empty: it takes two of the strip before.
template <class T> ATTN_INLINE Strip rows_of_strip(i64 n, i64 count, i64 x) {
  Strip strip = {};
  const i64 last = n - (count - 1) * T::STRIP, moved = !T::TILES && count > 1 && last == 2 ? 2 : 0;
  strip.row = x * T::STRIP - (x == count - 1 ? moved : 0);
  strip.rows = (x == count - 1 ? last + moved : x == count - 2 ? T::STRIP - moved : T::STRIP);
  return strip;
}

template <class T> ATTN_ONCE void attend_rows(const Many& j, i64 bh, i64 block, Packed packed, char* memory) {
  const Args& a = j.a;
  using st = typename T::st;
  constexpr i64 STRIP = T::STRIP, PANELS = T::PANELS, STEP = step_of_keys<T>();
  const i64 b = bh / a.HK, hk = bh % a.HK;
  const i64 first = block * ROWS, n = std::min<i64>(ROWS, j.rows - first), padded = round_up(n, STRIP);
  i32* q = reinterpret_cast<i32*>(memory + j.at_q);
  float* s = reinterpret_cast<float*>(memory + j.at_s);
  float* o = reinterpret_cast<float*>(memory + j.at_o);
  st* room = reinterpret_cast<st*>(memory + j.at_room);
  constexpr i64 LD = scores_of_row<T>();

  Row rows[ROWS + STRIP];
  vec top[ROWS + STRIP];
  constexpr i64 LINE_OF_WORDS = round_up(STRIP, 8);  // of a strip, and words beside it, which are written before they are its own
  u64 words[PANELS][ROWS + LINE_OF_WORDS];
  i64 los[ROWS + LINE_OF_WORDS] = {}, his[ROWS + LINE_OF_WORDS] = {};  // of `rows`
  const bool in_lines = j.words && j.group == 1 && j.word_rows > 1;  // whether rows' words of a panel follow each other
  Strip strips[ROWS / STRIP + 1];
  RunningStrip<STRIP> running[ROWS / STRIP + 1];
  constexpr i64 LANES = round_up(STRIP, W);  // of a strip
  constexpr i64 BESIDE = RunningStrip<STRIP>::N * RunningStrip<STRIP>::PARTS - STRIP;  // rows behind a strip that are read with it
  const i64 count = blocks_of(n, STRIP);
  i64 lo = a.S, hi = 0;
  const Bounds bounds = bounds_of(a, b);
  i64 g = first / a.L, i = first % a.L;
  for (i64 x = 0; x < count; ++x) {
    Strip& strip = strips[x];
    strip = rows_of_strip<T>(n, count, x);
    strip.lo = a.S, strip.all_hi = a.S;
    for (i64 r = strip.row; r < strip.row + strip.rows; ++r) {
      rows[r] = row_of(a, bounds, b, hk * j.group + g, i);
      if (j.words) {
        rows[r].words = words_of(j, b, hk * j.group + g, i);
        rows[r].step = j.word_step;
      }
      los[r] = rows[r].lo, his[r] = rows[r].hi;
      strip.lo = std::min(strip.lo, rows[r].lo), strip.hi = std::max(strip.hi, rows[r].hi);
      strip.all_lo = std::max(strip.all_lo, rows[r].lo), strip.all_hi = std::min(strip.all_hi, rows[r].hi);
      const st* from = rows_at<T>(a.q, b, hk * j.group + g, i);
      for (i64 c = 0; c < j.columns; c += W) {
        const i64 at = c * T::PER_COLUMN, rest = std::min<i64>(a.D - at, W * T::PER_COLUMN);
        const st* part = contiguous<T>(from + at * a.q.stride[3], a.q.stride[3], rest, room);
        Isa::store_bits(q + r * j.packed_columns + c, some_columns<T>(part, rest));
      }
      if (++i == a.L) i = 0, ++g;
    }
    lo = std::min(lo, strip.lo), hi = std::max(hi, strip.hi);
  }
  for (i64 r = n; r < padded; ++r) {
    rows[r] = Row{};
    std::memset(q + r * j.packed_columns, 0, size_t(j.packed_columns) * 4);
  }
  std::memset(o, 0, size_t(padded * j.ldv) * 4);
  const auto at_row = [&](i64 r) ATTN_LAMBDA { return s + (T::TILES ? r % (2 * STRIP) : r) * LD; };  // in tiles of two strips
  Lines lines[4];  // the result, and what comes next: after a head that is one tile the next head, else rows before these
  Ahead ahead = {lines, lines};
  const i64 h = hk * j.group + first / a.L, row = first % a.L;
  if (a.out) ahead.add(static_cast<st*>(a.out) + b * a.out_stride[0] + h * a.out_stride[1] + row * a.out_stride[2], a.out_stride, std::min(n, a.L - row), a.DV);
  if (j.panels > 1 || j.blocks > 1 || j.group > 1) {
    const i64 before = std::min(ROWS, row);
    ahead.add(rows_at<T>(a.q, b, h, row - before), a.q.stride, before, a.D);
  } else if (bh + 1 < a.B * a.HK) {
    const i64 next_b = (bh + 1) / a.HK, next_h = (bh + 1) % a.HK;
    for (const Operand* x : {&a.q, &a.k, &a.v})
      ahead.add(rows_at<T>(*x, next_b, next_h, 0), x->stride, x == &a.q ? a.L : a.S, x == &a.v ? a.DV : a.D);
  }

  #if ATTN_TILES
  const std::conditional_t<T::TILES, TilesOfThread, Nothing> tiles{};
#endif
  for (i64 w0 = lo / PANEL; w0 * PANEL < hi; w0 += PANELS) {
    const i64 panels = std::min<i64>(PANELS, blocks_of(hi, PANEL) - w0);
    const i32 *keys[PANELS], *values[PANELS];
    u8 finite[PANELS];
    PanelMask masks[PANELS];
    bool hidden = true;
    for (i64 p = 0; p < panels; ++p) {
      const i64 at = w0 + p;
      masks[p] = mask_of_panel(j, rows, n, at);
      hidden &= masks[p].hides_all;
      if (packed.keys) {
        keys[p] = packed.keys + at * j.key_panel, values[p] = packed.values + at * j.value_panel, finite[p] = packed.finite[at];
        continue;
      }
      i32* to_keys = reinterpret_cast<i32*>(memory + j.at_keys) + p * j.key_panel;
      i32* to_values = reinterpret_cast<i32*>(memory + j.at_values) + p * j.value_panel;
      finite[p] = 1;
      if (!masks[p].hides_all && reaches(a, b, at)) pack_panel<T>(j, b, hk, at, to_keys, to_values, finite + p, memory + j.at_room);
      keys[p] = to_keys, values[p] = to_values;
    }
    if (hidden) continue;
    for (i64 x = 0; x < count; ++x) strips[x].active = strips[x].careful = 0;
    for (i64 r = 0; r < padded + BESIDE; ++r) top[r] = Isa::set1(-std::numeric_limits<float>::infinity());

    const auto words_of_strip = [&](const Strip& strip, i64 key, u64* out) ATTN_LAMBDA {
      const i64 r = strip.row;
      const u64* line = in_lines ? rows[r].words + key / PANEL * j.word_step : nullptr;
      for (i64 i = 0; i < LINE_OF_WORDS; ++i) out[i] = range_word(los[r + i], his[r + i], key);
      if (a.replaces) return;
      if (line) {
        for (i64 i = 0; i < LINE_OF_WORDS; ++i) out[i] &= line[i];
      } else if (a.keep.data) {
        for (i64 i = 0; i < strip.rows; ++i) out[i] &= kept_by_tensor(a, rows[r + i], key);
      }
      for (i64 i = 0; i < strip.rows && a.bias.data; ++i)
        if (out[i]) out[i] &= kept_by_bias(a, rows[r + i], key);
    };
    const auto scores_of = [&](Strip& strip, i64 p) ATTN_LAMBDA {
      const i64 key = (w0 + p) * PANEL;
      if (masks[p].hides_all || strip.lo >= key + PANEL || strip.hi <= key) return;
      i64 from = 0, first = 0, to = std::min<i64>(PANEL, strip.hi - key);
      // Where products take more keys in a step than there are, scores of keys that do not count would be among the largest.
      bool full = masks[p].keeps_all && strip.all_lo <= key && strip.all_hi >= key + to && to % STEP == 0;
      if (full && a.bias.data) full = biases_keep_all(a, rows + strip.row, strip.rows, key);
      if (!full) {
        words_of_strip(strip, key, words[p] + strip.row);
        u64 any = 0, all = ~u64(0);
        for (i64 i = 0; i < strip.rows; ++i) any |= words[p][strip.row + i], all &= words[p][strip.row + i];
        if (!any) return;
        full = !~all;
        if (!full && !finite[p]) strip.careful |= 1u << p;
        if (!a.replaces) {
          first = __builtin_ctzll(any), from = first / STEP * STEP, to = PANEL - __builtin_clzll(any);
          for (i64 i = 0; i < LINE_OF_WORDS; ++i) words[p][strip.row + i] >>= from;  // from here on
        }
      }
      strip.active |= 1u << p;
      const i64 r = strip.row, there = round_up(to - from, STEP);
      strip.from[p] = u8(from), strip.there[p] = u8(there);
      strip.first[p] = u8((first - from) / T::PER_COLUMN), strip.columns[p] = u8(blocks_of(to - from, T::PER_COLUMN));
      score_rows<T>(a, j.scale, q + r * j.packed_columns, j.packed_columns, j.columns, keys[p] + from, key + from, there, rows + r, strip.rows,
                    words[p] + r, full, at_row(r) + p * PANEL, LD, top + r, ahead);
    };
    const auto weigh_panel = [&](const Strip& strip, i64 r, i64 p, float off, vec sum) ATTN_LAMBDA {
      const i64 from = strip.from[p], there = strip.there[p];
      float* at = at_row(r) + p * PANEL;
      i32* weights = reinterpret_cast<i32*>(at);
      if (!a.seed) return weigh<T, false>(at, weights, there, j.scale.factor, off, 0, sum);
      const u64 left = left_word(j.dropout, a.first_head + b * a.H + rows[r].h, rows[r].i, (w0 + p) * PANEL) >> from;
      return weigh<T, true>(at, weights, there, j.scale.factor, off, left, sum);
    };
    const auto values_of = [&](const Strip& strip, i64 p) ATTN_LAMBDA { return values[p] + strip.from[p] / T::PER_COLUMN * j.ldv; };
    const auto add_kept_of = [&](const Strip& strip, i64 p) ATTN_LAMBDA {
      for (i64 r = strip.row; r < strip.row + strip.rows; ++r)
        add_kept<T>(reinterpret_cast<const i32*>(at_row(r)) + p * PANEL, words[p][r], values_of(strip, p), j.ldv, a.DV, o + r * j.ldv);
    };
#if ATTN_TILES
    // Beside the exponentials of a strip and a panel stand products of the panel's weights, and of the next strip's scores.
    const auto in_tiles = [&]() ATTN_LAMBDA {
      constexpr i64 COLUMNS = RESULTS * TILE;
      for (i64 p = 0; p < panels; ++p) scores_of(strips[0], p);
      for (i64 x = 0; x < count; ++x) {
        const Strip& strip = strips[x];
        const i64 r = strip.row;
        const u32 plain = strip.active & ~strip.careful;
        const i32* weights = reinterpret_cast<const i32*>(at_row(r));
        float off[LANES];
        vec sum[LANES];
        if (strip.active) {
          for (vec& each : sum) each = Isa::zero();
          running[x].rescale(top + r, strip.rows, j.scale.factor, o + r * j.ldv, j.ldv, off);
        }
        if (plain) load_results(o + r * j.ldv, j.ldv, j.ldv);
        for (i64 p = 0; p < panels; ++p) {
          if (strip.active >> p & 1)
            for (i64 i = 0; i < strip.rows; ++i) sum[i] = weigh_panel(strip, r + i, p, off[i], sum[i]);
          if (plain >> p & 1) add_panel(weights + p * PANEL, LD, values_of(strip, p), j.ldv, strip.columns[p], j.ldv);
          if (x + 1 < count) scores_of(strips[x + 1], p);
        }
        if (plain) store_results(o + r * j.ldv, j.ldv, j.ldv);
        for (i64 d = COLUMNS; d < j.ldv && plain; d += COLUMNS) {
          load_results(o + r * j.ldv + d, j.ldv, j.ldv - d);
          for (u32 m = plain; m; m &= m - 1) {
            const i64 p = __builtin_ctz(m);
            add_panel(weights + p * PANEL, LD, values_of(strip, p) + d, j.ldv, strip.columns[p], j.ldv - d);
          }
          store_results(o + r * j.ldv + d, j.ldv, j.ldv - d);
        }
        for (u32 m = strip.active & strip.careful; m; m &= m - 1) add_kept_of(strip, __builtin_ctz(m));
        if (strip.active) running[x].add(sum);
      }
    };
    if constexpr (T::TILES) {
      in_tiles();
      continue;
    }
#endif
    for (i64 p = 0; p < panels; ++p)
      for (i64 x = 0; x < count; ++x) scores_of(strips[x], p);
    for (i64 x = 0; x < count; ++x) {
      const Strip& strip = strips[x];
      if (!strip.active) continue;
      float off[LANES];
      vec sum[LANES];
      running[x].rescale(top + strip.row, strip.rows, j.scale.factor, o + strip.row * j.ldv, j.ldv, off);
      for (vec& each : sum) each = Isa::zero();
      for (i64 i = 0; i < strip.rows; ++i)
        for (u32 m = strip.active; m; m &= m - 1) sum[i] = weigh_panel(strip, strip.row + i, __builtin_ctz(m), off[i], sum[i]);
      running[x].add(sum);
      for (i64 r = strip.row + strip.rows; r < strip.row + strip_rows(strip.rows); ++r)
        for (u32 m = strip.active; m; m &= m - 1) std::memset(at_row(r) + __builtin_ctz(m) * PANEL, 0, PANEL * 4);
    }
    for (i64 p = 0; p < panels; p += AHEAD_OF_STORES)
      for (i64 x = 0; x < count; ++x) {
        const Strip& strip = strips[x];
        const u32 now = (strip.active >> p) & ((1u << AHEAD_OF_STORES) - 1), plain = now & ~(strip.careful >> p);
        for (u32 m = now & ~plain; m; m &= m - 1) add_kept_of(strip, p + __builtin_ctz(m));
        if (!plain) continue;
        Part parts[AHEAD_OF_STORES], *end = parts;
        for (u32 m = plain; m; m &= m - 1) {
          const i64 at = p + __builtin_ctz(m), first = strip.first[at];
          const i32* weights = reinterpret_cast<const i32*>(at_row(strip.row)) + at * PANEL;
          *end++ = {weights + first, values_of(strip, at) + first * j.ldv, strip.columns[at] - first};
        }
        for_rows(strip.rows, [&](auto MR) ATTN_LAMBDA {
          add_values<T::PAIR, MR>(parts, end - parts, LD, j.ldv, o + strip.row * j.ldv, j.ldv, a.DV, ahead);
        });
      }
  }
  const st* mean_row = nullptr;
  for (i64 x = 0; x < count; ++x) {
    const i64 r = strips[x].row;
    Running each[LANES];
    running[x].give_to(each, strips[x].rows);
    for (i64 i = 0; i < strips[x].rows; ++i)
      write_row<T>(a, b, rows[r + i].h, rows[r + i].i, each[i], j.scale.factor, j.dropout.factor, o + (r + i) * j.ldv, &mean_row);
  }
}

// A block of rows. The last rows of a causal mask have the most keys: they go first.
template <class T> void rows_task(const void* job, i64 task) {
  const Many& j = *static_cast<const Many*>(job);
  const i64 bh = task / j.blocks, at = bh * j.panels;
  Packed packed = {};
  if (j.keys) packed = {j.keys + at * j.key_panel, j.values + at * j.value_panel, j.finite + at};
  attend_rows<T>(j, bh, j.blocks - 1 - task % j.blocks, packed, task_arena().take(j.parts_of_task));
}
// A KV head: what is packed stays in the core's cache.
template <class T> void head_task(const void* job, i64 bh) {
  const Many& j = *static_cast<const Many*>(job);
  char* memory = task_arena().take(j.parts_of_task);
  i32 *keys = reinterpret_cast<i32*>(memory + j.at_keys), *values = reinterpret_cast<i32*>(memory + j.at_values);
  u8* finite = reinterpret_cast<u8*>(memory + j.at_finite);
  for (i64 p = 0; p < j.panels; ++p)
    pack_panel<T>(j, bh / j.a.HK, bh % j.a.HK, p, keys + p * j.key_panel, values + p * j.value_panel, finite + p, memory + j.at_room);
  for (i64 block = j.blocks - 1; block >= 0; --block) attend_rows<T>(j, bh, block, {keys, values, finite}, memory);
}

template <class T> void attend_many(const Args& a) {
  Many j;
  j.a = a;
  j.scale = scale_of(a);
  j.dropout = dropout_of(a);
  j.group = a.H / a.HK;
  j.rows = j.group * a.L;
  j.blocks = blocks_of(j.rows, ROWS);
  j.panels = blocks_of(a.S, PANEL);
  j.columns = blocks_of(a.D, T::PER_COLUMN);
  j.packed_columns = round_up(j.columns, W);
  j.ldv = round_up(a.DV, T::TILES ? 2 * W : W);
  j.key_panel = j.packed_columns * PANEL;
  j.value_panel = PANEL / T::PER_COLUMN * j.ldv;
  const int threads = threads_for(a);
  const bool own = j.blocks == 1;  // each panel is used by one task alone
  const bool whole = !own && a.B * a.HK >= 4 * threads && j.panels * (j.key_panel + j.value_panel) * 4 <= KEPT;
  const i64 panels = own ? T::PANELS : whole ? j.panels : 0;
  Parts task;
  j.at_keys = task.add(size_t(panels * j.key_panel) * 4);
  j.at_values = task.add(size_t(panels * j.value_panel) * 4);
  j.at_finite = task.add(size_t(panels));
  j.at_q = task.add(size_t(ROWS * j.packed_columns) * 4);
  j.at_s = task.add(size_t(ROWS * scores_of_row<T>()) * 4);
  j.at_o = task.add(size_t(ROWS * j.ldv) * 4);
  j.at_room = task.add(size_t(2 * round_up(std::max(a.D, a.DV), 2 * W)) * 4);
  j.parts_of_task = task;
  j.keys = j.values = nullptr;
  j.words = nullptr;
  const i64* ks = a.keep.stride;
  j.word_rows = ks[2] ? a.L : 1, j.word_step = std::max<i64>(1, std::min(ROWS, j.word_rows));
  j.word_stride[2] = (j.word_step + 2) * j.panels;
  const i64 of_head = blocks_of(j.word_rows, j.word_step) * j.word_stride[2], masks = a.keep.data ? (ks[0] ? a.B : 1) * (ks[1] ? a.H : 1) : 0;
  j.word_stride[1] = ks[1] ? of_head : 0;
  j.word_stride[0] = ks[0] ? of_head * (ks[1] ? a.H : 1) : 0;
  const i64 all = panels ? 0 : a.B * a.HK * j.panels;
  Parts call;
  const size_t keys = call.add(size_t(all * j.key_panel) * 4), values = call.add(size_t(all * j.value_panel) * 4);
  const size_t finite = call.add(size_t(all)), words = call.add(size_t(masks ? masks * of_head + 16 : 0) * 8);  // read in whole lines
  char* memory = call.bytes ? call_arena().take(call) : nullptr;
  if (masks) {
    j.words = reinterpret_cast<u64*>(memory + words);
    run_tasks(masks * blocks_of(j.word_rows, ROWS), words_task, &j, masks * j.word_rows * a.S < 200000 ? 1 : threads);
  }
  if (all) {
    j.keys = reinterpret_cast<i32*>(memory + keys), j.values = reinterpret_cast<i32*>(memory + values);
    j.finite = reinterpret_cast<u8*>(memory + finite);
    run_tasks(all, pack_task<T>, &j, threads);
  }
  if (whole) run_tasks(a.B * a.HK, head_task<T>, &j, threads);
  else run_tasks(a.B * a.HK * j.blocks, rows_task<T>, &j, threads);
  call_arena().give_back();
}
