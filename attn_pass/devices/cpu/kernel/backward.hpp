// Gradients: a task owns some of the batch, some KV heads and some panels of keys. It computes the weights of their tiles
// again, sums the gradients of keys and values up where it keeps them, and the query's over the panels. What several
// tasks add to is summed up by each for itself, and joined in order: results are the same for any number of threads.
constexpr i64 BACK_PANELS = 4, TASKS = 16;   // panels at a time; tasks that are enough for many threads
constexpr i64 PARTIAL = i64(1) << 22;        // elements of gradients of a bias that may be kept besides the bias itself
constexpr i64 JOINED = 4096;                 // elements of a task that joins

struct Back {
  BackwardArgs given;
  Args a;
  Gradients all;
  i64 group, panels, columns, value_columns, packed_columns, packed_values, ldq, ldv, padded;
  i64 key_panel, value_panel, row_panel;
  i64 batch_parts, head_parts, splits, panels_each;
  i64 elements[1 + CAPTURED], parts[1 + CAPTURED], part_stride[1 + CAPTURED][3];  // by part of batch, heads and keys
  float* dq;  // (splits, B, H, padded, ldq); null where there is one split
  void* sums[1 + CAPTURED];
  bool by_distance;  // whether the bias is; its gradient is summed up over L + S - 1 distances then
  size_t at_keys, at_values, at_rows, at_dk, at_dv, at_q, at_q_pairs, at_grad, at_grad_pairs, at_s, at_g, at_pairs, at_weights, at_gradients, at_dq, at_left,
      at_mean, at_room;
  Parts parts_of_task;
  i64 origin(int t) const { return t == 0 && by_distance ? a.L - 1 : 0; }  // where what belongs to row 0 and key 0 is
};

// ---- what a row's gradient begins with
// Of n rows the sum of the result times its gradient, and of what rounding took from it, since the gradients of a row's
// scores add up to nothing. In the order of a tile's products: where one key has all the weight the result is its value,
// and what is taken off the gradient of its weight is that to the bit.
template <class T> void deltas(const Back& j, i64 b, i64 h, i64 row, i64 n, char* memory, float* to) {
  auto* room = reinterpret_cast<typename T::st*>(memory + j.at_room);
  i32 *grad = reinterpret_cast<i32*>(memory + j.at_values), *other = grad + j.value_panel;  // values are packed there later
  std::memset(to, 0, PANEL * 4);
  pack_keys<T>(rows_at<T>(j.given.grad, b, h, row), j.given.grad.stride, n, j.a.DV, room, grad);
  for (const Operand* x : {&j.given.result, &j.given.rest}) {
    if (!x->data) continue;
    pack_keys<T>(rows_at<T>(*x, b, h, row), x->stride, n, j.a.DV, room, other);
    for (i64 r = 0; r < n; r += W) {
      vec sum = Isa::zero();
      for (i64 c = 0; c < j.value_columns; ++c)
        sum = plus_product<T::PAIR>(sum, Isa::load_bits(grad + c * PANEL + r), Isa::load_bits(other + c * PANEL + r));
      Isa::store(to + r, Isa::add(Isa::load(to + r), sum));
    }
  }
}
// Fully masked rows that are the mean of all values hand their gradients to all values: `mean` is the sum of these; behind
// it is room for the same number of doubles.
template <class T> void look_back(const Back& j, i64 b, i64 hk, char* memory, float* mean, float* sink_rows) {
  const Args& a = j.a;
  Left* left = reinterpret_cast<Left*>(memory + j.at_left);
  const bool needed = j.panels > 1 || sink_rows;  // else it is summed up where it is taken off
  float delta[PANEL] = {};
  double* total = reinterpret_cast<double*>(mean + j.ldv);
  for (i64 d = 0; d < j.ldv; ++d) total[d] = 0;
  for (i64 g = 0; g < j.group; ++g) {
    const i64 h = hk * j.group + g;
    for (i64 i = 0; i < a.L; ++i) {
      const float* kept = j.given.statistics + ((b * a.H + h) * a.rows + i) * 2;
      const auto* grad = rows_at<T>(j.given.grad, b, h, i);
      Left& of = left[g * a.L + i];
      if (needed && i % PANEL == 0) deltas<T>(j, b, h, i, std::min<i64>(PANEL, a.L - i), memory, delta);
      if (kept[1] == 0) {
        of = {0.0f, 0.0f, 0.0f};
        if (sink_rows) sink_rows[(b * a.H + h) * a.rows + i] = 0.0f;
        if (a.fully_masked == GIVES_MEAN)
          for (i64 d = 0; d < a.DV; ++d) total[d] += T::one(grad[d * j.given.grad.stride[3]]);
        continue;
      }
      of = {kept[0], 1.0f / kept[1], delta[i % PANEL]};
      if (j.given.lse_grad.data) {
        const i64* s = j.given.lse_grad.stride;
        of.delta -= static_cast<const float*>(j.given.lse_grad.data)[b * s[0] + h * s[1] + i * s[2]];
      }
      if (sink_rows) {
        const i64* s = a.sink.stride;
        const float factor = j.all.scale.factor, sink = static_cast<const float*>(a.sink.data)[b * s[0] + h * s[1] + i * s[2]];
        const float weight = sink == -INFINITY ? 0.0f : std::exp2((sink / (factor * LN2) - of.top) * factor) * of.share;
        sink_rows[(b * a.H + h) * a.rows + i] = -weight * of.delta;
        if (j.panels == 1) of.delta = 0;  // no log-sum-exp beside a sink
      }
    }
  }
  for (i64 d = 0; d < j.ldv; ++d) mean[d] = a.S ? float(total[d] / double(a.S)) : 0.0f;
}

// A block of rows of one head, packed when a tile first needs it.
struct Block {
  Row rows[BACK_ROWS];
  i64 first, n, b, h, lo, hi;
  bool packed;
};
template <class T> void pack_block(const Back& j, Block& block, char* memory) {
  const Args& a = j.a;
  using st = typename T::st;
  st* room = reinterpret_cast<st*>(memory + j.at_room);
  i32 *q = reinterpret_cast<i32*>(memory + j.at_q), *grad = reinterpret_cast<i32*>(memory + j.at_grad);
  const st *from_q = rows_at<T>(a.q, block.b, block.h, block.first), *from_grad = rows_at<T>(j.given.grad, block.b, block.h, block.first);
  for (i64 r = 0; r < block.n; ++r) {
    in_columns<T>(from_q + r * a.q.stride[2], a.q.stride[3], a.D, room, q + r * j.packed_columns);
    in_columns<T>(from_grad + r * j.given.grad.stride[2], j.given.grad.stride[3], a.DV, room, grad + r * j.packed_values);
  }
  const i64 end = round_up(block.n, 6);
  std::memset(q + block.n * j.packed_columns, 0, size_t((end - block.n) * j.packed_columns) * 4);
  std::memset(grad + block.n * j.packed_values, 0, size_t((end - block.n) * j.packed_values) * 4);
  if constexpr (T::PAIR) {
    pack_values<T>(from_q, a.q.stride, block.n, a.D, j.ldq, room, reinterpret_cast<i32*>(memory + j.at_q_pairs));
    pack_values<T>(from_grad, j.given.grad.stride, block.n, a.DV, j.ldv, room, reinterpret_cast<i32*>(memory + j.at_grad_pairs));
  }
  block.packed = true;
}

// One panel of keys: what is packed of it, and where its gradients are summed up.
struct Panel {
  i64 key, n;
  i32 *keys, *values, *rows;
  float *dk, *dv;
  bool packed;
};
template <class T> void pack_back(const Back& j, Panel& panel, i64 b, i64 hk, char* memory) {
  const Args& a = j.a;
  auto* room = reinterpret_cast<typename T::st*>(memory + j.at_room);
  const auto* key = rows_at<T>(a.k, b, hk, panel.key);
  pack_keys<T>(key, a.k.stride, panel.n, a.D, room, panel.keys);
  pack_keys<T>(rows_at<T>(a.v, b, hk, panel.key), a.v.stride, panel.n, a.DV, room, panel.values);
  if (j.given.dq.data) pack_values<T>(key, a.k.stride, panel.n, a.D, j.ldq, room, panel.rows);
  std::memset(panel.dk, 0, size_t(PANEL * j.ldq) * 4);
  std::memset(panel.dv, 0, size_t(PANEL * j.ldv) * 4);
  panel.packed = true;
}

// The keys that a row keeps. Where the bias's gradient is wanted, keys that it rules out have weights of 0 all the same.
ATTN_INLINE u64 kept_back(const Args& a, const Row& row, i64 key, bool bias_too) {
  if (bias_too || !row.bias) return word_of(a, row, key);
  Row without = row;
  without.bias = nullptr;
  return word_of(a, without, key);
}

// A tile: its weights, and what it adds to all gradients. `dq` is of the block's first row.
template <class T>
ATTN_ONCE void tile_back(const Back& j, const Gradients& all, Block& block, Panel& panel, i64 hk, const Left* left, float* dq, Ahead& next, char* memory) {
  const Args& a = j.a;
  u64 words[BACK_ROWS + 6];
  u32 active = 0;
  const i64 strips = blocks_of(block.n, 6);
  const bool learned = all.sums[0].data != nullptr;
  for (i64 x = 0; x < strips; ++x)
    for (i64 r = x * 6; r < std::min(x * 6 + 6, block.n); ++r) {
      words[r] = kept_back(a, block.rows[r], panel.key, !learned);
      if (words[r]) active |= 1u << x;
    }
  if (all.any_fresh)
    for (i64 r = 0; r < block.n; ++r) {
      const i64 computed = words[r] ? whole_steps(std::min(block.hi, a.S) - panel.key) : 0;
      if (computed < panel.n) clear_row(all, block.rows[r], panel.key + computed, panel.key + panel.n);
    }
  if (!active) return;
  if (!panel.packed) pack_back<T>(j, panel, block.b, hk, memory);
  if (!block.packed) pack_block<T>(j, block, memory);

  const i64 low = __builtin_ctz(active), high = 32 - __builtin_clz(active);  // strips
  const i64 there = whole_steps(std::min(block.hi, a.S) - panel.key), keys = std::min(there, panel.n);
  const i32 *q = reinterpret_cast<i32*>(memory + j.at_q), *grad = reinterpret_cast<i32*>(memory + j.at_grad);
  float *s = reinterpret_cast<float*>(memory + j.at_s), *g = reinterpret_cast<float*>(memory + j.at_g);
  const auto products = [&](const i32* rows, i64 ld, i64 columns, const i32* of_keys, i64 count, float* to) {
    score_strip<T>(rows, ld, columns, of_keys, there, count, false, nullptr, to, LDT, nullptr, next);
  };
  for (i64 x = low; x < high; ++x) {
    for (i64 r = x * 6; r < std::min(x * 6 + 6, block.n); ++r) fetch_row(a, all, block.rows[r], panel.key, there);
    if (active >> x & 1) products(q + x * 6 * j.packed_columns, j.packed_columns, j.columns, panel.keys, block.n - x * 6, s + x * 6 * LDT);
  }
  for (i64 x = low; x < high; ++x)
    if (active >> x & 1) products(grad + x * 6 * j.packed_values, j.packed_values, j.value_columns, panel.values, block.n - x * 6, g + x * 6 * LDT);
  for (i64 r = low * 6; r < high * 6; ++r) {
    float *weights = s + r * LDT, *gradients = g + r * LDT;
    if (r < block.n && words[r]) {
      const auto weigh = j.panels == 1 ? weigh_back<T, true> : weigh_back<T, false>;
      weigh(a, all, block.rows[r], left[r], words[r], panel.key, there, weights, gradients);
    } else {
      std::memset(weights, 0, size_t(there) * 4);
      std::memset(gradients, 0, size_t(there) * 4);
    }
  }

  const i32 *weights = reinterpret_cast<i32*>(s), *gradients = reinterpret_cast<i32*>(g);  // rows of keys
  const i32 *of_weights = weights, *of_gradients = gradients;                             // as transposed products take them
  const i32 *q_rows = q, *grad_rows = grad;
  i64 step = LDT, row = low * 6, count = std::min(high * 6, block.n) - row, ldg = LDT;
  if constexpr (T::PAIR) {
    i32 *pairs = reinterpret_cast<i32*>(memory + j.at_pairs), *to_weights = reinterpret_cast<i32*>(memory + j.at_weights);
    i32 *to_gradients = reinterpret_cast<i32*>(memory + j.at_gradients);
    constexpr i64 LDP = LDT / 2;
    i32 one[PANEL / 2], other[PANEL / 2];
    for (i64 r = row; r < high * 6; r += 2) {
      as_pairs<T>(s + r * LDT, there, one), as_pairs<T>(s + (r + 1) * LDT, there, other);
      pair_rows(one, other, there, to_weights + r / 2 * LDT);
      as_pairs<T>(g + r * LDT, there, pairs + r * LDP), as_pairs<T>(g + (r + 1) * LDT, there, pairs + (r + 1) * LDP);
      pair_rows(pairs + r * LDP, pairs + (r + 1) * LDP, there, to_gradients + r / 2 * LDT);
    }
    gradients = pairs, ldg = LDP, of_weights = to_weights, of_gradients = to_gradients;
    q_rows = reinterpret_cast<i32*>(memory + j.at_q_pairs), grad_rows = reinterpret_cast<i32*>(memory + j.at_grad_pairs);
    row /= 2, count = blocks_of(count, 2);
  }
  if (j.given.dq.data) {
    const i32* rows = panel.rows;
    const i64 columns = blocks_of(keys, T::PER_COLUMN);
    for (i64 x = low; x < high; ++x) {
      if (!(active >> x & 1)) continue;
      for_rows(block.n - x * 6, [&](auto MR) ATTN_LAMBDA {
        const Part part = {gradients + x * 6 * ldg, rows, columns};
        add_values<T::PAIR, MR>(&part, 1, ldg, j.ldq, dq + x * 6 * j.ldq, j.ldq, a.D, next);
      });
    }
  }
  if (j.given.dv.data) add_all_transposed<T::PAIR>(of_weights + row * step, step, grad_rows + row * j.ldv, j.ldv, count, panel.dv, keys, a.DV);
  if (j.given.dk.data) add_all_transposed<T::PAIR>(of_gradients + row * step, step, q_rows + row * j.ldq, j.ldq, count, panel.dk, keys, a.D);
}

template <class T> void write_panel(const Back& j, const Panel& panel, i64 b, i64 hk, const float* mean) {
  const Args& a = j.a;
  using st = typename T::st;
  const float factor = a.has_score ? 1.0f : a.scale;
  const vec zero = Isa::zero();
  for (i64 k = 0; k < panel.n; ++k) {
    float *dk = panel.dk + k * j.ldq, *dv = panel.dv + k * j.ldv;
    if (!panel.packed) {
      for (i64 d = 0; d < j.ldq; d += W) Isa::store(dk + d, zero);
      for (i64 d = 0; d < j.ldv; d += W) Isa::store(dv + d, zero);
    }
    if (a.fully_masked == GIVES_MEAN)
      for (i64 d = 0; d < j.ldv; d += W) Isa::store(dv + d, Isa::add(Isa::load(dv + d), Isa::load(mean + d)));
    const Output *to_k = &j.given.dk, *to_v = &j.given.dv;
    if (to_k->data) write_times<T>(dk, factor, to_k->row<st>(b, hk, panel.key + k), to_k->stride[3], a.D);
    if (to_v->data) write_times<T>(dv, 1.0f, to_v->row<st>(b, hk, panel.key + k), to_v->stride[3], a.DV);
  }
}

struct Head {
  i64 b, hk;
};
// Of a head that is one tile: what is written at its end, and what the task reads of its next head, if there is one.
// Products take so little time there that the task would wait for memory.
template <class T> Ahead lines_ahead(const Back& j, Head head, const Head* next, Lines* lines) {
  using st = typename T::st;
  const Args& a = j.a;
  Ahead ahead = {lines, lines};
  if (j.panels > 1 || a.L > BACK_ROWS || j.group > 1) return ahead;
  for (const Output* x : {&j.given.dk, &j.given.dv, &j.given.dq})
    if (x->data) ahead.add(x->row<st>(head.b, head.hk, 0), x->stride, x == &j.given.dq ? a.L : a.S, x == &j.given.dv ? a.DV : a.D);
  if (!next) return ahead;
  for (const Operand* x : {&a.k, &a.v}) ahead.add(rows_at<T>(*x, next->b, next->hk, 0), x->stride, a.S, x == &a.v ? a.DV : a.D);
  for (const Operand* x : {&a.q, &j.given.grad}) ahead.add(rows_at<T>(*x, next->b, next->hk, 0), x->stride, a.L, x == &a.q ? a.D : a.DV);
  return ahead;
}

// The rows of a KV head, and the panels of one split.
template <class T> void head_back(const Back& j, const Gradients& of_all, Head head, const Head* next, i64 split, char* memory) {
  const Args& a = j.a;
  const i64 b = head.b, hk = head.hk;
  Lines lines[7];
  Ahead ahead = lines_ahead<T>(j, head, next, lines);
  Gradients all = of_all;
  Left* left = reinterpret_cast<Left*>(memory + j.at_left);
  float* mean = reinterpret_cast<float*>(memory + j.at_mean);
  look_back<T>(j, b, hk, memory, mean, split == 0 ? j.given.sink_rows : nullptr);
  const Bounds bounds = bounds_of(a, b);
  const i64 of_head = j.padded * j.ldq;
  float* dq = j.dq ? j.dq + ((split * a.B + b) * a.H + hk * j.group) * of_head : reinterpret_cast<float*>(memory + j.at_dq);
  if (j.given.dq.data) std::memset(dq, 0, size_t(j.group * of_head) * 4);
  const i64 last = std::min(j.panels, (split + 1) * j.panels_each);
  for (i64 from = split * j.panels_each; from < last; from += BACK_PANELS) {
    Panel panels[BACK_PANELS];
    const i64 count = std::min(BACK_PANELS, last - from);
    for (i64 p = 0; p < count; ++p) {
      const i64 key = (from + p) * PANEL;
      panels[p] = {key, std::min<i64>(PANEL, a.S - key), reinterpret_cast<i32*>(memory + j.at_keys) + p * j.key_panel,
                   reinterpret_cast<i32*>(memory + j.at_values) + p * j.value_panel, reinterpret_cast<i32*>(memory + j.at_rows) + p * j.row_panel,
                   reinterpret_cast<float*>(memory + j.at_dk) + p * PANEL * j.ldq, reinterpret_cast<float*>(memory + j.at_dv) + p * PANEL * j.ldv, false};
    }
    const i64 begin = from * PANEL, end = panels[count - 1].key + panels[count - 1].n;
    for (i64 g = 0; g < j.group; ++g)
      for (i64 first = 0; first < a.L; first += BACK_ROWS) {
        Block block;
        block.first = first, block.n = std::min<i64>(BACK_ROWS, a.L - first), block.b = b, block.h = hk * j.group + g, block.packed = false;
        block.lo = a.S, block.hi = 0;
        for (i64 r = 0; r < block.n; ++r) {
          block.rows[r] = row_of(a, bounds, b, block.h, first + r);
          if (block.rows[r].hi <= block.rows[r].lo) continue;
          block.lo = std::min(block.lo, block.rows[r].lo), block.hi = std::max(block.hi, block.rows[r].hi);
        }
        for (int t = 0; t <= CAPTURED; ++t)
          if (all.sums[t].data && !all.sums[t].stride[1]) all.sums[t].fresh = of_all.sums[t].fresh && g == 0;
        const bool sees = block.lo < end && block.hi > begin;
        if (!sees && !all.any_fresh) continue;
        for (i64 p = 0; p < count; ++p)
          if (all.any_fresh || (block.lo < panels[p].key + panels[p].n && block.hi > panels[p].key))
            tile_back<T>(j, all, block, panels[p], hk, left + g * a.L + first, dq + g * of_head + first * j.ldq, ahead, memory);
      }
    for (i64 p = 0; p < count; ++p) write_panel<T>(j, panels[p], b, hk, mean);
  }
  if (j.dq || !j.given.dq.data) return;
  const float factor = a.has_score ? 1.0f : a.scale;
  for (i64 g = 0; g < j.group; ++g)
    for (i64 i = 0; i < a.L; ++i)
      write_times<T>(dq + g * of_head + i * j.ldq, factor, j.given.dq.row<typename T::st>(b, hk * j.group + g, i), j.given.dq.stride[3], a.D);
}

template <class T> void back_task(const void* job, i64 task) {
  const Back& j = *static_cast<const Back*>(job);
  char* memory = task_arena().take(j.parts_of_task);
  const i64 split = task % j.splits, hp = task / j.splits % j.head_parts, bp = task / j.splits / j.head_parts;
  Gradients all = j.all;
  for (int t = 0; t <= CAPTURED; ++t) {
    const i64* s = j.part_stride[t];
    if (j.sums[t]) all.sums[t].data = static_cast<float*>(j.sums[t]) + (bp * s[0] + hp * s[1] + split * s[2]) * j.elements[t] + j.origin(t);
  }
  const i64 heads = j.a.HK, first_b = bp * j.a.B / j.batch_parts, first_h = hp * heads / j.head_parts;
  const i64 end_b = (bp + 1) * j.a.B / j.batch_parts, end_h = (hp + 1) * heads / j.head_parts;
  for (i64 b = first_b; b < end_b; ++b)
    for (i64 hk = first_h; hk < end_h; ++hk) {
      const Head next = hk + 1 < end_h ? Head{b, hk + 1} : Head{b + 1, first_h};
      all.any_fresh = false;
      for (Sums& to : all.sums) {
        to.fresh = to.is_matrix() && (to.stride[0] || b == first_b) && (to.stride[1] || hk == first_h);
        all.any_fresh = all.any_fresh || to.fresh;
      }
      head_back<T>(j, all, {b, hk}, next.b < end_b ? &next : nullptr, split, memory);
    }
  task_arena().give_back();
}

// ---- parts joined in order
template <class T> void join_queries(const void* job, i64 task) {
  const Back& j = *static_cast<const Back*>(job);
  const Args& a = j.a;
  const i64 bh = task % (a.B * a.H), first = task / (a.B * a.H) * BACK_ROWS, step = a.B * a.H * j.padded * j.ldq;
  const float factor = a.has_score ? 1.0f : a.scale;
  for (i64 i = first; i < std::min(first + BACK_ROWS, a.L); ++i) {
    float* row = j.dq + (bh * j.padded + i) * j.ldq;
    for (i64 x = 1; x < j.splits; ++x)
      for (i64 d = 0; d < j.ldq; d += W) Isa::store(row + d, Isa::add(Isa::load(row + d), Isa::load(row + x * step + d)));
    write_times<T>(row, factor, j.given.dq.row<typename T::st>(bh / a.H, bh % a.H, i), j.given.dq.stride[3], a.D);
  }
}
struct Joined {
  const float* from;
  i64 elements, parts;
  void* to;
  i32 type;
};
inline void clear_task(const void* job, i64 task) {
  const Joined& j = *static_cast<const Joined*>(job);
  const i64 first = task * JOINED, n = std::min(JOINED, j.elements * j.parts - first);
  std::memset(const_cast<float*>(j.from) + first, 0, size_t(n) * 4);
}
inline void join_sums(const void* job, i64 task) {
  const Joined& j = *static_cast<const Joined*>(job);
  const i64 first = task * JOINED, end = std::min(first + JOINED, j.elements);
  i64 e = first;
  for (; e + W <= end; e += W) {
    vec sum = Isa::load(j.from + e);
    for (i64 x = 1; x < j.parts; ++x) sum = Isa::add(sum, Isa::load(j.from + x * j.elements + e));
    if (j.type == FLOAT32) F32::narrow(static_cast<float*>(j.to) + e, sum);
    else if (j.type == BFLOAT16) BF16::narrow(static_cast<u16*>(j.to) + e, sum);
    else F16::narrow(static_cast<u16*>(j.to) + e, sum);
  }
  for (; e < end; ++e) {
    float sum = j.from[e];
    for (i64 x = 1; x < j.parts; ++x) sum += j.from[x * j.elements + e];
    if (j.type == FLOAT32) static_cast<float*>(j.to)[e] = sum;
    else static_cast<u16*>(j.to)[e] = j.type == BFLOAT16 ? to_bf16(sum) : to_f16(sum);
  }
}

// Parts follow from sizes alone, so that results do not depend on the number of threads.
inline void divide(Back& j) {
  const Args& a = j.a;
  const i64 sizes[4] = {a.B, a.H, a.L, a.S};
  i64 most = 0;  // elements of what is summed over the batch
  bool heads_are_summed = false;
  for (int t = 0; t <= CAPTURED; ++t) {
    j.elements[t] = 0;
    if (!j.given.summed[t].data) continue;
    const bool on_diagonals = t == 0 && j.by_distance;
    j.elements[t] = on_diagonals ? std::max<i64>(0, a.L + a.S - 1) : 1;
    for (int d = 0; d < (on_diagonals ? 2 : 4); ++d) j.elements[t] *= j.given.summed[t].stride[d] ? sizes[d] : 1;
    if (!j.given.summed[t].stride[0]) most = std::max(most, j.elements[t]);
    if (!j.given.summed[t].stride[1]) heads_are_summed = heads_are_summed || j.elements[t] * a.HK > PARTIAL;
  }
  j.head_parts = heads_are_summed ? 1 : a.HK;
  j.batch_parts = std::max<i64>(1, a.B);
  if (most) j.batch_parts = std::min({j.batch_parts, blocks_of(2 * TASKS, j.head_parts), std::max<i64>(1, PARTIAL / most)});
  const i64 wanted = blocks_of(TASKS, j.batch_parts * j.head_parts);
  j.splits = std::max<i64>(1, std::min(wanted, j.panels / BACK_PANELS));
  j.panels_each = std::max<i64>(1, blocks_of(j.panels, j.splits));
  j.splits = std::max<i64>(1, blocks_of(j.panels, j.panels_each));
  for (int t = 0; t <= CAPTURED; ++t) {
    if (!j.elements[t]) continue;
    const i64* s = j.given.summed[t].stride;
    const i64 by_keys = s[3] && s[2] >= 0 ? 1 : j.splits, by_heads = s[1] ? 1 : j.head_parts, by_batch = s[0] ? 1 : j.batch_parts;
    j.parts[t] = by_keys * by_heads * by_batch;
    j.part_stride[t][2] = by_keys > 1, j.part_stride[t][1] = by_heads > 1 ? by_keys : 0, j.part_stride[t][0] = by_batch > 1 ? by_keys * by_heads : 0;
  }
}

template <class T> void lay_out(Back& j) {
  const Args& a = j.a;
  Parts task;
  j.at_keys = task.add(size_t(BACK_PANELS * j.key_panel) * 4);
  j.at_values = task.add(size_t(BACK_PANELS * j.value_panel) * 4);
  j.at_rows = task.add(size_t(BACK_PANELS * j.row_panel) * 4);
  j.at_dk = task.add(size_t(BACK_PANELS * PANEL * j.ldq) * 4);
  j.at_dv = task.add(size_t(BACK_PANELS * PANEL * j.ldv) * 4);
  j.at_q = task.add(size_t(BACK_ROWS * j.packed_columns) * 4);
  j.at_grad = task.add(size_t(BACK_ROWS * j.packed_values) * 4);
  const i64 pairs = T::PAIR ? BACK_ROWS : 0;
  j.at_q_pairs = task.add(size_t(pairs / 2 * j.ldq) * 4);
  j.at_grad_pairs = task.add(size_t(pairs / 2 * j.ldv) * 4);
  j.at_s = task.add(size_t(BACK_ROWS * LDT) * 4);
  j.at_g = task.add(size_t(BACK_ROWS * LDT) * 4);
  j.at_pairs = task.add(size_t(pairs * LDT / 2) * 4);
  j.at_weights = task.add(size_t(pairs / 2 * LDT) * 4);
  j.at_gradients = task.add(size_t(pairs / 2 * LDT) * 4);
  j.at_dq = task.add(j.splits > 1 || !j.given.dq.data ? 0 : size_t(j.group * j.padded * j.ldq) * 4);
  j.at_left = task.add(size_t(j.group * a.L) * sizeof(Left));
  j.at_mean = task.add(size_t(j.ldv) * (sizeof(float) + sizeof(double)));
  j.at_room = task.add(size_t(2 * round_up(std::max(a.D, a.DV), 2 * W)) * 4);
  j.parts_of_task = task;
}

template <class T> void backward_whole(const BackwardArgs& given) {
  Back j;
  j.given = given;
  j.a = given.a;
  const Args& a = j.a;
  j.all = {scale_of(a), dropout_of(a), {}};
  j.group = a.H / a.HK;
  j.panels = blocks_of(a.S, PANEL);
  j.columns = blocks_of(a.D, T::PER_COLUMN), j.value_columns = blocks_of(a.DV, T::PER_COLUMN);
  j.packed_columns = round_up(j.columns, W), j.packed_values = round_up(j.value_columns, W);
  j.ldq = round_up(a.D, W), j.ldv = round_up(a.DV, W);
  j.padded = round_up(a.L, 6);
  j.by_distance = given.summed[0].data && given.summed[0].stride[2] < 0;
  j.key_panel = j.packed_columns * PANEL, j.value_panel = j.packed_values * PANEL, j.row_panel = PANEL / T::PER_COLUMN * j.ldq;
  divide(j);
  lay_out<T>(j);

  Parts call;
  const size_t dq = call.add(j.splits > 1 && given.dq.data ? size_t(j.splits * a.B * a.H * j.padded * j.ldq) * 4 : 0);
  size_t sums[1 + CAPTURED];
  bool lies_apart[1 + CAPTURED];
  for (int t = 0; t <= CAPTURED; ++t) {
    const i32 type = t ? i32(FLOAT32) : a.bias_type;
    const i64* s = given.summed[t].stride;
    const bool once = (s[0] || a.B == 1) && (s[1] || a.H == 1) && s[2] > 0 && s[3];
    lies_apart[t] = j.elements[t] && (j.parts[t] > 1 || (type != FLOAT32 && !once));
    j.all.sums[t].type = lies_apart[t] ? i32(FLOAT32) : type;
    sums[t] = lies_apart[t] ? call.add(size_t(j.parts[t] * j.elements[t]) * 4) : 0;
  }
  char* memory = call.bytes ? call_arena().take(call) : nullptr;
  j.dq = j.splits > 1 && given.dq.data ? reinterpret_cast<float*>(memory + dq) : nullptr;
  const int threads = threads_for(a);
  for (int t = 0; t <= CAPTURED; ++t) {
    j.sums[t] = nullptr;
    if (!j.elements[t]) continue;
    j.sums[t] = lies_apart[t] ? memory + sums[t] : given.summed[t].data;
    std::memcpy(j.all.sums[t].stride, given.summed[t].stride, sizeof(given.summed[t].stride));
    j.all.sums[t].data = j.sums[t];
    const bool has_work = a.B > 0 && a.L > 0 && a.S > 0;
    if (has_work && j.all.sums[t].is_matrix()) continue;  // each task clears what it does not write
    const Joined whole = {static_cast<float*>(j.sums[t]), j.elements[t], j.parts[t], nullptr, 0};
    run_tasks(blocks_of(j.elements[t] * j.parts[t], JOINED), clear_task, &whole, threads);
  }
  run_tasks(j.batch_parts * j.head_parts * j.splits, back_task<T>, &j, threads);
  if (j.dq) run_tasks(a.B * a.H * blocks_of(a.L, BACK_ROWS), join_queries<T>, &j, threads);
  for (int t = 0; t <= CAPTURED; ++t) {
    if (!lies_apart[t]) continue;
    const Joined parts = {static_cast<float*>(j.sums[t]), j.elements[t], j.parts[t], given.summed[t].data, t ? i32(FLOAT32) : a.bias_type};
    run_tasks(blocks_of(j.elements[t], JOINED), join_sums, &parts, threads);
  }
  call_arena().give_back();
}

struct BackSegments {
  BackwardArgs given;
  int threads;
};
template <class T> void segment_back(const void* job, i64 task) {
  const BackSegments& j = *static_cast<const BackSegments*>(job);
  const Args& whole = j.given.a;
  const Segment at = segment_at(whole, task);
  if (at.rows <= 0) return;
  BackwardArgs part = j.given;
  part.a = segment_of<T>(whole, at, j.threads);
  const i64 size = sizeof(typename T::st), first = at.head * whole.rows + at.first;
  for (Operand* x : {&part.grad, &part.result, &part.rest}) moved(x->data, (at.first * x->stride[2] + at.head * x->stride[1]) * size);
  moved(part.lse_grad.data, (at.first * part.lse_grad.stride[2] + at.head * part.lse_grad.stride[1]) * 4);
  part.statistics += first * 2;
  if (part.sink_rows) part.sink_rows += first;
  moved(part.dq.data, (at.first * part.dq.stride[2] + at.head * part.dq.stride[1]) * size);
  for (Output* x : {&part.dk, &part.dv}) moved(x->data, (at.first * x->stride[2] + at.kv_head * x->stride[1]) * size);
  backward_whole<T>(part);
}

template <class T> void attend_backward(const BackwardArgs& given) {
  if (!given.a.offsets.data) return backward_whole<T>(given);
  const int threads = threads_for(given.a);
  const i64 tasks = given.a.segments * given.a.HK;
  const i64 inner = std::min<i64>(TASKS, given.a.L / std::max<i64>(1, given.a.segments) / (PANEL * BACK_PANELS));
  const bool each = tasks >= 4 * threads || tasks >= inner;  // as the forward has it
  const BackSegments j = {given, each ? 1 : threads};
  run_tasks(tasks, segment_back<T>, &j, each ? threads : 1);
}
