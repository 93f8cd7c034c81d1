// Sixteen floats at a time, as one AVX-512 register or two AVX2 ones, and the sums and functions over them.

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4)));

#define INLINE static inline __attribute__((always_inline))

INLINE v16 splat(float value) { return value - (v16){}; }

INLINE v16 load(const float *from) { return *(const v16 *)from; }

INLINE void store(float *to, v16 value) { *(v16 *)to = value; }

INLINE v16 load_float16(const uint16_t *from) {
#ifdef __AVX512F__
    return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    union { __m256 half[2]; v16 whole; } both;
    both.half[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    both.half[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8)));
    return both.whole;
#endif
}

// A bfloat16 is the upper half of a float.
INLINE v16 load_bfloat16(const uint16_t *from) {
#ifdef __AVX512F__
    return (v16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    union { __m256i half[2]; v16 whole; } both;
    both.half[0] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
    both.half[1] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 8))), 16);
    return both.whole;
#endif
}

// Rounded to the nearest, ties to even; NaN stays NaN.
INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE v16 choose(i16 mask, v16 yes, v16 no) { return (v16)(((i16)yes & mask) | ((i16)no & ~mask)); }

// The lanes `step` further on, round the end: halves, quarters, pairs and neighbours meet in a fixed order.
INLINE v16 turned(v16 v, int step) {
    i16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(v, (lanes + step) & 15);
}

INLINE float sum(v16 v) {
    v += turned(v, 8);
    v += turned(v, 4);
    v += turned(v, 2);
    v += turned(v, 1);
    return v[0];
}

// The second where one of them is NaN.
INLINE v16 larger(v16 a, v16 b) {
#ifdef __AVX512F__
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE float largest(v16 v) {
    v = larger(v, turned(v, 8));
    v = larger(v, turned(v, 4));
    v = larger(v, turned(v, 2));
    v = larger(v, turned(v, 1));
    return v[0];
}

// Of absolute values, as their bits: NaN and infinity are larger than all numbers.
INLINE float largest_bits(i16 v) {
    int32_t most = 0;
    for (int lane = 0; lane < 16; lane++) most = v[lane] > most ? v[lane] : most;
    float value;
    memcpy(&value, &most, 4);
    return value;
}

// exp(x) = 2^n * 2^f with |f| <= 1/2 and a polynomial of degree 6 for 2^f; below -87 it is 0 for all purposes. NaN stays.
INLINE v16 exponential(v16 given) {
    v16 x = larger(splat(-87.0f), given);
    v16 scaled = (v16)x * splat(1.44269504088896341f);
    v16 whole = scaled + splat(12582912.0f) - splat(12582912.0f);  // 1.5 * 2^23: rounds to the nearest integer
    v16 f = scaled - whole;
    v16 p = splat(1.535336188319500e-4f);
    p = p * f + splat(1.339887440266574e-3f);
    p = p * f + splat(9.618437357674640e-3f);
    p = p * f + splat(5.550332471162809e-2f);
    p = p * f + splat(2.402264791363012e-1f);
    p = p * f + splat(6.931472028550421e-1f);
    p = p * f + splat(1.0f);
#ifdef __AVX512F__
    return (v16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    whole = choose(whole > splat(127.0f), splat(127.0f), whole);  // larger than any float: as near as this goes
    return choose(given == given, (v16)((i16)p + (__builtin_convertvector(whole, i16) << 23)), given);
#endif
}
