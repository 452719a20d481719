// Which instruction set runs: asked of the processor when the first attention runs, so that one binary serves many.
// ATTN_PASS_CPU_ISA names a lesser one, for tests.
namespace attn_pass_cpu {
namespace {

enum Set { AVX512_BF16, AVX512, AVX2, PLAIN };

inline Set best_set() {
  Set best = PLAIN;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) best = AVX2;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (best == AVX2 && wide) best = AVX512;
  // Intel's processors multiply pairs of bfloat16 at half the rate of floats, AMD's at twice.
  if (best == AVX512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd")) best = AVX512_BF16;
  if (const char* named = std::getenv("ATTN_PASS_CPU_ISA")) {
    const char* names[] = {"avx512_bf16", "avx512", "avx2", "plain"};
    const bool has[] = {wide && bool(__builtin_cpu_supports("avx512bf16")), wide, best != PLAIN, true};
    for (int i = 0; i < 4; ++i)
      if (!std::strcmp(named, names[i]) && has[i]) best = Set(i);
  }
#endif
  return best;
}

}  // namespace
}  // namespace attn_pass_cpu
