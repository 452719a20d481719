// A linear layer of many rows, where arithmetic decides: the weights of PANEL results are packed for DEEP columns at a time,
// as keys of attention are, and multiplied with rows that were widened once, before.
constexpr i64 DEEP = 256;       // columns whose weights lie in the second cache beside the sums
constexpr i64 TALL = 384;       // rows that weights are packed for, where there are tasks enough
constexpr i64 STRIP = 6;        // rows of the micro-kernel; what is not there is zero
constexpr i64 WIDENED = 1 << 24;  // bytes of rows that are widened at a time
constexpr i64 MOST_FEW = 16;    // rows for which weights are not packed

struct ManyRows {
  LinearArgs a;
  i64 first, rows;  // of the input: those that are multiplied now
  i64 padded;       // as many strips as they take, in rows
  i64 columns;      // of a packed row: a multiple of W
  i64 each, blocks; // rows of a task, and how many such there are
  i32* packed;      // (columns / DEEP, padded, DEEP), the last with as many columns as are left
  size_t at_sums, at_weights, at_room;
  Parts parts_of_task;
};
ATTN_INLINE i64 deep_at(const ManyRows& j, i64 column) { return std::min(DEEP, j.columns - column); }

// Rows of a strip, widened or as pairs.
template <class T> void widen_task(const void* job, i64 strip) {
  const ManyRows& j = *static_cast<const ManyRows*>(job);
  const LinearArgs& a = j.a;
  for (i64 c0 = 0; c0 < j.columns; c0 += DEEP) {
    const i64 deep = deep_at(j, c0);
    i32* to = j.packed + c0 * j.padded + strip * STRIP * deep;
    for (i64 r = strip * STRIP; r < (strip + 1) * STRIP; ++r)
      for (i64 c = c0; c < c0 + deep; c += W, to += W) {
        const i64 at = c * T::PER_COLUMN, left = r < j.rows ? std::max<i64>(0, a.features - at) : 0;
        Isa::store_bits(to, some_columns<T>(static_cast<const typename T::st*>(a.input) + (left ? (j.first + r) * a.features + at : 0), left));
      }
  }
}

// sums (strips of rows, PANEL) += rows times packed weights, for the first n results.
template <bool PAIR> ATTN_ONCE void add_strips(const i32* rows, i64 strips, i64 deep, const i32* weights, i64 n, float* sums) {
  Nothing nothing;
  for (i64 strip = 0; strip < strips; ++strip, rows += STRIP * deep, sums += STRIP * PANEL)
    for (i64 at = 0; at < n; at += WIDE) {
      ProductSums<STRIP, Isa::NR> c;
      c.template multiply<PAIR>(rows, deep, weights + at, PANEL, deep, nothing);
#pragma GCC unroll 6
      for (int m = 0; m < STRIP; ++m)
#pragma GCC unroll 4
        for (int i = 0; i < Isa::NR; ++i) {
          float* to = sums + m * PANEL + at + i * W;
          Isa::store(to, Isa::add(Isa::load(to), c.whole[m][i]));
        }
    }
}

// PANEL results of a block of rows.
template <class T> void many_task(const void* job, i64 task) {
  using st = typename T::st;
  const ManyRows& j = *static_cast<const ManyRows*>(job);
  const LinearArgs& a = j.a;
  const i64 from = task / j.blocks * PANEL, n = std::min<i64>(PANEL, a.width - from);
  const i64 row = task % j.blocks * j.each, rows = std::min(j.each, j.padded - row);
  char* memory = task_arena().take(j.parts_of_task);
  float* sums = reinterpret_cast<float*>(memory + j.at_sums);
  i32* weights = reinterpret_cast<i32*>(memory + j.at_weights);
  st* room = reinterpret_cast<st*>(memory + j.at_room);
  std::memset(sums, 0, size_t(rows * PANEL) * 4);
  const i64 stride[4] = {0, 0, a.by_columns ? a.width : a.features, 1};
  for (i64 c = 0; c < j.columns; c += DEEP) {
    const i64 deep = deep_at(j, c), k = c * T::PER_COLUMN, there = std::min(DEEP * T::PER_COLUMN, a.features - k);
    const st* w = static_cast<const st*>(a.weight) + (a.by_columns ? k * a.width + from : from * a.features + k);
    if (a.by_columns) {
      pack_values<T, false>(w, stride, there, n, PANEL, room, weights);
      std::memset(weights + blocks_of(there, T::PER_COLUMN) * PANEL, 0, size_t(deep - blocks_of(there, T::PER_COLUMN)) * PANEL * 4);
    } else {
      pack_keys<T>(w, stride, n, there, room, weights);
    }
    add_strips<T::PAIR>(j.packed + c * j.padded + row * deep, rows / STRIP, deep, weights, n, sums);
  }
  float bias[PANEL] = {};
  for (i64 i = 0; i < n && a.bias; ++i) bias[i] = T::one(static_cast<const st*>(a.bias)[from + i]);
  for (i64 r = 0; r < std::min(rows, j.rows - row); ++r)
    for (i64 i = 0; i < n; i += W)
      narrow_some<T>(static_cast<st*>(a.out) + (j.first + row + r) * a.width + from + i, Isa::add(Isa::load(sums + r * PANEL + i), Isa::load(bias + i)), n - i);
}

template <class T> void multiply_many(const LinearArgs& a) {
  ManyRows j;
  j.a = a;
  j.columns = round_up(blocks_of(a.features, T::PER_COLUMN), W);
  const int threads = threads_for(2.0 * a.rows * a.features * a.width, a.threads);
  const i64 most = round_up(std::max(TALL / 4, WIDENED / (std::max<i64>(j.columns, 1) * 4)), STRIP);
  const i64 panels = blocks_of(a.width, PANEL);
  for (j.first = 0; j.first < a.rows; j.first += most) {
    j.rows = std::min(most, a.rows - j.first), j.padded = round_up(j.rows, STRIP);
    // Fewer rows a task where there are few panels of results for the threads.
    j.blocks = std::max(blocks_of(j.padded, TALL), std::min(j.padded / (TALL / 4), blocks_of(4 * threads, panels)));
    j.each = round_up(blocks_of(j.padded, j.blocks), STRIP), j.blocks = blocks_of(j.padded, j.each);
    Parts call, task;
    call.add(size_t(j.padded * j.columns) * 4);
    j.at_sums = task.add(size_t(j.each * PANEL) * 4);
    j.at_weights = task.add(size_t(DEEP * PANEL) * 4);
    j.at_room = task.add(size_t(2 * PANEL) * sizeof(typename T::st));
    j.parts_of_task = task;
    j.packed = reinterpret_cast<i32*>(call_arena().take(call));
    run_tasks(j.padded / STRIP, widen_task<T>, &j, threads);
    run_tasks(panels * j.blocks, many_task<T>, &j, threads);
  }
  call_arena().give_back();
}
