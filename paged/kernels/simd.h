// Vectors of floats, as wide as the instruction set that this file is compiled for.
//
// Everything is written once over the compilers' vector extension (GCC 12, Clang); intrinsics stand only where that has
// no word for an instruction: fused multiply-add, half floats, dot products of bfloat16 and int8. Every set has its own
// namespace, so that one library holds them all and the processor decides (native.cpp).
//
// Sums are written in the order in which they are computed: the file is compiled without contraction and reordering, so
// a row has the same bits whatever rows are computed beside it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace PAGED_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
#if defined(__AVX512BF16__)
constexpr bool BF16_DOT = true;  // dot products of bfloat16 pairs
#else
constexpr bool BF16_DOT = false;
#endif

typedef float Floats __attribute__((vector_size(W * 4)));
typedef float FloatsAnywhere __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef uint32_t WordsAnywhere __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(W * 2)));
typedef uint16_t HalvesAnywhere __attribute__((vector_size(W * 2), aligned(2), may_alias));

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Floats load(const float* p) { return *(const FloatsAnywhere*)p; }
INLINE void store(float* p, Floats x) { *(FloatsAnywhere*)p = x; }
INLINE Floats load(const float* p, int64_t count) {  // the first `count`, and zeros
  if (count >= W) return load(p);
  float some[W] = {};
  for (int64_t i = 0; i < count; i++) some[i] = p[i];
  return load(some);
}
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

INLINE Floats fma(Floats a, Floats b, Floats c) {  // a * b + c
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// ---- bfloat16 and float16 in memory, float32 in registers; rounding to nearest, ties to even

INLINE Floats load(const bfloat16* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  return (Floats)(__builtin_convertvector(*(const HalvesAnywhere*)p, Words) << 16);
#endif
}

INLINE void store(bfloat16* p, Floats x) {
  Words bits = (Words)x;
  Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  Words quiet = bits | 0x400000u;  // not a number stays that
  bits = x == x ? rounded : quiet;
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)(bits >> 16)));
#else
  *(HalvesAnywhere*)p = __builtin_convertvector(bits >> 16, Halves);
#endif
}

INLINE Floats load(const float16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  // Exponent and mantissa in their float32 places, then the exponent's bias by a product, exact for subnormals too.
  Words bits = __builtin_convertvector(*(const HalvesAnywhere*)p, Words);
  Words magnitude = (bits & 0x7fffu) << 13;
  Floats value = (Floats)magnitude * splat(0x1p112f);
  Words special = (bits & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : (Words)value;
  return (Floats)(special | ((bits & 0x8000u) << 16));
#endif
}

INLINE void store(float16* p, Floats x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  Words bits = (Words)x, sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the addition of 0.5 leaves the subnormal, rounded, in the last bits.
  Words small = (Words)((Floats)magnitude + splat(0.5f)) - (Words)splat(0.5f);
  Words normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  Words large = magnitude > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u;
  Words half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x477ff000u ? large : half;
  *(HalvesAnywhere*)p = __builtin_convertvector(half | sign, Halves);
#endif
}

INLINE void store(int8_t* p, Ints x) {  // values that fit
  typedef int8_t Bytes __attribute__((vector_size(W), aligned(1), may_alias));
  *(Bytes*)p = __builtin_convertvector(x, Bytes);
}

// ---- sums and greatest over the lanes

#define FOUR(f, l) f(l), f(l + 1), f(l + 2), f(l + 3)

// Lane l of the result is what the l-th half of the lanes of a and b add up to: one step of a transposed sum.
template <int S> INLINE Floats merge(Floats a, Floats b) {
#define OWN(l) (((l) & S) ? (l) + W : (l))
#define OTHER(l) (((l) & S) ? ((l) ^ S) + W : ((l) ^ S))
#if defined(__AVX512F__)
  Floats x = __builtin_shufflevector(a, b, FOUR(OWN, 0), FOUR(OWN, 4), FOUR(OWN, 8), FOUR(OWN, 12));
  Floats y = __builtin_shufflevector(a, b, FOUR(OTHER, 0), FOUR(OTHER, 4), FOUR(OTHER, 8), FOUR(OTHER, 12));
#elif defined(__AVX2__)
  Floats x = __builtin_shufflevector(a, b, FOUR(OWN, 0), FOUR(OWN, 4));
  Floats y = __builtin_shufflevector(a, b, FOUR(OTHER, 0), FOUR(OTHER, 4));
#else
  Floats x = __builtin_shufflevector(a, b, FOUR(OWN, 0));
  Floats y = __builtin_shufflevector(a, b, FOUR(OTHER, 0));
#endif
#undef OWN
#undef OTHER
  return x + y;
}

// N vectors to one: lane i is the sum of the lanes of v[i].
template <int N> INLINE Floats sums(const Floats* v) {
  if constexpr (N == 1)
    return v[0];
  else
    return merge<N / 2>(sums<N / 2>(v), sums<N / 2>(v + N / 2));
}

// All lanes to one, halving them: op(v, v with its lanes S places on).
template <int S, class V, class F> INLINE V reduced(V v, F&& op) {
  if constexpr (S == 0) {
    return v;
  } else {
#define OTHER(l) ((l) ^ S)
#if defined(__AVX512F__)
    const V other = __builtin_shufflevector(v, v, FOUR(OTHER, 0), FOUR(OTHER, 4), FOUR(OTHER, 8), FOUR(OTHER, 12));
#elif defined(__AVX2__)
    const V other = __builtin_shufflevector(v, v, FOUR(OTHER, 0), FOUR(OTHER, 4));
#else
    const V other = __builtin_shufflevector(v, v, FOUR(OTHER, 0));
#endif
#undef OTHER
    return reduced<S / 2>(op(v, other), op);
  }
}

INLINE float sum(Floats v) { return reduced<W / 2>(v, [](Floats a, Floats b) { return a + b; })[0]; }
INLINE int32_t sum(Ints v) { return reduced<W / 2>(v, [](Ints a, Ints b) { return a + b; })[0]; }
INLINE float largest(Floats v) { return reduced<W / 2>(v, [](Floats a, Floats b) { return a > b ? a : b; })[0]; }
INLINE int32_t largest(Ints v) { return reduced<W / 2>(v, [](Ints a, Ints b) { return a > b ? a : b; })[0]; }

// ---- functions

// e^x for x <= 0, within 2 units in the last place; 0 below -87. Range reduction by ln 2 in two parts and a minimax
// polynomial of degree 5 (coefficients: Cephes, expf).
INLINE Floats exp_negative(Floats x) {
#if defined(__AVX512F__)
  const Floats bounded = _mm512_max_ps(splat(-87.0f), x);  // what is no number stays that
  const Floats whole = _mm512_roundscale_ps(bounded * splat(1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT);
#else
  const Floats bounded = larger(x, splat(-87.0f));
  const Ints n = __builtin_convertvector(bounded * splat(1.44269504088896341f) - splat(0.5f), Ints);  // to nearest
  const Floats whole = __builtin_convertvector(n, Floats);
#endif
  const Floats r = fma(whole, splat(2.12194440e-4f), fma(whole, splat(-0.693359375f), bounded));
  Floats y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, r * r, r) + splat(1.0f);
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(-87.0f), _CMP_NLT_UQ), y, whole);
#else
  y *= (Floats)((n + 127) << 23);
  y = x < splat(-87.0f) ? Floats{} : y;
  return x == x ? y : x;
#endif
}

INLINE float exp_negative(float x) { return exp_negative(splat(x))[0]; }

INLINE Floats absolute(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

INLINE Floats tanh(Floats x) {
  Floats e = exp_negative(absolute(x) * splat(-2.0f));
  Floats t = (splat(1.0f) - e) / (splat(1.0f) + e);
  return (Floats)((Words)t | ((Words)x & 0x80000000u));
}

}  // namespace PAGED_ISA
