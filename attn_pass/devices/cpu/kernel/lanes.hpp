// Few rows in the lanes of vectors: the scores of a key are one vector, a row in each lane, and so are a column's results.
// Elements of keys and values are read one by one, for all lanes at once, so that no key is transposed and nothing is summed
// across lanes. This is for panels of which every row keeps every key. V has a lane for each row: `Isa`, or its `Half`.
constexpr i64 FETCH = 64;  // keys by which prefetches run ahead, into the second cache

// Where what a task reads and writes here lies.
struct LanesMemory {
  i32* queries;        // (columns, lanes)
  float* scores;       // (PANEL, lanes), and in their place the weights, (PANEL / PER_COLUMN, lanes)
  float* results;      // (ldv, lanes)
  i32 *keys, *values;  // widened, or in pairs
};
// c += a row of lanes times one column of a key or of a value.
template <bool PAIR, class V> ATTN_INLINE auto plus_product_of(typename V::vec c, typename V::vec row, const i32* column) {
  if constexpr (PAIR) return V::dot_of(c, row, column);
  else return V::fma_of(c, row, column);
}

// Queries (rows, columns) -> (columns, lanes), zeros for rows that are not there.
template <class V> ATTN_INLINE void into_lanes(const i32* q, i64 ldq, i64 columns, i64 rows, i32* out) {
  for (i64 c = 0; c < columns; c += W) {
    vec x[W];
    for (i64 r = 0; r < W; ++r) x[r] = r < rows ? Isa::load_bits(q + r * ldq + c) : Isa::zero();
    Isa::transpose(x);
    for (i64 i = 0; i < W; ++i) V::store(reinterpret_cast<float*>(out) + (c + i) * V::W, V::first_of(x[i]));
  }
}
// Results (columns, lanes) -> (rows, columns).
template <class V> ATTN_INLINE void out_of_lanes(const float* in, i64 ldv, i64 rows, float* o) {
  for (i64 d = 0; d < ldv; d += W) {
    vec x[W];
    for (i64 i = 0; i < W; ++i) x[i] = V::repeated(V::load(in + (d + i) * V::W));
    Isa::transpose(x);
    for (i64 r = 0; r < rows; ++r) Isa::store(o + r * ldv + d, x[r]);
  }
}

// The scores of MR keys, whose rows are so many bytes apart; in two sums each, since a product waits for the one before.
template <bool PAIR, int MR, class V>
ATTN_INLINE typename V::vec score_keys(const i32* q, i64 columns, const char* keys, i64 bytes, float* s, typename V::vec largest, Lines& next) {
  typename V::vec even[MR], odd[MR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) even[m] = odd[m] = V::zero();
  const auto add = [&](typename V::vec (&c)[MR], i64 at) ATTN_LAMBDA {
    const auto row = V::load_bits(q + at * V::W);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) c[m] = plus_product_of<PAIR, V>(c[m], row, reinterpret_cast<const i32*>(keys + m * bytes) + at);
  };
  i64 at = 0;
  for (; at + 2 <= columns; at += 2) next.step(), add(even, at), add(odd, at + 1);
  if (at < columns) add(even, at);
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    const auto score = V::add(even[m], odd[m]);
    V::store(s + m * V::W, score);
    largest = V::max(score, largest);
  }
  return largest;
}
// Those of a panel, and the largest of each row. Rows of keys are columns as they lie, or are widened; those ahead are fetched.
template <class T, class V>
ATTN_ONCE vec score_lanes(const LanesMemory& at, i64 columns, const typename T::st* k, i64 stride, i64 dim, bool more) {
  constexpr int MR = 8;
  constexpr bool AS_IT_LIES = T::PAIR || T::CODE == FLOAT32;
  typename V::vec largest = V::set1(-std::numeric_limits<float>::infinity());
  Lines next = lines_of<T>(k + FETCH * stride, stride, more ? PANEL : 0, dim, PANEL / MR * (columns / 2));
  for (i64 key = 0; key < PANEL; key += MR) {
    const auto* rows = k + key * stride;
    const char* bytes = reinterpret_cast<const char*>(rows);
    i64 distance = stride * i64(sizeof(*k));
    if constexpr (!AS_IT_LIES) {
      distance = round_up(columns, W) * 4;
      bytes = reinterpret_cast<const char*>(at.keys);
      for (i64 m = 0; m < MR; ++m)
        for (i64 c = 0; c < columns; c += W) Isa::store_bits(at.keys + m * (distance / 4) + c, some_columns<T>(rows + m * stride + c, columns - c));
    }
    largest = score_keys<T::PAIR, MR, V>(at.queries, columns, bytes, distance, at.scores + key * V::W, largest, next);
  }
  return V::repeated(largest);
}

// Scores -> weights, in place; returns the sum of this panel alone: over all keys in one chain the roundings would add up.
// A pair of keys is one column where pairs are multiplied.
template <class T, class V> ATTN_INLINE vec weigh_lanes(float* s, float factor, vec off) {
  vec sum = Isa::zero();
  const vec by = Isa::set1(factor);
  i32* p = reinterpret_cast<i32*>(s);
  const auto weight = [&](i64 i) ATTN_LAMBDA { return weight_of<T>(Isa::mul(Isa::sub(Isa::load(s + i), off), by)); };
#pragma GCC unroll 4
  for (i64 i = 0; i < PANEL * V::W; i += 2 * W) {
    const vec a = weight(i), b = weight(i + W);
    sum = Isa::add(sum, Isa::add(a, b));
    if constexpr (T::PAIR) {
      Isa::store_bits(p + i / 2, V::paired(a, b));
    } else {
      Isa::store(s + i, a);
      Isa::store(s + i + W, b);
    }
  }
  return sum;
}

// Weights times values, 16 columns at a time; lines of the values ahead are fetched in between.
template <bool PAIR, class V>
ATTN_ONCE void add_lanes(const i32* weights, const i32* values, i64 ld, i64 count, i64 ldv, float* results, Lines next) {
  constexpr int MR = 16;
  for (i64 d = 0; d < ldv; d += MR) {
    typename V::vec c[MR];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) c[m] = V::zero();
    for (i64 k = 0; k < count; ++k) {
      next.step();
      const auto row = V::load_bits(weights + k * V::W);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) c[m] = plus_product_of<PAIR, V>(c[m], row, values + k * ld + d + m);
    }
    float* at = results + d * V::W;
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) V::store(at + m * V::W, V::add(V::load(at + m * V::W), c[m]));
  }
}

// A panel of keys and values.
template <class T, class V>
ATTN_ONCE void attend_lanes(const Args& a, const Scale& scale, const LanesMemory& at, i64 columns, i64 ldv, const typename T::st* k,
                            const typename T::st* v, bool more, typename T::st* room, RunningLanes& running) {
  const vec top = score_lanes<T, V>(at, columns, k, a.k.stride[2], a.D, more);
  vec by;
  if (raise(running, top, scale.factor, by))
    for (i64 i = 0; i < ldv * V::W; i += W) Isa::store(at.results + i, Isa::mul(by, Isa::load(at.results + i)));
  running.sum = Isa::add(running.sum, weigh_lanes<T, V>(at.scores, scale.factor, taken_off(running)));
  const i32* values = at.values;
  i64 ld = ldv;
  if (T::CODE == FLOAT32 && a.DV % W == 0) values = reinterpret_cast<const i32*>(v), ld = a.v.stride[2];
  else pack_values<T, false>(v, a.v.stride, PANEL, a.DV, ldv, room, at.values);
  constexpr i64 COUNT = PANEL / T::PER_COLUMN;
  const Lines next = lines_of<T>(v + PANEL * a.v.stride[2], a.v.stride[2], more ? PANEL : 0, a.DV, COUNT * (ldv / W));
  add_lanes<T::PAIR, V>(reinterpret_cast<const i32*>(at.scores), values, ld, COUNT, ldv, at.results, next);
}
