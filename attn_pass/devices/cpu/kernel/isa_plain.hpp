// Any processor: vectors of 4 in the compiler's own terms, which it turns into NEON, SSE or whatever there is.
struct Isa {
  typedef float vec __attribute__((vector_size(16)));
  typedef i32 whole __attribute__((vector_size(16)));
#if defined(__aarch64__) || defined(ATTN_AS_ON_ARM)
  static constexpr int W = 4, NR = 4;
#else
  static constexpr int W = 4, NR = 2;
#endif
  static constexpr bool PAIRS = false;

  ATTN_INLINE vec zero() { return vec{0, 0, 0, 0}; }
  ATTN_INLINE vec set1(float x) { return vec{x, x, x, x}; }
  ATTN_INLINE vec load(const float* p) {
    vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  ATTN_INLINE void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }
  ATTN_INLINE vec load_bits(const i32* p) {
    vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  ATTN_INLINE void store_bits(i32* p, vec x) { std::memcpy(p, &x, sizeof x); }
  ATTN_INLINE vec splat_bits(const i32* p) {
    float x;
    std::memcpy(&x, p, 4);
    return set1(x);
  }
  ATTN_INLINE vec add(vec a, vec b) { return a + b; }
  ATTN_INLINE vec sub(vec a, vec b) { return a - b; }
  ATTN_INLINE vec mul(vec a, vec b) { return a * b; }
  ATTN_INLINE vec div(vec a, vec b) { return a / b; }
  ATTN_INLINE vec fma(vec a, vec b, vec c) { return a * b + c; }
  ATTN_INLINE vec chosen(whole lanes, vec a, vec b) { return (vec)(((whole)a & lanes) | ((whole)b & ~lanes)); }
  ATTN_INLINE vec max(vec a, vec b) { return chosen(a > b, a, b); }  // b where either is NaN
  ATTN_INLINE vec round(vec a) {
    for (int i = 0; i < W; ++i) a[i] = std::nearbyint(a[i]);
    return a;
  }
  ATTN_INLINE vec within_exp2(vec t) { return max(set1(-200.0f), t); }  // what `times_exp2` takes, of any number
  ATTN_INLINE vec times_exp2(vec a, vec n) {  // n whole; below the normal numbers, 0
    whole power;
    for (int i = 0; i < W; ++i) {
      const float least = n[i] > -127.0f ? n[i] : -127.0f;
      power[i] = (i32(least < 128.0f ? least : 128.0f) + 127) << 23;
    }
    return a * (vec)power;
  }
  ATTN_INLINE float reduce_add(vec a) { return (a[0] + a[1]) + (a[2] + a[3]); }
  ATTN_INLINE float reduce_max(vec a) { return std::max(std::max(a[0], a[1]), std::max(a[2], a[3])); }
  ATTN_INLINE vec keep(u32 bits, vec a, vec otherwise) {
    const whole lanes = {1, 2, 4, 8}, wanted = {i32(bits), i32(bits), i32(bits), i32(bits)};
    return chosen((wanted & lanes) == lanes, a, otherwise);
  }
  ATTN_INLINE u32 differ(vec a, vec b) {
    u32 bits = 0;
    for (int i = 0; i < W; ++i) bits |= u32(a[i] != b[i]) << i;
    return bits;
  }
  ATTN_INLINE u32 above(vec a, vec b) {  // or NaN
    u32 bits = 0;
    for (int i = 0; i < W; ++i) bits |= u32(!(a[i] <= b[i])) << i;
    return bits;
  }

  ATTN_INLINE vec load_f16(const u16* p) { return vec{from_f16(p[0]), from_f16(p[1]), from_f16(p[2]), from_f16(p[3])}; }
  ATTN_INLINE vec load_bf16(const u16* p) {
    return vec{from_bf16(p[0]), from_bf16(p[1]), from_bf16(p[2]), from_bf16(p[3])};
  }
  // n elements that are there, zeros behind them.
  template <class S> struct Part {
    S at[W] = {};
    ATTN_METHOD Part(const S* p, i64 n) { std::memcpy(at, p, size_t(n) * sizeof(S)); }
  };
  ATTN_INLINE vec load_some(const float* p, i64 n) { return load(Part<float>(p, n).at); }
  ATTN_INLINE vec load_some_f16(const u16* p, i64 n) { return load_f16(Part<u16>(p, n).at); }
  ATTN_INLINE vec load_some_bf16(const u16* p, i64 n) { return load_bf16(Part<u16>(p, n).at); }
  ATTN_INLINE vec load_some_pairs(const u16*, i64) { return zero(); }
  ATTN_INLINE void store_f16(u16* p, vec x) {
    for (int i = 0; i < W; ++i) p[i] = to_f16(x[i]);
  }
  ATTN_INLINE void store_bf16(u16* p, vec x) {
    for (int i = 0; i < W; ++i) p[i] = to_bf16(x[i]);
  }
  ATTN_INLINE u64 nonzero_bytes(const u8* p) {  // a bit for each of 64
    u64 word = 0;
    for (int i = 0; i < 64; ++i) word |= u64(p[i] != 0) << i;
    return word;
  }

  typedef u64 lanes __attribute__((vector_size(16)));  // a number of 32 bits in each 64; what is above it counts for nothing
  static constexpr int LANES = 2;
  ATTN_INLINE lanes each(u32 x) { return lanes{x, x}; }
  ATTN_INLINE lanes counted(u32 first) { return lanes{first, first + u64(1)}; }
  ATTN_INLINE lanes product(lanes a, lanes b) { return (a & 0xffffffff) * (b & 0xffffffff); }
  ATTN_INLINE lanes upper(lanes a) { return a >> 32; }
  ATTN_INLINE lanes differing(lanes a, lanes b, lanes c) { return a ^ b ^ c; }
  ATTN_INLINE u32 at_least(lanes a, u32 least) { return u32(u32(a[0]) >= least) | u32(u32(a[1]) >= least) << 1; }

  ATTN_INLINE void transpose(vec (&x)[W]) {
    for (int i = 0; i < W; ++i)
      for (int j = 0; j < i; ++j) {
        const float t = x[i][j];
        x[i][j] = x[j][i];
        x[j][i] = t;
      }
  }
  // Lane i: what `join` makes of the lanes of x[i]. Of the first N alone; other lanes are of any.
  template <int N, class Join> ATTN_INLINE vec joined(const vec* x, const Join& join) {
    vec t[W];
    for (int i = 0; i < W; ++i) t[i] = x[i < N ? i : 0];
    transpose(t);
    return join(join(t[0], t[1]), join(t[2], t[3]));
  }

  ATTN_INLINE vec dot(vec c, vec a, vec b) { return fma(a, b, c); }
  ATTN_INLINE void store_pairs(i32*, vec, vec) {}
  ATTN_INLINE void interleave(vec a, vec b, vec& low, vec& high) { low = a, high = b; }
  ATTN_INLINE bool finite_pairs(vec) { return true; }
  using Half = void;
};
