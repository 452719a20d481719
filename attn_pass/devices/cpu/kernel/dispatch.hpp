// Which instruction set runs: asked of the processor when the first attention runs, so that one binary serves many.
// ATTN_PASS_CPU_ISA names a lesser one, for tests.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
namespace attn_pass_cpu {
namespace {

enum Set { AMX, AVX512_BF16, AVX512, AVX2, PLAIN };

// Whether this process may multiply in tiles: Linux gives their registers to those that ask.
inline bool has_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long ask = 0x1023, tile_data = 18;
  u32 a, b, c, d;
  constexpr u32 bf16_and_tiles = (1u << 22) | (1u << 24);
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16_and_tiles) == bf16_and_tiles &&
         syscall(SYS_arch_prctl, ask, tile_data) == 0;
#else
  return false;
#endif
}

#if defined(__x86_64__)
// Whether it converts float16: GCC before 11 and Clang before 18 have no name for that.
inline bool has_f16c() {
  u32 a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}
#endif

// The best of the processor's sets; `in_tiles` and `in_pairs` where the kernel has one that multiplies in tiles, or pairs.
inline Set best_set(bool in_tiles, bool in_pairs) {
  Set best = PLAIN;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) best = AVX2;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (best == AVX2 && wide) best = AVX512;
  // Intel's processors multiply pairs of bfloat16 at half the rate of floats, AMD's at twice.
  const bool pairs = in_pairs && wide && __builtin_cpu_supports("avx512bf16");
  if (best == AVX512 && pairs && __builtin_cpu_is("amd")) best = AVX512_BF16;
  const bool tiles = in_tiles && wide && __builtin_cpu_supports("avx512bf16") && has_tiles();
  if (tiles) best = AMX;
  if (const char* named = std::getenv("ATTN_PASS_CPU_ISA")) {
    const char* names[] = {"amx", "avx512_bf16", "avx512", "avx2", "plain"};
    const bool has[] = {tiles, pairs, wide, best != PLAIN, true};
    for (int i = 0; i < 5; ++i)
      if (!std::strcmp(named, names[i]) && has[i]) best = Set(i);
  }
#endif
  return best;
}

}  // namespace
}  // namespace attn_pass_cpu
