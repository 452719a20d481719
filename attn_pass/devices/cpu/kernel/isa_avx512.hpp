// AVX-512 (F, BW, VL, DQ): vectors of 16. With ATTN_BF16_DOTS also products of bfloat16 pairs.
struct Isa {
  using vec = __m512;
  static constexpr int W = 16, NR = 4;
  static constexpr bool PAIRS = ATTN_BF16_DOTS;  // whether pairs of bfloat16 are multiplied as they are

  ATTN_INLINE vec zero() { return _mm512_setzero_ps(); }
  ATTN_INLINE vec first_of(vec x) { return x; }
  ATTN_INLINE vec repeated(vec x) { return x; }  // as often as a whole vector has it
  ATTN_INLINE vec set1(float x) { return _mm512_set1_ps(x); }
  ATTN_INLINE vec load(const float* p) { return _mm512_loadu_ps(p); }
  ATTN_INLINE void store(float* p, vec x) { _mm512_storeu_ps(p, x); }
  ATTN_INLINE vec load_bits(const i32* p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
  ATTN_INLINE void store_bits(i32* p, vec x) { _mm512_storeu_si512(p, _mm512_castps_si512(x)); }
  ATTN_INLINE vec splat_bits(const i32* p) { return _mm512_castsi512_ps(_mm512_set1_epi32(*p)); }
  ATTN_INLINE vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
  ATTN_INLINE vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
  ATTN_INLINE vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
  ATTN_INLINE vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
  ATTN_INLINE vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
  ATTN_INLINE vec max(vec a, vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  ATTN_INLINE vec round(vec a) { return _mm512_roundscale_ps(a, 8); }
  ATTN_INLINE vec within_exp2(vec t) { return t; }  // what `times_exp2` takes, of any number
  ATTN_INLINE vec times_exp2(vec a, vec n) {  // n whole; below the normal numbers, which stall the processor, 0
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), a, n);
  }
  ATTN_INLINE vec fraction(vec a) { return _mm512_reduce_ps(a, 9); }  // a less its floor
  ATTN_INLINE vec times_exp2_floor(vec a, vec n) {                     // 0 where `times_exp2` is
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), a, n);
  }
  // `fma` and `dot` by a column that is read for all lanes at once: GCC reads it first, which takes a third of a product more.
  ATTN_INLINE vec fma_of(vec c, vec a, const i32* b) {
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(*b));
    return c;
  }
  ATTN_INLINE float reduce_add(vec a) { return _mm512_reduce_add_ps(a); }
  ATTN_INLINE float reduce_max(vec a) { return _mm512_reduce_max_ps(a); }
  ATTN_INLINE vec keep(u32 bits, vec a, vec otherwise) { return _mm512_mask_mov_ps(otherwise, __mmask16(bits), a); }
  ATTN_INLINE u32 differ(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
  ATTN_INLINE u32 above(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }  // or NaN

  ATTN_INLINE vec load_f16(const u16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  ATTN_INLINE vec load_bf16(const u16* p) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  }
  // n elements that are there, zeros behind them.
  ATTN_INLINE __m256i some_halves(const u16* p, i64 n) { return _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p); }
  ATTN_INLINE vec load_some(const float* p, i64 n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
  ATTN_INLINE vec load_some_f16(const u16* p, i64 n) { return _mm512_cvtph_ps(some_halves(p, n)); }
  ATTN_INLINE vec load_some_bf16(const u16* p, i64 n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(some_halves(p, n)), 16));
  }
  ATTN_INLINE vec load_some_pairs(const u16* p, i64 n) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(__mmask32((u64(1) << n) - 1), p));
  }
  ATTN_INLINE void store_f16(u16* p, vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#if ATTN_BF16_DOTS
  // Numbers below the normal ones become 0, which is what products take them for.
  ATTN_INLINE void store_bf16(u16* p, vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
#else
  ATTN_INLINE void store_bf16(u16* p, vec x) {
    const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    rounded = _mm512_srli_epi32(rounded, 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
  }
#endif
  ATTN_INLINE u64 nonzero_bytes(const u8* p) {  // a bit for each of 64
    const __m512i x = _mm512_loadu_si512(p);
    return _mm512_test_epi8_mask(x, x);
  }

  using lanes = __m512i;  // a number of 32 bits in each 64; what is above it counts for nothing
  static constexpr int LANES = 8;
  ATTN_INLINE lanes each(u32 x) { return _mm512_set1_epi64(x); }
  ATTN_INLINE lanes counted(u32 first) { return _mm512_add_epi64(each(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)); }
  ATTN_INLINE lanes product(lanes a, lanes b) { return _mm512_mul_epu32(a, b); }
  ATTN_INLINE lanes upper(lanes a) { return _mm512_srli_epi64(a, 32); }
  ATTN_INLINE lanes differing(lanes a, lanes b, lanes c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
  ATTN_INLINE u32 at_least(lanes a, u32 least) { return _mm512_cmpge_epu64_mask(_mm512_and_si512(a, each(~u32(0))), each(least)); }

  ATTN_INLINE void transpose(vec (&x)[W]) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = _mm512_castps_si512(x[i]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
      r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
      r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
      r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
      t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
      t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
      t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
      x[8 + i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
      x[4 + i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
      x[12 + i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
    }
  }
  // Lane i: what `join` makes of the lanes of x[i]. Of the first N alone, an even number; other lanes are of any.
  template <int N, class Join> ATTN_INLINE vec joined(const vec* x, const Join& join) {
    vec t[8], u[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      t[i] = 2 * i < N ? join(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1])) : t[0];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
      u[i] = 4 * i < N ? join(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b))) : u[0];
    }
    const vec v0 = join(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
    const vec v1 = N > 8 ? join(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd)) : v0;
    return join(_mm512_shuffle_f32x4(v0, v1, 0x88), _mm512_shuffle_f32x4(v0, v1, 0xdd));
  }

#if ATTN_BF16_DOTS
  ATTN_INLINE vec dot(vec c, vec a, vec b) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  ATTN_INLINE vec dot_of(vec c, vec a, const i32* b) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(*b));
    return c;
  }
  ATTN_INLINE void store_pairs(i32* p, vec even_half, vec odd_half) {  // 32 floats in order as bfloat16
    _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd_half, even_half)));
  }
  ATTN_INLINE void interleave(vec a, vec b, vec& low, vec& high) {  // 32 elements of two rows -> 32 pairs
    const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    const __m512i lo = _mm512_unpacklo_epi16(x, y), hi = _mm512_unpackhi_epi16(x, y);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    low = _mm512_castsi512_ps(_mm512_permutex2var_epi64(lo, first, hi));
    high = _mm512_castsi512_ps(_mm512_permutex2var_epi64(lo, second, hi));
  }
  // 32 floats as bfloat16: of lanes `first` and `first + apart`, of the two after these, and so on.
  ATTN_INLINE vec paired(vec a, vec b, int first_of_a, int first_of_b, int apart) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), both = _mm256_set1_epi32(0x10001);
    const auto from = [&](int first) ATTN_LAMBDA {
      return _mm256_add_epi32(_mm256_mullo_epi32(lanes, both), _mm256_set1_epi32(first | (first + apart) << 16));
    };
    const __m512i order = _mm512_inserti64x4(_mm512_castsi256_si512(from(first_of_a)), from(first_of_b), 1);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a))));
  }
  ATTN_INLINE vec paired(vec a, vec b) { return paired(a, b, 0, 8, 16); }  // a lane's of `a` with the lane's of `b`
  ATTN_INLINE bool finite_pairs(vec a) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    return !_mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_castps_si512(a), exponent), exponent);
  }
#else
  ATTN_INLINE vec dot(vec c, vec a, vec b) { return fma(a, b, c); }
  ATTN_INLINE void store_pairs(i32*, vec, vec) {}
  ATTN_INLINE void interleave(vec a, vec b, vec& low, vec& high) { low = a, high = b; }
  ATTN_INLINE bool finite_pairs(vec) { return true; }
#endif

  // Vectors of half as many lanes, for columns that fill no more of the last vector.
  struct Half {
    using vec = __m256;
    static constexpr int W = 8;
    ATTN_INLINE vec zero() { return _mm256_setzero_ps(); }
    ATTN_INLINE vec set1(float x) { return _mm256_set1_ps(x); }
    ATTN_INLINE vec first_of(Isa::vec x) { return _mm512_castps512_ps256(x); }
    ATTN_INLINE Isa::vec repeated(vec x) { return _mm512_broadcast_f32x8(x); }
    ATTN_INLINE vec max(vec a, vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
    ATTN_INLINE vec load(const float* p) { return _mm256_loadu_ps(p); }
    ATTN_INLINE void store(float* p, vec x) { _mm256_storeu_ps(p, x); }
    ATTN_INLINE vec load_bits(const i32* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
    ATTN_INLINE vec splat_bits(const i32* p) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
    ATTN_INLINE vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
    ATTN_INLINE vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
    ATTN_INLINE vec fma_of(vec c, vec a, const i32* b) {
      __asm__("vfmadd231ps %2%{1to8%}, %1, %0" : "+v"(c) : "v"(a), "m"(*b));
      return c;
    }
#if ATTN_BF16_DOTS
    ATTN_INLINE vec dot(vec c, vec a, vec b) {
      return _mm256_dpbf16_ps(c, reinterpret_cast<__m256bh>(a), reinterpret_cast<__m256bh>(b));
    }
    ATTN_INLINE vec dot_of(vec c, vec a, const i32* b) {
      __asm__("vdpbf16ps %2%{1to8%}, %1, %0" : "+v"(c) : "v"(a), "m"(*b));
      return c;
    }
    ATTN_INLINE Isa::vec paired(Isa::vec a, Isa::vec b) { return Isa::paired(a, b, 0, 16, 8); }  // of a half with the other
#else
    ATTN_INLINE vec dot(vec c, vec a, vec b) { return fma(a, b, c); }
#endif
  };
};
