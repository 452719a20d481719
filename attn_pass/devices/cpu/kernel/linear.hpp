// A linear layer of few rows: every weight is read once, where it lies, and the memory's rate decides. Tasks take W rows of
// weights each, and go through these a few at a time, as a row of the input that was loaded serves them all.
constexpr i64 AT_ONCE = 8;  // rows of the input whose sums stay in registers
constexpr i64 KEPT = 4096;  // columns of the input, of these rows together, that stay in the first cache
constexpr i64 FETCHED = 8;  // rows of weights by which they are fetched ahead of what is multiplied
// Rows of weights at a time, beside MR of the input.
template <int MR> constexpr int WEIGHTS = MR <= 4 && Isa::NR >= 4 ? 4 : 2;

struct Linear {
  LinearArgs a;
  i64 columns;      // of a packed row of the input: a multiple of W
  const i32* rows;  // packed AT_ONCE at a time, of the last as many as `together` says: W columns of each row, and so on
};
ATTN_INLINE int together(i64 rows) { return rows >= 5 ? 8 : rows >= 3 ? 4 : int(rows); }

// += products of NR rows of weights with MR rows over n features, lane by lane: of weights i and row m in sums[m W + i].
// The same features of rows of weights that follow are fetched in between.
template <class T, int MR, int NR> ATTN_ONCE void add_products(const i32* x, const typename T::st* w, i64 ldw, i64 n, vec* sums) {
  constexpr i64 STEP = W * T::PER_COLUMN;
  vec c[MR][NR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < NR; ++i) c[m][i] = sums[m * W + i];
  const auto add = [&](i64 k, const auto& load) ATTN_LAMBDA {
    vec weights[NR];
#pragma GCC unroll 4
    for (int i = 0; i < NR; ++i) {
      __builtin_prefetch(w + (FETCHED + i) * ldw + k, 0, 2);
      weights[i] = load(w + i * ldw + k);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const vec row = Isa::load_bits(x + k / T::PER_COLUMN * MR + m * W);
#pragma GCC unroll 4
      for (int i = 0; i < NR; ++i) c[m][i] = plus_product<T::PAIR>(c[m][i], row, weights[i]);
    }
  };
  i64 k = 0;
  for (; k + STEP <= n; k += STEP) add(k, [](const auto* at) ATTN_LAMBDA { return whole_columns<T>(at); });
  if (k < n) add(k, [&](const auto* at) ATTN_LAMBDA { return some_columns<T>(at, n - k); });
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < NR; ++i) sums[m * W + i] = c[m][i];
}

// Results of MR rows from a row on, of which `rows` are there, for the n rows of weights from `from` on.
template <class T, int MR> ATTN_INLINE void some_results(const Linear& j, i64 row, i64 rows, i64 from, i64 n) {
  using st = typename T::st;
  constexpr int NR = WEIGHTS<MR>;
  constexpr i64 BLOCK = KEPT / MR * T::PER_COLUMN;
  const LinearArgs& a = j.a;
  const st* weights = static_cast<const st*>(a.weight) + from * a.features;
  vec sums[MR * W];
  for (vec& sum : sums) sum = Isa::zero();
  for (i64 k = 0; k < a.features; k += BLOCK) {
    const i32* x = j.rows + row * j.columns + k / T::PER_COLUMN * MR;
    const st* at = weights + k;
    const i64 there = std::min(BLOCK, a.features - k);
    i64 i = 0;
    for (; i + NR <= n; i += NR, at += NR * a.features) add_products<T, MR, NR>(x, at, a.features, there, sums + i);
    for (; i < n; ++i, at += a.features) add_products<T, MR, 1>(x, at, a.features, there, sums + i);
  }
  float bias[W] = {};
  for (i64 i = 0; i < n && a.bias; ++i) bias[i] = T::one(static_cast<const st*>(a.bias)[from + i]);
  for (i64 m = 0; m < rows; ++m)
    narrow_some<T>(static_cast<st*>(a.out) + (row + m) * a.width + from, Isa::add(sums_of<W>(sums + m * W), Isa::load(bias)), n);
}

template <class T> void linear_task(const void* job, i64 task) {
  const Linear& j = *static_cast<const Linear*>(job);
  const i64 from = task * W, n = std::min<i64>(W, j.a.width - from);
  for (i64 row = 0; row < j.a.rows; row += AT_ONCE) {
    const i64 rows = std::min(AT_ONCE, j.a.rows - row);
    switch (together(rows)) {
      case 1: some_results<T, 1>(j, row, rows, from, n); break;
      case 2: some_results<T, 2>(j, row, rows, from, n); break;
      case 4: some_results<T, 4>(j, row, rows, from, n); break;
      default: some_results<T, 8>(j, row, rows, from, n);
    }
  }
}

template <class T> void multiply(const LinearArgs& a) {
  using st = typename T::st;
  Linear j = {a, round_up(blocks_of(a.features, T::PER_COLUMN), W), nullptr};
  Parts parts;
  parts.add(size_t(round_up(a.rows, AT_ONCE) * j.columns) * 4);
  i32* packed = reinterpret_cast<i32*>(call_arena().take(parts));
  j.rows = packed;
  for (i64 row = 0; row < a.rows; row += AT_ONCE) {
    const int there = together(std::min(AT_ONCE, a.rows - row));
    for (i64 c = 0; c < j.columns; c += W)
      for (i64 m = row; m < row + there; ++m, packed += W) {
        const i64 at = c * T::PER_COLUMN, left = m < a.rows ? a.features - at : 0;
        Isa::store_bits(packed, some_columns<T>(static_cast<const st*>(a.input) + (left ? m * a.features + at : 0), left));
      }
  }
  run_tasks(blocks_of(a.width, W), linear_task<T>, &j, threads_for(2.0 * a.rows * a.features * a.width, a.threads));
  call_arena().give_back();
}
