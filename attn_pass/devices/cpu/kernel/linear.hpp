// A linear layer. Of few rows every weight is read once, where it lies, and the memory's rate decides. Tasks take W rows of
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

// ---- weights that lie by columns: sums of SOME results stay in the first cache, and rows of weights are added up in them
constexpr i64 SOME = 128;

// += up to W columns of the input of MR rows (pairs of features, or features) times as many rows of weights, as they lie, of
// which NR vectors of results are computed; the last perhaps not whole. The rows that follow are fetched in between.
template <class T, int MR, int NR>
ATTN_ONCE void add_rows_of(const i32* x, const typename T::st* w, i64 ldw, i64 features, i64 elements, float* sums) {
  vec c[MR][NR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < NR; ++i) c[m][i] = Isa::zero();  // on their own: in one chain the roundings would add up
  const bool whole = elements >= NR * W;
  for (i64 k = 0; k < features; k += T::PER_COLUMN, w += T::PER_COLUMN * ldw) {
    vec weights[NR];
    for (int i = 0; i < T::PER_COLUMN; ++i)
      for (size_t byte = 0; byte < NR * W * sizeof(*w); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(w + (T::PER_COLUMN * W + i) * ldw) + byte, 0, 2);
    if constexpr (T::PAIR) {
      const bool two = k + 1 < features;
#pragma GCC unroll 2
      for (int i = 0; i < NR; i += 2) {
        vec a, b = Isa::zero();
        a = whole ? whole_columns<T>(w + i * W) : some_columns<T>(w + i * W, elements - i * W);
        if (two) b = whole ? whole_columns<T>(w + ldw + i * W) : some_columns<T>(w + ldw + i * W, elements - i * W);
        Isa::interleave(a, b, weights[i], weights[i + 1]);
      }
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < NR; ++i) weights[i] = whole ? whole_columns<T>(w + i * W) : some_columns<T>(w + i * W, elements - i * W);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const vec row = Isa::splat_bits(x + m * W + k / T::PER_COLUMN);
#pragma GCC unroll 4
      for (int i = 0; i < NR; ++i) c[m][i] = plus_product<T::PAIR>(c[m][i], row, weights[i]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < NR; ++i) {
      float* at = sums + m * SOME + i * W;
      Isa::store(at, Isa::add(Isa::load(at), c[m][i]));
    }
}

template <class T, int MR> ATTN_INLINE void some_results_by_columns(const Linear& j, i64 row, i64 rows, i64 from, i64 n) {
  using st = typename T::st;
  constexpr int NR = WEIGHTS<MR>;
  constexpr i64 BLOCK = W * T::PER_COLUMN;
  static_assert(SOME % (NR * W) == 0, "a step would leave the sums");
  const LinearArgs& a = j.a;
  float sums[MR * SOME] = {};
  const i32* x = j.rows + row * j.columns;
  for (i64 k = 0; k < a.features; k += BLOCK, x += MR * W) {
    const st* weights = static_cast<const st*>(a.weight) + k * a.width + from;
    for (i64 i = 0; i < n; i += NR * W)
      add_rows_of<T, MR, NR>(x, weights + i, a.width, std::min(BLOCK, a.features - k), n - i, sums + i);
  }
  for (i64 m = 0; m < rows; ++m)
    for (i64 i = 0; i < n; i += W) {
      float bias[W] = {};
      const i64 there = std::min<i64>(W, n - i);
      for (i64 e = 0; e < there && a.bias; ++e) bias[e] = T::one(static_cast<const st*>(a.bias)[from + i + e]);
      narrow_some<T>(static_cast<st*>(a.out) + (row + m) * a.width + from + i, Isa::add(Isa::load(sums + m * SOME + i), Isa::load(bias)), there);
    }
}

// ---- both
ATTN_INLINE i64 results_of(const LinearArgs& a) { return a.by_columns ? SOME : W; }  // of a task

template <class T> void linear_task(const void* job, i64 task) {
  const Linear& j = *static_cast<const Linear*>(job);
  const i64 each = results_of(j.a), from = task * each, n = std::min<i64>(each, j.a.width - from);
  for (i64 row = 0; row < j.a.rows; row += AT_ONCE) {
    const i64 rows = std::min(AT_ONCE, j.a.rows - row);
    const auto some = [&](auto MR) ATTN_LAMBDA {
      if (j.a.by_columns) some_results_by_columns<T, MR>(j, row, rows, from, n);
      else some_results<T, MR>(j, row, rows, from, n);
    };
    switch (together(rows)) {
      case 1: some(Number<1>{}); break;
      case 2: some(Number<2>{}); break;
      case 4: some(Number<4>{}); break;
      default: some(Number<8>{});
    }
  }
}

template <class T> void multiply_few(const LinearArgs& a) {
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
  run_tasks(blocks_of(a.width, results_of(a)), linear_task<T>, &j, threads_for(2.0 * a.rows * a.features * a.width, a.threads));
  call_arena().give_back();
}

template <class T> void multiply(const LinearArgs& a) {
  if (a.rows > MOST_FEW) multiply_many<T>(a);
  else multiply_few<T>(a);
}
