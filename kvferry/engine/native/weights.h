// Projections: rows times a matrix that was packed once into panels of PANEL columns, in one of four kinds.
//
// float32 and float16 (converted on the fly): panels [out / PANEL][inner][PANEL]; a row's sum runs along the inner dimension.
// bfloat16: weights and activations rounded to it, sums in float32, two products at a time: panels [out / PANEL][inner / 2][PANEL][2].
// int8: weights and activations in groups along the inner dimension, each group of each row (or column) with a scale of its own, so
// that neither a loud row nor a loud feature touches another; exact integer sums within a group, float sums over the groups.
// A panel is [inner / group]([group / 4][PANEL][4] bytes, then [PANEL] scales). What a row's bits depend on is that row alone.

enum { KIND_FLOAT32, KIND_FLOAT16, KIND_INT8, KIND_BFLOAT16 };

#ifdef __AVX512F__
#define PANEL_VECTORS 4  // 6 rows x 4 vectors of sums, the weights and a value fill the 32 registers
#else
#define PANEL_VECTORS 2  // and with 2 vectors the 16 registers
#endif
#define MAX_ROWS 6
#define PANEL (LANES * PANEL_VECTORS)
#define INT8_ROWS 3  // sums of integers and of floats live side by side

INLINE int group_of(int inner) { return inner % 64 ? 32 : 64; }

static long panel_bytes(int inner, int kind) {
    if (kind == KIND_FLOAT32) return (long)inner * PANEL * 4;
    if (kind == KIND_FLOAT16 || kind == KIND_BFLOAT16) return (long)inner * PANEL * 2;
    return (long)inner * PANEL + (long)(inner / group_of(inner)) * PANEL * 4;
}

// Bytes of the panels that hold `out` columns.
int64_t packed_bytes(int32_t out, int32_t inner, int32_t kind) {
    return (int64_t)((out + PANEL - 1) / PANEL) * panel_bytes(inner, kind);
}

int32_t panel_width(void) { return PANEL; }

// ------------------------------------------------------------------------------------------------------------- packing

static void pack_int8_panel(const float *weights, int first, int out, int inner, uint8_t *to) {
    int group = group_of(inner);
    for (int begin = 0; begin < inner; begin += group) {
        float *scales = (float *)(to + (long)group * PANEL);
        for (int column = 0; column < PANEL; column++) {
            const float *row = weights + (long)(first + column) * inner + begin;
            float top = 0;
            if (first + column < out)
                for (int k = 0; k < group; k++) top = __builtin_fabsf(row[k]) > top ? __builtin_fabsf(row[k]) : top;
            scales[column] = top / 127.0f;
            for (int k = 0; k < group; k++) {
                float value = top > 0 ? row[k] / top * 127.0f : 0.0f;
                int whole = (int)__builtin_rintf(value);
#ifdef __AVX512VNNI__
                to[((k / 4) * PANEL + column) * 4 + k % 4] = (uint8_t)(whole + 128);
#else
                to[((k / 4) * PANEL + column) * 4 + k % 4] = (uint8_t)(int8_t)whole;
#endif
            }
        }
        to += (long)group * PANEL + PANEL * 4;
    }
}

// Weights [out][inner], the columns from a multiple of PANEL on, become panels, padded with zeros.
void pack(const float *weights, int32_t out, int32_t inner, int32_t kind, void *packed) {
    for (long panel = 0; panel * PANEL < out; panel++) {
        if (kind == KIND_INT8) {
            pack_int8_panel(weights, panel * PANEL, out, inner, (uint8_t *)packed + panel * panel_bytes(inner, kind));
            continue;
        }
        for (long k = 0; k < inner; k++)
            for (long column = 0; column < PANEL; column++) {
                long row = panel * PANEL + column, at = (panel * inner + k) * PANEL + column;
                float value = row < out ? weights[row * inner + k] : 0.0f;
                if (kind == KIND_FLOAT16) ((uint16_t *)packed)[at] = _cvtss_sh(value, 0);
                else if (kind == KIND_BFLOAT16) ((uint16_t *)packed)[at - k % 2 * PANEL + column + k % 2] = to_bfloat16(value);
                else ((float *)packed)[at] = value;
            }
    }
}

// ------------------------------------------------------------------------------------------------------ float32, float16

INLINE void store_columns(float *to, const vec *sums, int columns) {
    if (columns == PANEL) {
        for (int v = 0; v < PANEL_VECTORS; v++) store(to + LANES * v, sums[v]);
        return;
    }
    float whole[PANEL];
    for (int v = 0; v < PANEL_VECTORS; v++) store(whole + LANES * v, sums[v]);
    memcpy(to, whole, columns * sizeof(float));
}

INLINE void tile(const float *x, long x_stride, const void *panel, int inner, float *y, long y_stride, int columns,
                 const int rows, const int kind, Ahead *ahead) {
    vec sums[MAX_ROWS][PANEL_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] = (vec){};
    const char *next;
    for (long k = 0, until, stride; k < inner;)
        for (until = k + take(ahead, inner - k, &next, &stride); k < until; k++, next += stride) {
            __builtin_prefetch(next);  // into all levels: what goes into the outer ones alone is dropped at times
            vec weights[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; v++) {
                long at = k * PANEL + LANES * v;
                weights[v] = kind == KIND_FLOAT16 ? load_float16((const uint16_t *)panel + at) : load((const float *)panel + at);
            }
            for (int r = 0; r < rows; r++) {
                vec value = splat(x[r * x_stride + k]);
                for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] += value * weights[v];
            }
        }
    for (int r = 0; r < rows; r++) store_columns(y + r * y_stride, sums[r], columns);
}

#define TILE(n, kind) case n: tile(x, x_stride, panel, inner, y, y_stride, columns, n, kind, ahead); break;

static __attribute__((noinline)) void tile_float32(const float *x, long x_stride, const void *panel, int inner, float *y,
                                                   long y_stride, int columns, int rows, Ahead *ahead) {
    switch (rows) {
        TILE(1, KIND_FLOAT32) TILE(2, KIND_FLOAT32) TILE(3, KIND_FLOAT32)
        TILE(4, KIND_FLOAT32) TILE(5, KIND_FLOAT32) TILE(6, KIND_FLOAT32)
    }
}

static __attribute__((noinline)) void tile_float16(const float *x, long x_stride, const void *panel, int inner, float *y,
                                                   long y_stride, int columns, int rows, Ahead *ahead) {
    switch (rows) {
        TILE(1, KIND_FLOAT16) TILE(2, KIND_FLOAT16) TILE(3, KIND_FLOAT16)
        TILE(4, KIND_FLOAT16) TILE(5, KIND_FLOAT16) TILE(6, KIND_FLOAT16)
    }
}

// ------------------------------------------------------------------------------------------------------------ bfloat16

static void round_to_bfloat16(const float *x, long count, uint16_t *to) {
    for (long k = 0; k < count; k++) to[k] = to_bfloat16(x[k]);
}

INLINE int32_t pair_at(const uint16_t *from) {
    int32_t pair;
    memcpy(&pair, from, 4);
    return pair;
}

// To each lane's sum, the products of its pair of weights with `pair`, two neighbours of one row.
INLINE vec add_pair(vec sums, vec weights, int32_t pair) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
#else
    ivec both = (ivec)weights, value = (ivec){} + pair;
    sums += (vec)(value << 16) * (vec)(both << 16);
    return sums + (vec)(value & (int32_t)0xffff0000) * (vec)(both & (int32_t)0xffff0000);
#endif
}

INLINE void tile_pairs(const uint16_t *x, long x_stride, const uint16_t *panel, int inner, float *y, long y_stride, int columns,
                       const int rows) {
    vec sums[MAX_ROWS][PANEL_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] = (vec){};
    for (long k = 0; k < inner; k += 2)
        for (int r = 0; r < rows; r++) {
            int32_t pair = pair_at(x + r * x_stride + k);
            for (int v = 0; v < PANEL_VECTORS; v++)
                sums[r][v] = add_pair(sums[r][v], load((const float *)(panel + k * PANEL) + LANES * v), pair);
        }
    for (int r = 0; r < rows; r++) store_columns(y + r * y_stride, sums[r], columns);
}

static __attribute__((noinline)) void tile_bfloat16(const uint16_t *x, long x_stride, const uint16_t *panel, int inner, float *y,
                                                    long y_stride, int columns, int rows) {
    switch (rows) {
        case 1: tile_pairs(x, x_stride, panel, inner, y, y_stride, columns, 1); break;
        case 2: tile_pairs(x, x_stride, panel, inner, y, y_stride, columns, 2); break;
        case 3: tile_pairs(x, x_stride, panel, inner, y, y_stride, columns, 3); break;
        case 4: tile_pairs(x, x_stride, panel, inner, y, y_stride, columns, 4); break;
        case 5: tile_pairs(x, x_stride, panel, inner, y, y_stride, columns, 5); break;
        case 6: tile_pairs(x, x_stride, panel, inner, y, y_stride, columns, 6); break;
    }
}

// ---------------------------------------------------------------------------------------------------------------- int8

// Rows of activations as bytes. `offset` undoes what VNNI's unsigned weights add: 128 times the sum of the group's bytes.
typedef struct {
    int8_t *bytes;    // [rows][inner]
    float *scale;     // [rows][inner / group]
    int32_t *offset;  // [rows][inner / group]
} Quantized;

static Quantized quantized_in(void *scratch, int rows, int inner) {
    long groups = (long)rows * (inner / group_of(inner));
    Quantized q = {(int8_t *)scratch + groups * 8, scratch, (int32_t *)scratch + groups};
    return q;
}

static void quantize(const float *x, int rows, int inner, Quantized to) {
    int group = group_of(inner), groups = inner / group;
    for (long row = 0; row < rows; row++)
        for (int g = 0; g < groups; g++) {
            const float *from = x + row * inner + g * group;
            int8_t *bytes = to.bytes + row * inner + g * group;
            ivec tops = (ivec){};  // the bits of absolute values: ordered as they are, with NaN above all
            for (int k = 0; k < group; k += LANES) {
                ivec size = *(const ivec *)(from + k) & 0x7fffffff;
                tops = (ivec)choose(size > tops, (vec)size, (vec)tops);
            }
            float top = largest_bits(tops), scale = top / 127.0f;
            int32_t total = 0;
            float inverse = top > 0 && top <= 3.0e38f ? 127.0f / top : 0.0f;
            for (int k = 0; k < group; k++) {
                int whole = (int)__builtin_rintf(from[k] * inverse);
                bytes[k] = (int8_t)whole;
                total += whole;
            }
            // What is not finite must stay so: it ends that row's request, and is not turned into numbers.
            to.scale[row * groups + g] = top <= 3.0e38f ? scale : __builtin_nanf("");
            to.offset[row * groups + g] = -128 * total;
        }
}

#ifdef __AVX512F__
typedef __m512i Sums;
INLINE vec to_floats(Sums sums) { return (vec)_mm512_cvtepi32_ps(sums); }
#else
typedef __m256i Sums;
INLINE vec to_floats(Sums sums) { return (vec)_mm256_cvtepi32_ps(sums); }
#endif

// To each lane's sum, four products of its four weights with `four`, the bytes of one row.
#if defined(__AVX512VNNI__)
INLINE Sums sums_from(int32_t offset) { return _mm512_set1_epi32(offset); }
INLINE Sums multiply_add(Sums sums, const uint8_t *weights, int32_t four) {
    return _mm512_dpbusd_epi32(sums, _mm512_loadu_si512(weights), _mm512_set1_epi32(four));
}
#else
// |x| times w with the sign of x: two products of at most 127 * 127 fit into sixteen bits.
#ifdef __AVX512F__
INLINE Sums sums_from(int32_t offset) { return (void)offset, _mm512_setzero_si512(); }
INLINE Sums multiply_add(Sums sums, const uint8_t *weights, int32_t four) {
    __m512i value = _mm512_set1_epi32(four), given = _mm512_loadu_si512(weights);
    given = _mm512_mask_sub_epi8(given, _mm512_movepi8_mask(value), _mm512_setzero_si512(), given);
    __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(value), given);
    return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#else
INLINE Sums sums_from(int32_t offset) { return (void)offset, _mm256_setzero_si256(); }
INLINE Sums multiply_add(Sums sums, const uint8_t *weights, int32_t four) {
    __m256i value = _mm256_set1_epi32(four), given = _mm256_loadu_si256((const __m256i *)weights);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(given, value));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
#endif

INLINE void tile_bytes(Quantized x, long row, const uint8_t *panel, int inner, float *y, long y_stride, int columns,
                       const int rows) {
    int group = group_of(inner), groups = inner / group;
    vec sums[INT8_ROWS][PANEL_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] = (vec){};
    for (int g = 0; g < groups; g++) {
        Sums whole[INT8_ROWS][PANEL_VECTORS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < PANEL_VECTORS; v++) whole[r][v] = sums_from(x.offset[(row + r) * groups + g]);
        for (int k = 0; k < group; k += 4) {
            Sums weights[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; v++) {
                memcpy(&weights[v], panel + (long)k * PANEL + 4 * LANES * v, sizeof(Sums));
                IN_REGISTER(weights[v]);
            }
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, x.bytes + (row + r) * inner + g * group + k, 4);
                for (int v = 0; v < PANEL_VECTORS; v++)
                    whole[r][v] = multiply_add(whole[r][v], (const uint8_t *)&weights[v], four);
            }
        }
        const float *scales = (const float *)(panel + (long)group * PANEL);
        for (int r = 0; r < rows; r++) {
            vec scale = splat(x.scale[(row + r) * groups + g]);
            for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] += to_floats(whole[r][v]) * load(scales + LANES * v) * scale;
        }
        panel += (long)group * PANEL + PANEL * 4;
    }
    for (int r = 0; r < rows; r++) store_columns(y + r * y_stride, sums[r], columns);
}

static __attribute__((noinline)) void tile_int8(Quantized x, long row, const uint8_t *panel, int inner, float *y,
                                                long y_stride, int columns, int rows) {
    switch (rows) {
        case 1: tile_bytes(x, row, panel, inner, y, y_stride, columns, 1); break;
        case 2: tile_bytes(x, row, panel, inner, y, y_stride, columns, 2); break;
        case 3: tile_bytes(x, row, panel, inner, y, y_stride, columns, 3); break;
    }
}

// ---------------------------------------------------------------------------------------------------------- all kinds

// Steps of its inner loops: these are what asks for KV meanwhile (see ahead.h), and those of float32 and float16 alone, since nothing
// was gained with int8.
static long steps_of(int rows, int inner, int out, int kind) {
    if (kind != KIND_FLOAT32 && kind != KIND_FLOAT16) return 0;
    return (long)((out + PANEL - 1) / PANEL) * ((rows + MAX_ROWS - 1) / MAX_ROWS) * inner;
}

// y [rows][out] = x [rows][inner] times the matrix, plus `bias` [out] if there is one. `scratch`: the rows in the kind's own form, for
// int8 (see quantized_in) and bfloat16.
static void project(const float *x, int rows, int inner, const void *packed, int kind, int out, const float *bias, float *y,
                    void *scratch, int threads, Ahead *ahead) {
    long panels = (out + PANEL - 1) / PANEL, bytes = panel_bytes(inner, kind);
    int most = kind == KIND_INT8 ? INT8_ROWS : MAX_ROWS, tiles = (rows + most - 1) / most;
    Quantized q = {0};
    if (kind == KIND_INT8) quantize(x, rows, inner, q = quantized_in(scratch, rows, inner));
    if (kind == KIND_BFLOAT16) round_to_bfloat16(x, (long)rows * inner, scratch);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long panel = 0; panel < panels; panel++) {
        const void *weights = (const char *)packed + panel * bytes;
        Ahead *mine = ahead + omp_get_thread_num();
        int columns = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
        for (int t = 0, row = 0, count; t < tiles; t++, row += count) {
            count = (rows - row) / (tiles - t);  // tiles of even height: a low one does little for each weight that it loads
            const float *from = x + (long)row * inner;
            float *to = y + (long)row * out + panel * PANEL;
            const uint16_t *pairs = (const uint16_t *)scratch + (long)row * inner;
            if (kind == KIND_INT8) tile_int8(q, row, weights, inner, to, out, columns, count);
            else if (kind == KIND_BFLOAT16) tile_bfloat16(pairs, inner, weights, inner, to, out, columns, count);
            else if (kind == KIND_FLOAT16) tile_float16(from, inner, weights, inner, to, out, columns, count, mine);
            else tile_float32(from, inner, weights, inner, to, out, columns, count, mine);
        }
    }
    if (bias)
        for (long row = 0; row < rows; row++)
            for (int k = 0; k < out; k++) y[row * out + k] += bias[k];
}
