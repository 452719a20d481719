// What every instruction set shares: the call, memory that is kept between calls, and tasks on OpenMP's threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ATTN_INLINE static inline __attribute__((always_inline))
#define ATTN_METHOD inline __attribute__((always_inline))
#define ATTN_LAMBDA __attribute__((always_inline))
#define ATTN_ONCE static __attribute__((noinline))  // large, and called from several places: the compiler's time counts

namespace attn_pass_cpu {
namespace {  // of each library its own: several may be loaded, of several versions

using i64 = int64_t;
using i32 = int32_t;
using u64 = uint64_t;
using u32 = uint32_t;
using u16 = uint16_t;
using u8 = uint8_t;

enum Element { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum FullyMasked { GIVES_NAN = 0, GIVES_ZERO = 1, GIVES_MEAN = 2 };  // what a fully masked row becomes

constexpr int CAPTURED = 8, LOOKUPS = 4;

// The number of these bits: generated code passes all numbers as integers.
inline double double_of(i64 high, i64 low) {
  const u64 bits = static_cast<u64>(high) << 32 | static_cast<u64>(low);
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A tensor of four dimensions; strides count elements, and are 0 where it is broadcast.
struct Operand {
  const void* data;
  i64 stride[4];
};

// What is looked up for a row and a key: of M numbers in a table, (B, H, L, S, M), the one that `place` says.
struct Lookup {
  const void* data;
  i64 stride[5];
  Operand place;        // (B, H, L, S), int32, from 0 to M - 1
  const float* factor;  // one number
  i32 type;
};

// A number for each row of the batch: an int64 tensor of one dimension, or null.
struct PerBatch {
  const i64* data;
  i64 stride;
  i64 at(i64 b, i64 otherwise) const { return data ? data[b * stride] : otherwise; }
};

// out = softmax(scale * query @ key^T + bias, over the keys that are kept) @ value.
//
// query (B, H, L, D), key (B, HK, S, D), value (B, HK, S, DV), out (B, H, L, DV); H is a multiple of HK. Row i of batch b
// is at position i + shift[b], and keeps the keys in [position - before, max(position + after, prefix - 1)], [start, end)
// and [starts[b], ends[b]), with a `chunk` those of which (key + chunk_keys) / chunk, rounded down, is
// (position + chunk_rows) / chunk, of which `keep` (bytes, (B, H, L, S)) is true and `bias` (of type `bias_type`, same shape) is not -inf. A key that is not
// kept counts for nothing, whatever it holds. Where there is a score function it stands in the place of the scaled
// product, and reads `captured`. What is looked up is added, times its factor. A sink is one more score of every row,
// whose value is zero.
//
// Where it `replaces`, a key that is not kept counts with the score `fill`, and there are no bounds. With a `seed` each
// weight is dropped with the probability `dropout`, and the others are divided by what is left of 1 (`dropout.hpp`).
//
// With `offsets`, a segment of rows lies behind the other: B is 1, L and S count all rows, and segment b is the rows, of
// queries, keys and values, from offsets[b] to offsets[b + 1], each of which sees its own segment alone. A row's position,
// and a key's, is that in its segment; so are those of `bias`, `captured` and `lookups`, whose first dimension is the segment.
// `keep` lies as the keys do, (1, H, 1, S), or is of all rows and positions in their segments, (1, H, L, most). No sink for
// each row, and no gradients of `bias` and `captured`.
struct Args {
  Operand q, k, v, keep, bias;
  Operand sink;                  // (B, H, L, 1), float32
  Operand captured[CAPTURED];    // (B, H, L, S), float32: what a score function reads beside the product
  Lookup lookups[LOOKUPS];       // without data from the first that is not there; no backward has any
  void* out;  // or null where the log-sum-exp is all that is wanted
  i64 out_stride[4];
  float* lse;  // (B, H, L), contiguous: the natural logarithm of the sum of exponentials, without a sink; or null
  float* statistics;  // (B, H, L, 2), contiguous: a row's largest score, as `Scale` has it, and its sum of exponentials, a
                      // sink among them: what the backward computes the weights from again, without the rounding of a
                      // logarithm; or null
  void* rest;  // as `out`: what rounding to its type took from it, for the backward; or null
  i64 B, H, HK, L, S, D, DV;
  i64 before, after, start, end, prefix, chunk, chunk_rows, chunk_keys, segments;
  i64 rows;        // of a head in `lse` and `statistics`: L, those of all segments where there are any
  i64 first_head;  // what dropout calls this call's first head: those of a segment have numbers of their own
  PerBatch shift, starts, ends, offsets;
  const i64* seed;  // of one number, or null
  double dropout;
  float scale, fill;
  i32 bias_type, fully_masked, threads, has_score, replaces;  // 1: by the fill; 2: with the fill added, which absorbs the score
};

// A tensor that is written.
struct Output {
  void* data;
  i64 stride[4];
  template <class S> S* row(i64 b, i64 h, i64 i) const { return static_cast<S*>(data) + b * stride[0] + h * stride[1] + i * stride[2]; }
};

// The gradients of `Args`, whose own results are not written; those that are null are not computed.
struct BackwardArgs {
  Args a;
  Operand grad, result;     // (B, H, L, DV), of the type of the query
  Operand rest;             // as `result`: what rounding took from it; or null
  Operand lse_grad;         // (B, H, L, 1), float32; or null
  const float* statistics;  // as the forward wrote it
  Output dq, dk, dv;
  float* sink_rows;  // (B, H, L), contiguous: the gradient of the sink, before it is summed up; or null
  // Of the bias, in its type, and of what is captured: contiguous, strides 0 where broadcast. Of a bias that is a vector of
  // L + S - 1 distances for each head the strides of its matrix: -1 from row to row.
  Output summed[1 + CAPTURED];
};

// out = input @ weight^T + bias: input (rows, features), out (rows, width) and bias contiguous, weight (width, features) or
// by columns, as (features, width) lies.
struct LinearArgs {
  const void *input, *weight, *bias;  // of one type; the bias may be null
  void* out;
  i64 rows, features, width;
  i32 threads, by_columns;
};

constexpr i64 UNBOUNDED = i64(1) << 60;

// Sizes of an arena's parts, each on a line of its own. For the address sanitizer there is a gap behind each.
struct Parts {
  size_t bytes = 0;
#ifdef __SANITIZE_ADDRESS__
  struct Gap {
    size_t from, to;
  };
  Gap gaps[32];
  int count = 0;
#endif
  size_t add(size_t n) {
    const size_t at = bytes;
    bytes += (n + 63) / 64 * 64;
#ifdef __SANITIZE_ADDRESS__
    bytes += 64;
    gaps[count++] = {at + n, bytes};
#endif
    return at;
  }
};

// Memory that a thread keeps from call to call, as long as it is not much: fresh pages cost more than the kernel's work.
// Before a thread takes less than an eighth of it, it gives back what was much.
class Arena {
 public:
  ~Arena() { std::free(data_); }
  char* take(const Parts& parts) {
    const size_t bytes = parts.bytes;
    if (bytes < size_ / 8) give_back();
    if (bytes > size_) {
      std::free(data_);
      data_ = nullptr;
      size_ = 0;
      void* fresh = nullptr;
      if (posix_memalign(&fresh, 64, bytes)) std::abort();
      data_ = static_cast<char*>(fresh);
      size_ = bytes;
    }
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(data_, size_);
    std::memset(data_, 0xff, size_);  // NaN: what is read before it is written shows
    for (int n = 0; n < parts.count; ++n) __asan_poison_memory_region(data_ + parts.gaps[n].from, parts.gaps[n].to - parts.gaps[n].from);
#endif
    return data_;
  }
  void give_back() {
    if (size_ <= (size_t(64) << 20)) return;
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

inline Arena& call_arena() {  // of the thread that calls: what all tasks read
  static thread_local Arena arena;
  return arena;
}
inline Arena& task_arena() {  // of each thread that works
  static thread_local Arena arena;
  return arena;
}

using Task = void (*)(const void* job, i64 task);

// Tasks do not depend on each other nor on who runs them, so that results are the same for any number of threads.
inline void run_tasks(i64 count, Task task, const void* job, int threads) {
#ifdef ATTN_THREADS  // other threads than OpenMP's, which the thread sanitizer does not see waiting for each other
  if (threads > 1 && count > 1) return ATTN_THREADS(count, task, job, threads);
#elif defined(_OPENMP)
  if (threads > 1 && count > 1) {
    const i64 chunk = std::max<i64>(1, count / (i64(threads) * 16));
#pragma omp parallel for schedule(dynamic, chunk) num_threads(threads)
    for (i64 t = 0; t < count; ++t) task(job, t);
    return;
  }
#endif
  for (i64 t = 0; t < count; ++t) task(job, t);
}

inline int threads_for(double work, i32 asked) {
  if (work < 3e5) return 1;  // less than waking a thread takes
#ifdef ATTN_THREADS
  return asked;
#elif defined(_OPENMP)
  return asked > 0 ? asked : omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}
inline int threads_for(const Args& a) { return threads_for(double(a.B) * a.H * a.L * a.S * (a.D + a.DV), a.threads); }

template <int N> using Number = std::integral_constant<int, N>;

constexpr i64 round_up(i64 n, i64 to) { return (n + to - 1) / to * to; }
constexpr i64 blocks_of(i64 n, i64 size) { return (n + size - 1) / size; }

// The lowest n bits of 64; none where n is less, all where it is more.
inline u64 lowest_bits(i64 n) {
  n = std::max<i64>(0, std::min<i64>(64, n));
  return ((u64(1) << (n & 63)) - 1) | (u64(0) - u64(n >> 6));
}
// The bits of keys [key, key + 64) that lie in [lo, hi).
inline u64 range_word(i64 lo, i64 hi, i64 key) { return lowest_bits(hi - key) & ~lowest_bits(lo - key); }

inline float from_bf16(u16 x) {
  const u32 bits = u32(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline u16 to_bf16(float f) {
  u32 bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return 0x7fc0;
  return u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float from_f16(u16 h) {
  const u32 sign = u32(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) {
    const float small = float(mantissa) * 5.9604644775390625e-8f;
    return sign ? -small : small;
  }
  const u32 bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline u16 to_f16(float f) {
  u32 x;
  std::memcpy(&x, &f, 4);
  const u32 sign = (x >> 16) & 0x8000, magnitude = x & 0x7fffffff;
  if (magnitude > 0x7f800000) return u16(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return u16(sign | 0x7c00);  // rounds to infinity
  if (magnitude < 0x38800000) {                            // below the smallest normal number
    float m;
    std::memcpy(&m, &magnitude, 4);
    return u16(sign | u32(std::nearbyint(m * 16777216.0f)));
  }
  const u32 rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return u16(sign | ((rounded - 0x38000000) >> 13));
}
inline float element_at(const void* p, i64 i, int type) {
  if (type == FLOAT32) return static_cast<const float*>(p)[i];
  const u16 x = static_cast<const u16*>(p)[i];
  return type == BFLOAT16 ? from_bf16(x) : from_f16(x);
}

}  // namespace
}  // namespace attn_pass_cpu
