// AVX2 with FMA and F16C: vectors of 8.
struct Isa {
  using vec = __m256;
  static constexpr int W = 8, NR = 2;
  static constexpr bool PAIRS = false;

  ATTN_INLINE vec zero() { return _mm256_setzero_ps(); }
  ATTN_INLINE vec set1(float x) { return _mm256_set1_ps(x); }
  ATTN_INLINE vec load(const float* p) { return _mm256_loadu_ps(p); }
  ATTN_INLINE void store(float* p, vec x) { _mm256_storeu_ps(p, x); }
  ATTN_INLINE vec load_bits(const i32* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
  ATTN_INLINE void store_bits(i32* p, vec x) { _mm256_storeu_ps(reinterpret_cast<float*>(p), x); }
  ATTN_INLINE vec splat_bits(const i32* p) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
  ATTN_INLINE vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
  ATTN_INLINE vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
  ATTN_INLINE vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
  ATTN_INLINE vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
  ATTN_INLINE vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
  ATTN_INLINE vec max(vec a, vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  ATTN_INLINE vec round(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  ATTN_INLINE vec within_exp2(vec t) { return _mm256_max_ps(set1(-200.0f), t); }  // what `times_exp2` takes, of any number
  ATTN_INLINE vec times_exp2(vec a, vec n) {  // n whole; below the normal numbers, 0
    const __m256 least = _mm256_max_ps(set1(-127.0f), _mm256_min_ps(n, set1(128.0f)));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(least), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(power));
  }
  ATTN_INLINE float reduce_add(vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  ATTN_INLINE float reduce_max(vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  ATTN_INLINE vec keep(u32 bits, vec a, vec otherwise) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(i32(bits)), lanes), lanes);
    return _mm256_blendv_ps(otherwise, a, _mm256_castsi256_ps(chosen));
  }
  ATTN_INLINE u32 differ(vec a, vec b) { return u32(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ))); }
  ATTN_INLINE u32 above(vec a, vec b) { return u32(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ))); }  // or NaN

  ATTN_INLINE vec load_f16(const u16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  ATTN_INLINE vec load_bf16(const u16* p) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  }
  // n elements that are there, zeros behind them.
  template <class S> struct Part {
    S at[W] = {};
    ATTN_METHOD Part(const S* p, i64 n) { std::memcpy(at, p, size_t(n) * sizeof(S)); }
  };
  ATTN_INLINE vec load_some(const float* p, i64 n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(i32(n)), lanes));
  }
  ATTN_INLINE vec load_some_f16(const u16* p, i64 n) { return load_f16(Part<u16>(p, n).at); }
  ATTN_INLINE vec load_some_bf16(const u16* p, i64 n) { return load_bf16(Part<u16>(p, n).at); }
  ATTN_INLINE vec load_some_pairs(const u16*, i64) { return zero(); }
  ATTN_INLINE void store_f16(u16* p, vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  ATTN_INLINE void store_bf16(u16* p, vec x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    rounded = _mm256_srli_epi32(rounded, 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }
  ATTN_INLINE u64 nonzero_bytes(const u8* p) {  // a bit for each of 64
    u64 word = 0;
    const __m256i none = _mm256_setzero_si256();
    for (int i = 0; i < 2; ++i) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
      word |= u64(u32(~_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, none)))) << (32 * i);
    }
    return word;
  }

  using lanes = __m256i;  // a number of 32 bits in each 64; what is above it counts for nothing
  static constexpr int LANES = 4;
  ATTN_INLINE lanes each(u32 x) { return _mm256_set1_epi64x(x); }
  ATTN_INLINE lanes counted(u32 first) { return _mm256_add_epi64(each(first), _mm256_setr_epi64x(0, 1, 2, 3)); }
  ATTN_INLINE lanes product(lanes a, lanes b) { return _mm256_mul_epu32(a, b); }
  ATTN_INLINE lanes upper(lanes a) { return _mm256_srli_epi64(a, 32); }
  ATTN_INLINE lanes differing(lanes a, lanes b, lanes c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
  ATTN_INLINE u32 at_least(lanes a, u32 least) {
    const __m256i below = _mm256_cmpgt_epi64(each(least), _mm256_and_si256(a, each(~u32(0))));
    return u32(~_mm256_movemask_pd(_mm256_castsi256_pd(below))) & 15;
  }

  ATTN_INLINE void transpose(vec (&x)[W]) {
    vec t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
      t[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
      u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
      u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
      u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
      x[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
    }
  }
  // Lane i: what `join` makes of the lanes of x[i]. Of the first N alone, an even number; other lanes are of any.
  template <int N, class Join> ATTN_INLINE vec joined(const vec* x, const Join& join) {
    vec t[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      t[i] = 2 * i < N ? join(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1])) : t[0];
    const vec a = join(_mm256_shuffle_ps(t[0], t[1], 0x44), _mm256_shuffle_ps(t[0], t[1], 0xee));
    const vec b = N > 4 ? join(_mm256_shuffle_ps(t[2], t[3], 0x44), _mm256_shuffle_ps(t[2], t[3], 0xee)) : a;
    return join(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }

  ATTN_INLINE vec dot(vec c, vec a, vec b) { return fma(a, b, c); }
  ATTN_INLINE void store_pairs(i32*, vec, vec) {}
  ATTN_INLINE void interleave(vec a, vec b, vec& low, vec& high) { low = a, high = b; }
  ATTN_INLINE bool finite_pairs(vec) { return true; }
  using Half = void;
};
