// One register of floats: sixteen with AVX-512, eight with AVX2; and the sums and functions over it.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));

#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float value) { return value - (vec){}; }

INLINE vec load(const float *from) { return *(const vec *)from; }

INLINE void store(float *to, vec value) { *(vec *)to = value; }

// A load that is done once: else the compiler may repeat it as an operand of each multiplication, and loads are what there is least of.
#define IN_REGISTER(v) __asm__("" : "+v"(v))

INLINE vec load_float16(const uint16_t *from) {
#ifdef __AVX512F__
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#endif
}

// A bfloat16 is the upper half of a float.
INLINE vec load_bfloat16(const uint16_t *from) {
#ifdef __AVX512F__
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#endif
}

// Rounded to the nearest, ties to even; NaN stays NaN.
INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

INLINE ivec lane_numbers(void) {
#ifdef __AVX512F__
    return (ivec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
    return (ivec){0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

// The lanes `step` further on, round the end: halves, quarters, pairs and neighbours meet in a fixed order.
INLINE vec turned(vec v, int step) { return __builtin_shuffle(v, (lane_numbers() + step) & (LANES - 1)); }

INLINE float sum(vec v) {
#ifdef __AVX512F__
    v += turned(v, 8);
#endif
    v += turned(v, 4);
    v += turned(v, 2);
    v += turned(v, 1);
    return v[0];
}

// The second where one of them is NaN.
INLINE vec larger(vec a, vec b) {
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

INLINE float largest(vec v) {
#ifdef __AVX512F__
    v = larger(v, turned(v, 8));
#endif
    v = larger(v, turned(v, 4));
    v = larger(v, turned(v, 2));
    v = larger(v, turned(v, 1));
    return v[0];
}

// Whether any lane of the first is larger; NaN is not.
INLINE int exceeds(vec a, vec b) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#else
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#endif
}

// Of absolute values, as their bits: NaN and infinity are larger than all numbers.
INLINE float largest_bits(ivec v) {
    int32_t most = 0;
    for (int lane = 0; lane < LANES; lane++) most = v[lane] > most ? v[lane] : most;
    float value;
    memcpy(&value, &most, 4);
    return value;
}

// exp(x) = 2^n * 2^f with |f| <= 1/2 and a polynomial of degree 6 for 2^f; below -87 it is 0 for all purposes. NaN stays.
INLINE vec exponential(vec given) {
    vec x = larger(splat(-87.0f), given);
#ifndef __AVX512F__
    x = choose(x > splat(88.0f), splat(88.0f), x);  // the largest that the last step can write
#endif
    vec scaled = (vec)x * splat(1.44269504088896341f);
    vec whole = scaled + splat(12582912.0f) - splat(12582912.0f);  // 1.5 * 2^23: rounds to the nearest integer
    vec f = scaled - whole;
    vec p = splat(1.535336188319500e-4f);
    p = p * f + splat(1.339887440266574e-3f);
    p = p * f + splat(9.618437357674640e-3f);
    p = p * f + splat(5.550332471162809e-2f);
    p = p * f + splat(2.402264791363012e-1f);
    p = p * f + splat(6.931472028550421e-1f);
    p = p * f + splat(1.0f);
#ifdef __AVX512F__
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    return choose(given == given, (vec)((ivec)p + (__builtin_convertvector(whole, ivec) << 23)), given);
#endif
}
