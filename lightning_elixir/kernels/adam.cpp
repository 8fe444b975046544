// Adam over flat tensors in one pass: the written sequence of `sequence.py`, bit for bit, on all cores. And sums of
// gradients, as `addition.py` has them, and of their squares, in the written order of `optim/scaling.py`.
//
// What keeps the bits: every operation is one IEEE 754 operation on fp32 (compiled with -ffp-contract=off and without
// -ffast-math), the tail of a tensor runs through the same code as its body, and denormals are never flushed here,
// whatever the calling thread is set to. Casts round to nearest, ties to even.
//
// The code is plain C++ for the compiler's vectoriser: the same functions are compiled for several instruction sets
// and chosen from when the library is loaded. No C++ runtime library is needed, so that it does not matter which one
// the running Python brought along.

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/resource.h>
#include <time.h>
#endif

#include <atomic>
#include <cmath>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Elements whose fp32 copies lie in the first-level cache beside the operands. Prefetching the next block by hand
// halved the speed (the processor sees the streams by itself). In place, stores past the cache save the reading of
// `compute`, unless it lies where the gradient was read a moment ago; to other memory, of all that is written.
constexpr int64_t kBlock = 512;
// Elements that a thread takes at a time: few enough for an even share, many enough that taking them costs nothing.
constexpr int64_t kPiece = 32768;
constexpr int kMaxThreads = 1024;
// What launches for the device must not wait for a processor, so the threads stand behind the program's: they run under
// SCHED_IDLE, which gives way at once to whatever wakes up. Seen on an H200 with 16 cores, 14 threads at work: beside
// streamed updates the thread of backward waited for a processor during 0.3 to 0.5 of the time where they were merely
// nicer, and 0.01 to 0.1 so; steps took 1 to 13% less.
// Where others keep all processors busy, such a thread gets next to nothing, with a piece that its caller waits for. One
// that had less than half of a time of at least kCrowdedNs while it worked says so, and for kCrowdedForNs all are only
// nicer, by kNiceness, as they are where SCHED_IDLE is refused.
constexpr int kNiceness = 10;
constexpr int64_t kCrowdedNs = 20000000;
constexpr int64_t kCrowdedForNs = 60000000000;
// Squares are summed in rows of so many, and the sums likewise.
constexpr int64_t kRow = 512;
static_assert(kPiece % kRow == 0 && kBlock >= kRow, "rows are not cut");

enum Dtype : int32_t { kNone = -1, kFloat = 0, kBFloat16 = 1, kHalf = 2 };

// The last three, where there are any, receive what is otherwise written over the parameter and the moments.
enum Operand { kParam, kGrad, kExpAvg, kExpAvgSq, kCompute, kNewParam, kNewExpAvg, kNewExpAvgSq, kNumOperands };

struct Tensor {
  char* data;
  int32_t dtype;
};

struct Numbers {
  float grad_factor, l2, shrink, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, minus_step_size;
  bool has_l2, has_small_weight;
};

struct Sums {
  double scale, limit;  // of the scaled magnitude; infinite for none
  double* rows;         // of every row of the tensor
};

// Casts

template <class To, class From>
INLINE To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits");
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

INLINE float widened_bfloat16(uint16_t x) { return bits_as<float>(uint32_t(x) << 16); }

INLINE uint16_t narrowed_bfloat16(float x) {
  const uint32_t u = bits_as<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// The exponent moves from a bias of 15 to one of 127; what is denormal in half becomes normal by an exact subtraction.
INLINE float widened_half(uint16_t x) {
  const uint32_t shifted = (uint32_t(x) & 0x7fffu) << 13;
  const uint32_t exponent = shifted & (0x1fu << 23);
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t special = normal + (112u << 23);
  const float small = bits_as<float>(normal + (1u << 23)) - bits_as<float>(113u << 23);
  uint32_t u = exponent == (0x1fu << 23) ? special : normal;
  u = exponent == 0 ? bits_as<uint32_t>(small) : u;
  return bits_as<float>(u | (uint32_t(x) & 0x8000u) << 16);
}

INLINE uint16_t narrowed_half(float x) {
  const uint32_t u = bits_as<uint32_t>(x);
  const uint32_t magnitude = u & 0x7fffffffu;
  // To a multiple of 2^-24, the distance of half's denormals, by an addition that rounds there.
  const uint32_t anchor = 126u << 23;
  const uint32_t small = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(anchor)) - anchor;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t h = magnitude < (113u << 23) ? small : normal;
  h = magnitude >= (143u << 23) ? special : h;
  return uint16_t(h | (u >> 16 & 0x8000u));
}

INLINE void widen(float* __restrict to, const char* from, int32_t dtype, int64_t n) {
  const uint16_t* __restrict x = reinterpret_cast<const uint16_t*>(from);
  if (dtype == kBFloat16) {
    for (int64_t i = 0; i < n; ++i) to[i] = widened_bfloat16(x[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = widened_half(x[i]);
  }
}

INLINE void narrow(char* to, const float* __restrict from, int32_t dtype, int64_t n) {
  uint16_t* __restrict x = reinterpret_cast<uint16_t*>(to);
  if (dtype == kBFloat16) {
    for (int64_t i = 0; i < n; ++i) x[i] = narrowed_bfloat16(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) x[i] = narrowed_half(from[i]);
  }
}

INLINE int64_t item_bytes(int32_t dtype) { return dtype == kFloat ? 4 : 2; }

// Adam

struct Element {
  float p, m, v;
};

template <bool has_l2, bool has_small_weight>
INLINE Element updated(float p, float g, float m, float v, const Numbers& k) {
  g = g * k.grad_factor;
  p = p * k.shrink;
  if (has_l2) g = g + p * k.l2;
  const float change = g - m;
  m = has_small_weight ? m + change * k.one_minus_beta1 : g - change * k.beta1;
  v = v * k.beta2 + (g * k.one_minus_beta2) * g;
  const float d = 1.0f / (1.0f / sqrtf(v)) + k.eps;
  p = p + (m * k.minus_step_size) / d;
  return {p, m, v};
}

template <bool has_l2, bool has_small_weight>
INLINE void update_block(float* __restrict param, const float* __restrict grad, float* __restrict exp_avg,
                         float* __restrict exp_avg_sq, int64_t n, const Numbers& k) {
  for (int64_t i = 0; i < n; ++i) {
    const Element x = updated<has_l2, has_small_weight>(param[i], grad[i], exp_avg[i], exp_avg_sq[i], k);
    param[i] = x.p;
    exp_avg[i] = x.m;
    exp_avg_sq[i] = x.v;
  }
}

// The same, to other memory.
template <bool has_l2, bool has_small_weight>
INLINE void update_block_apart(const float* __restrict param, const float* __restrict grad,
                               const float* __restrict exp_avg, const float* __restrict exp_avg_sq,
                               float* __restrict new_param, float* __restrict new_exp_avg,
                               float* __restrict new_exp_avg_sq, int64_t n, const Numbers& k) {
  for (int64_t i = 0; i < n; ++i) {
    const Element x = updated<has_l2, has_small_weight>(param[i], grad[i], exp_avg[i], exp_avg_sq[i], k);
    new_param[i] = x.p;
    new_exp_avg[i] = x.m;
    new_exp_avg_sq[i] = x.v;
  }
}

// Elements of fp32 tensors as they lie, of 16-bit ones as a widened copy.
INLINE float* as_float(const Tensor& x, int64_t start, int64_t n, float* buffer) {
  char* data = x.data + start * item_bytes(x.dtype);
  if (x.dtype == kFloat) return reinterpret_cast<float*>(data);
  widen(buffer, data, x.dtype, n);
  return buffer;
}

INLINE void put_back(const Tensor& x, int64_t start, int64_t n, const float* buffer) {
  if (x.dtype != kFloat) narrow(x.data + start * 2, buffer, x.dtype, n);
}

// Writes whole lines of memory without reading them first, where that is possible; `from` is aligned.
INLINE void put_past_cache(char* to, const void* from, int64_t nbytes) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    __m128i* out = reinterpret_cast<__m128i*>(to);
    const __m128i* in = static_cast<const __m128i*>(from);
    const int64_t count = nbytes / int64_t(sizeof(__m128i));
    for (int64_t i = 0; i < count; ++i) _mm_stream_si128(out + i, _mm_load_si128(in + i));
    memcpy(out + count, in + count, nbytes % sizeof(__m128i));
    return;
  }
#endif
  memcpy(to, from, nbytes);
}

INLINE void put_apart(const Tensor& x, int64_t start, int64_t n, const float* values) {
  char* to = x.data + start * item_bytes(x.dtype);
  if (x.dtype == kFloat) {
    put_past_cache(to, values, n * 4);
  } else {
    alignas(64) char narrowed[kBlock * 2];
    narrow(narrowed, values, x.dtype, n);
    put_past_cache(to, narrowed, n * 2);
  }
}

// What went past the cache is ordered before what follows by this alone.
INLINE void end_apart() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

INLINE void update_range_apart(const Tensor* x, int64_t start, int64_t stop, const Numbers& k) {
  alignas(64) float buffers[4][kBlock];
  alignas(64) float results[3][kBlock];
  float *new_p = results[0], *new_m = results[1], *new_v = results[2];
  for (; start < stop; start += kBlock) {
    const int64_t n = stop - start < kBlock ? stop - start : kBlock;
    const float* p = as_float(x[kParam], start, n, buffers[0]);
    const float* g = as_float(x[kGrad], start, n, buffers[1]);
    const float* m = as_float(x[kExpAvg], start, n, buffers[2]);
    const float* v = as_float(x[kExpAvgSq], start, n, buffers[3]);
    if (k.has_l2) {
      if (k.has_small_weight) update_block_apart<true, true>(p, g, m, v, new_p, new_m, new_v, n, k);
      else update_block_apart<true, false>(p, g, m, v, new_p, new_m, new_v, n, k);
    } else {
      if (k.has_small_weight) update_block_apart<false, true>(p, g, m, v, new_p, new_m, new_v, n, k);
      else update_block_apart<false, false>(p, g, m, v, new_p, new_m, new_v, n, k);
    }
    put_apart(x[kNewParam], start, n, new_p);
    put_apart(x[kNewExpAvg], start, n, new_m);
    put_apart(x[kNewExpAvgSq], start, n, new_v);
    if (x[kCompute].dtype != kNone) {
      if (x[kNewParam].dtype != kFloat) {  // as in place: from what was rounded once already
        alignas(64) char narrowed[kBlock * 2];
        narrow(narrowed, new_p, x[kNewParam].dtype, n);
        widen(new_p, narrowed, x[kNewParam].dtype, n);
      }
      put_apart(x[kCompute], start, n, new_p);
    }
  }
  end_apart();
}

// `is_cached`: what lies there was read a moment ago. Otherwise writing it would read it first.
INLINE void put_compute(const Tensor& x, int64_t start, int64_t n, const float* values, bool is_cached) {
  char* to = x.data + start * item_bytes(x.dtype);
  if (x.dtype == kFloat) {
    memcpy(to, values, n * 4);
  } else if (is_cached) {
    narrow(to, values, x.dtype, n);
  } else {
    put_apart(x, start, n, values);
  }
}

// All of an element's operands are read before any is written, so `compute` may lie where `grad` does.
INLINE void update_range(const Tensor* x, int64_t start, int64_t stop, const void* numbers) {
  const Numbers k = *static_cast<const Numbers*>(numbers);
  if (x[kNewParam].data) {
    update_range_apart(x, start, stop, k);
    return;
  }
  alignas(64) float buffers[4][kBlock];
  const bool is_cached = x[kCompute].data == x[kGrad].data;
  for (; start < stop; start += kBlock) {
    const int64_t n = stop - start < kBlock ? stop - start : kBlock;
    float* p = as_float(x[kParam], start, n, buffers[0]);
    const float* g = as_float(x[kGrad], start, n, buffers[1]);
    float* m = as_float(x[kExpAvg], start, n, buffers[2]);
    float* v = as_float(x[kExpAvgSq], start, n, buffers[3]);
    if (k.has_l2) {
      if (k.has_small_weight) update_block<true, true>(p, g, m, v, n, k);
      else update_block<true, false>(p, g, m, v, n, k);
    } else {
      if (k.has_small_weight) update_block<false, true>(p, g, m, v, n, k);
      else update_block<false, false>(p, g, m, v, n, k);
    }
    put_back(x[kParam], start, n, p);
    put_back(x[kExpAvg], start, n, m);
    put_back(x[kExpAvgSq], start, n, v);
    if (x[kCompute].dtype != kNone) {
      // From what was stored: a 16-bit parameter has been rounded once already.
      if (x[kParam].dtype != kFloat) widen(buffers[0], x[kParam].data + start * 2, x[kParam].dtype, n);
      put_compute(x[kCompute], start, n, p, is_cached);
    }
  }
  end_apart();
}

// What the memory gives: as many streams as Adam has, and next to no arithmetic.
INLINE void copy_range(const Tensor* x, int64_t start, int64_t stop, const void* numbers) {
  const float factor = static_cast<const Numbers*>(numbers)->grad_factor;
  float* __restrict p = reinterpret_cast<float*>(x[kParam].data);
  float* __restrict m = reinterpret_cast<float*>(x[kExpAvg].data);
  float* __restrict v = reinterpret_cast<float*>(x[kExpAvgSq].data);
  const uint16_t* __restrict g = reinterpret_cast<const uint16_t*>(x[kGrad].data);
  for (int64_t i = start; i < stop; ++i) {
    const float a = widened_bfloat16(g[i]) * factor;
    p[i] += a;
    m[i] += a;
    v[i] += a;
  }
}

// Sums of squares

INLINE void add_to(double* __restrict left, const double* __restrict right, int64_t n) {
  for (int64_t i = 0; i < n; ++i) left[i] += right[i];
}

// Element i and i + half, until one is left.
INLINE double row_sum(double* x) {
  for (int64_t half = kRow / 2; half > 0; half /= 2) add_to(x, x + half, half);
  return x[0];
}

INLINE void sums_range(const Tensor* x, int64_t start, int64_t stop, const void* settings) {
  const Sums k = *static_cast<const Sums*>(settings);
  alignas(64) float buffer[kRow];
  alignas(64) double squares[kRow];
  for (; start < stop; start += kRow) {
    const int64_t n = stop - start < kRow ? stop - start : kRow;
    const float* values = as_float(*x, start, n, buffer);
    for (int64_t i = 0; i < n; ++i) {
      double y = double(values[i]) * k.scale;
      y = y > k.limit ? k.limit : y;  // nan stays nan
      y = y < -k.limit ? -k.limit : y;
      squares[i] = y * y;
    }
    for (int64_t i = n; i < kRow; ++i) squares[i] = 0.0;
    k.rows[start / kRow] = row_sum(squares);
  }
}

// The sum of `count` row sums, level by level, in their own memory.
double sum_of_rows(double* rows, int64_t count) {
  double row[kRow];
  while (count > 1) {
    const int64_t shorter = (count + kRow - 1) / kRow;
    for (int64_t i = 0; i < shorter; ++i) {
      const int64_t rest = count - i * kRow;
      for (int64_t j = 0; j < kRow; ++j) row[j] = j < rest ? rows[i * kRow + j] : 0.0;
      rows[i] = row_sum(row);
    }
    count = shorter;
  }
  return count ? rows[0] : 0.0;
}

// Sums of gradients

// The order of `addition.Addition`.
enum Addition : int32_t { kPut, kAdd, kAddRounded };

// The first tensor is the sum, in fp32.
INLINE void total_range(const Tensor* x, int64_t start, int64_t stop, const void* addition) {
  const Addition how = *static_cast<const Addition*>(addition);
  alignas(64) float buffers[2][kBlock];
  alignas(64) char narrowed[kBlock * 2];
  for (; start < stop; start += kBlock) {
    const int64_t n = stop - start < kBlock ? stop - start : kBlock;
    const Tensor& grad = x[1];
    float* __restrict total = reinterpret_cast<float*>(x[0].data) + start;
    const float* __restrict g = as_float(grad, start, n, buffers[0]);
    if (how == kPut && grad.dtype != kFloat) {
      put_past_cache(reinterpret_cast<char*>(total), g, n * 4);
    } else if (how == kPut) {
      memcpy(total, g, n * 4);
    } else if (how == kAdd || grad.dtype == kFloat) {
      for (int64_t i = 0; i < n; ++i) total[i] += g[i];
    } else {  // of values that the gradient's dtype has, rounded to it
      float* __restrict sum = buffers[1];
      for (int64_t i = 0; i < n; ++i) sum[i] = total[i] + g[i];
      narrow(narrowed, sum, grad.dtype, n);
      widen(sum, narrowed, grad.dtype, n);
      memcpy(total, sum, n * 4);
    }
  }
  end_apart();
}

// One of each for every instruction set

typedef void (*Range)(const Tensor*, int64_t, int64_t, const void*);

struct Implementation {
  const char* name;
  Range update, copy, sums, total;
};

#define FOR_ONE(range, suffix, attributes)                                                           \
  attributes void range##_##suffix(const Tensor* x, int64_t start, int64_t stop, const void* settings) { \
    range##_range(x, start, stop, settings);                                                         \
  }
#define IMPLEMENTATION(suffix, attributes) \
  FOR_ONE(update, suffix, attributes)      \
  FOR_ONE(copy, suffix, attributes)        \
  FOR_ONE(sums, suffix, attributes)        \
  FOR_ONE(total, suffix, attributes)

IMPLEMENTATION(baseline, )
#if defined(__x86_64__)
IMPLEMENTATION(avx2, __attribute__((target("avx2"))))
#if defined(__clang__)  // which does not know the preference, and would ignore all with it
IMPLEMENTATION(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#else
// Whole registers were a tenth faster than halves or AVX2 on a Zen 4 core, where memory did not set the pace.
IMPLEMENTATION(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif
#endif

// The best first.
int implementations(Implementation* found) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    found[count++] = {"AVX-512", update_avx512, copy_avx512, sums_avx512, total_avx512};
  if (__builtin_cpu_supports("avx2")) found[count++] = {"AVX2", update_avx2, copy_avx2, sums_avx2, total_avx2};
  found[count++] = {"SSE2", update_baseline, copy_baseline, sums_baseline, total_baseline};
#elif defined(__aarch64__)
  found[count++] = {"NEON", update_baseline, copy_baseline, sums_baseline, total_baseline};
#else
  found[count++] = {"baseline", update_baseline, copy_baseline, sums_baseline, total_baseline};
#endif
  return count;
}

// Denormals are kept, and rounding is to nearest, while this lives.
class DefaultArithmetic {
 public:
#if defined(__SSE2__)
  DefaultArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultArithmetic() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  DefaultArithmetic() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~DefaultArithmetic() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
};

// Threads

struct Job {
  Range run;
  const Tensor* tensors;
  const char* settings;        // of each part
  int64_t settings_bytes;      // from those of one part to those of the next
  const int64_t* spans;        // start and numel of each part
  const int64_t* first_piece;  // of each part, and the number of pieces
  int64_t num_parts;
  std::atomic<int64_t> next_piece;
  int wanted;   // threads that may still join
  int helpers;  // threads that have joined and not left
  Job* link;
};

void run_pieces(Job& job) {
  const DefaultArithmetic arithmetic;
  const int64_t num_pieces = job.first_piece[job.num_parts];
  for (;;) {
    const int64_t piece = job.next_piece.fetch_add(1, std::memory_order_relaxed);
    if (piece >= num_pieces) return;
    int64_t low = 0, high = job.num_parts;  // the last part that starts at this piece or before
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (job.first_piece[middle] <= piece) low = middle;
      else high = middle;
    }
    const int64_t offset = (piece - job.first_piece[low]) * kPiece;
    const int64_t rest = job.spans[2 * low + 1] - offset;
    const int64_t start = job.spans[2 * low] + offset;
    const void* settings = job.settings + low * job.settings_bytes;
    job.run(job.tensors, start, start + (rest < kPiece ? rest : kPiece), settings);
  }
}

// Of a thread: when it is, and how long it has had a processor.
struct Moment {
#if defined(__linux__)
  int64_t wall_ns = now_ns(CLOCK_MONOTONIC), own_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);

  static int64_t now_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
  }
#else
  int64_t wall_ns = 0, own_ns = 0;
#endif

  bool was_crowded_since(const Moment& begin) const {
    const int64_t passed_ns = wall_ns - begin.wall_ns;
    return passed_ns >= kCrowdedNs && 2 * (own_ns - begin.own_ns) < passed_ns;
  }
};

// Whether a thread runs under SCHED_IDLE.
struct Standing {
  bool is_idle = false;
  bool is_refused = false;

  // False: the thread must end, since a program without privileges may not take it out of SCHED_IDLE.
  bool set([[maybe_unused]] bool idle) {
#if defined(__linux__)
    if (idle == is_idle || is_refused) return true;
    const sched_param none = {};
    const bool is_done = sched_setscheduler(0, idle ? SCHED_IDLE : SCHED_OTHER, &none) == 0;
    if (is_done) is_idle = idle;
    else if (is_idle) return false;
    else is_refused = true;
#endif
    return true;
  }
};

// Threads that wait for work. Several callers may be served at once; each works on its own job itself, so that it
// ends even if no thread can be had. Never destroyed: its threads end with the process. A thread takes the arithmetic
// of a job up at any moment before the last piece is taken, and none is waited for that has not.
struct Pool {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t has_work = PTHREAD_COND_INITIALIZER;
  pthread_cond_t is_done = PTHREAD_COND_INITIALIZER;
  Job* first = nullptr;
  int num_threads = 0;
  int64_t crowded_until_ns = 0;

  Job* joinable() const {
    Job* job = first;
    while (job && !job->wanted) job = job->link;
    return job;
  }

  void serve() {
    Standing standing;
    pthread_mutex_lock(&mutex);
    for (;;) {
      Job* job = joinable();
      if (!job) {
        pthread_cond_wait(&has_work, &mutex);
        continue;
      }
      const Moment begin;
      if (!standing.set(begin.wall_ns >= crowded_until_ns)) {
        --num_threads;  // the next job makes another
        pthread_mutex_unlock(&mutex);
        return;
      }
      --job->wanted;
      ++job->helpers;
      pthread_mutex_unlock(&mutex);
      run_pieces(*job);
      const Moment end;
      pthread_mutex_lock(&mutex);
      if (end.was_crowded_since(begin)) crowded_until_ns = end.wall_ns + kCrowdedForNs;
      if (--job->helpers == 0) pthread_cond_broadcast(&is_done);
    }
  }

  static void* enter(void* pool) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "elixir_update");
    // Linux has a priority for every thread, and 0 is this one.
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNiceness);
#endif
    static_cast<Pool*>(pool)->serve();
    return nullptr;
  }

  // With the mutex held. Signals are for the program's own threads.
  void grow_to(int count) {
    if (num_threads >= count) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (num_threads < count && pthread_create(&thread, nullptr, enter, this) == 0) {
      pthread_detach(thread);
      ++num_threads;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void run(Job& job, int helpers) {
    job.wanted = helpers;
    pthread_mutex_lock(&mutex);
    grow_to(helpers);
    job.link = first;
    first = &job;
    pthread_cond_broadcast(&has_work);
    pthread_mutex_unlock(&mutex);
    run_pieces(job);
    pthread_mutex_lock(&mutex);
    Job** place = &first;
    while (*place != &job) place = &(*place)->link;
    *place = job.link;
    while (job.helpers) pthread_cond_wait(&is_done, &mutex);
    pthread_mutex_unlock(&mutex);
  }
};

std::atomic<Pool*> the_pool{nullptr};

// A forked child has none of its parent's threads, and the mutex as it was at that moment.
void forget_pool() { the_pool.store(nullptr); }

Pool* pool() {
  Pool* current = the_pool.load();
  if (current) return current;
  void* memory = malloc(sizeof(Pool));
  if (!memory) return nullptr;
  Pool* made = static_cast<Pool*>(memory);
  const Pool fresh;
  memcpy(memory, &fresh, sizeof(Pool));
  if (the_pool.compare_exchange_strong(current, made)) return made;
  free(memory);
  return current;
}

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, forget_pool); }

// Runs over all parts. Returns 0, or 1 where there is no memory for a table of them.
int run_parts(Range range, const Tensor* tensors, int64_t num_parts, const int64_t* spans, const void* settings,
              int64_t settings_bytes, int num_threads) {
  int64_t* first_piece = static_cast<int64_t*>(malloc((num_parts + 1) * sizeof(int64_t)));
  if (!first_piece) return 1;
  first_piece[0] = 0;
  for (int64_t i = 0; i < num_parts; ++i)
    first_piece[i + 1] = first_piece[i] + (spans[2 * i + 1] + kPiece - 1) / kPiece;
  const int64_t num_pieces = first_piece[num_parts];
  int64_t helpers = (num_threads < kMaxThreads ? num_threads : kMaxThreads) - 1;
  if (helpers > num_pieces - 1) helpers = num_pieces - 1;
  Job job = {range,       tensors,   static_cast<const char*>(settings), settings_bytes, spans,
             first_piece, num_parts, {0},                                0,              0, nullptr};
  Pool* threads = helpers > 0 ? pool() : nullptr;
  if (threads) threads->run(job, int(helpers));
  else run_pieces(job);
  free(first_piece);
  return 0;
}

}  // namespace

// How many implementations this machine can run; the best has number 0.
EXPORT int elixir_num_implementations() {
  Implementation found[4];
  return implementations(found);
}

EXPORT const char* elixir_implementation_name(int which) {
  Implementation found[4];
  return which >= 0 && which < implementations(found) ? found[which].name : "";
}

// One update. The eight operands in the order of `Operand`, the last four null where there are none; `spans` has start
// and numel of each part, `scalars` nine doubles of each, in the order of `sequence.Scalars`. Returns 0; 1 if there was
// no memory (nothing is changed then).
EXPORT int elixir_adam(int which, void* const* data, const int32_t* dtypes, int64_t num_parts, const int64_t* spans,
                       const double* scalars, int num_threads) {
  Implementation found[4];
  implementations(found);
  Tensor tensors[kNumOperands];
  for (int i = 0; i < kNumOperands; ++i) tensors[i] = {static_cast<char*>(data[i]), dtypes[i]};
  Numbers* numbers = static_cast<Numbers*>(malloc(num_parts * sizeof(Numbers)));
  if (!numbers) return 1;
  for (int64_t i = 0; i < num_parts; ++i) {
    const double* s = scalars + 9 * i;
    numbers[i] = {float(s[0]), float(s[1]), float(s[2]), float(s[3]), float(s[4]), float(s[5]),
                  float(s[6]), float(s[7]), float(s[8]), s[1] != 0.0,  s[4] < 0.5};
  }
  const int status = run_parts(found[which].update, tensors, num_parts, spans, numbers, sizeof(Numbers), num_threads);
  free(numbers);
  return status;
}

// Sums of squares of the parts of one tensor, which start at multiples of 512, into `sums`. Returns 0; 1 if there was
// no memory.
EXPORT int elixir_square_sums(int which, void* data, int32_t dtype, int64_t num_parts, const int64_t* spans,
                              double scale, double limit, double* sums, int num_threads) {
  Implementation found[4];
  implementations(found);
  int64_t num_rows = 0;
  for (int64_t i = 0; i < num_parts; ++i) {
    const int64_t stop = (spans[2 * i] + spans[2 * i + 1] + kRow - 1) / kRow;
    if (stop > num_rows) num_rows = stop;
  }
  double* rows = static_cast<double*>(malloc((num_rows + 1) * sizeof(double)));
  if (!rows) return 1;
  const Tensor tensor = {static_cast<char*>(data), dtype};
  const Sums settings = {scale, limit, rows};
  const int status = run_parts(found[which].sums, &tensor, num_parts, spans, &settings, 0, num_threads);
  for (int64_t i = 0; i < num_parts && !status; ++i)
    sums[i] = sum_of_rows(rows + spans[2 * i] / kRow, (spans[2 * i + 1] + kRow - 1) / kRow);
  free(rows);
  return status;
}

// A gradient to a sum in fp32. Returns 0; 1 if there was no memory (nothing is changed then).
EXPORT int elixir_add_up(int which, void* total, void* grad, int32_t dtype, int64_t numel, int32_t addition,
                         int num_threads) {
  Implementation found[4];
  implementations(found);
  const Tensor tensors[2] = {{static_cast<char*>(total), kFloat}, {static_cast<char*>(grad), dtype}};
  const Addition how = Addition(addition);
  const int64_t span[2] = {0, numel};
  return run_parts(found[which].total, tensors, 1, span, &how, 0, num_threads);
}

// For benchmarks: reads three fp32 tensors and one of bf16, adds something to the three, and writes them.
EXPORT int elixir_plain_loop(void* const* data, int64_t numel, int num_threads) {
  Implementation found[4];
  implementations(found);
  Tensor tensors[kNumOperands];
  for (int i = 0; i < kNumOperands; ++i)
    tensors[i] = {i >= kCompute ? nullptr : static_cast<char*>(data[i]), i == kGrad ? kBFloat16 : kFloat};
  Numbers numbers = {};
  numbers.grad_factor = 1e-6f;
  const int64_t span[2] = {0, numel};
  return run_parts(found[0].copy, tensors, 1, span, &numbers, 0, num_threads);
}
