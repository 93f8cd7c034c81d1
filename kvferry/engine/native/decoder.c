// A step of a Llama decoder over the paged pool, in one call: projections, norms, rotary positions, attention, output layer.
//
// Every sum runs in an order that depends on positions and sizes alone: a projection's along its inner dimension, a norm's over
// sixteen lanes, an attention's over keys in blocks of sixteen from position 0 with a running maximum (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018). So a row's bits do not depend on who shares the step, on how a prompt
// was cut, or on the number of threads, which only share out whole output panels and whole (row, head) pairs.
//
// Memory: a block is [layer][K, V][KV head][...], K as [dim][token], V as [token][dim], so that neither needs a transpose.
// Called by kvferry/engine/native/library.py alone. Knows nothing of sequences, pools or sampling.

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4)));

#ifdef __AVX512F__
#define PANEL_VECTORS 4  // 6 rows x 4 vectors of accumulators fill the 32 registers
#else
#define PANEL_VECTORS 1  // 6 rows x 2 halves of one vector fill the 16 registers
#endif
#define PANEL (16 * PANEL_VECTORS)
#define MAX_ROWS 6
#define MAX_QUERIES 6
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *input_norm;
    const void *query_key_value, *output;
    const float *post_norm;
    const void *gate_up, *down;
} Layer;

typedef struct {
    int32_t hidden, intermediate, layers, heads, kv_heads, head, vocabulary, block, is_half;
    float epsilon;
    const float *embedding, *cosine, *sine, *norm;
    const void *output_layer;
    const Layer *layer;
} Model;

typedef struct {
    int32_t rows, spans, logit_rows, threads;
    const int32_t *tokens, *positions, *slots, *offsets;  // [rows]
    const int32_t *begins, *tables;                       // [spans + 1] rows; [spans] where a span's table begins in `table`
    const int32_t *table, *logit_row;
    float *blocks, *logits;
    float *hidden, *normed, *projected, *attended, *gated;  // scratch, [rows][...]
} Batch;

int32_t panel_width(void) { return PANEL; }

// ------------------------------------------------------------------------------------------------------------ vectors

INLINE v16 splat(float value) { return value - (v16){}; }

INLINE v16 load(const float *from) { return *(const v16 *)from; }

INLINE void store(float *to, v16 value) { *(v16 *)to = value; }

INLINE v16 load_weights(const void *panel, long index, int is_half) {
    if (!is_half) return load((const float *)panel + index);
    const uint16_t *from = (const uint16_t *)panel + index;
#ifdef __AVX512F__
    return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    union { __m256 half[2]; v16 whole; } both;
    both.half[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    both.half[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8)));
    return both.whole;
#endif
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

INLINE v16 larger(v16 a, v16 b) { return choose(a > b, a, b); }

INLINE float largest(v16 v) {
    v = larger(v, turned(v, 8));
    v = larger(v, turned(v, 4));
    v = larger(v, turned(v, 2));
    v = larger(v, turned(v, 1));
    return v[0];
}

// exp(x) = 2^n * 2^f with |f| <= 1/2 and a polynomial of degree 6 for 2^f; below -87 it is 0 for all purposes. NaN stays.
INLINE v16 exponential(v16 given) {
    v16 low = splat(-87.0f), high = splat(88.0f), x = choose(given < low, low, given);
    x = choose(x > high, high, x);
    v16 scaled = x * splat(1.44269504088896341f);
    v16 shifted = scaled + splat(12582912.0f);  // 1.5 * 2^23: rounds to the nearest integer
    i16 exponent = (i16)shifted - (i16)splat(12582912.0f);
    v16 f = scaled - (shifted - splat(12582912.0f));
    v16 p = splat(1.535336188319500e-4f);
    p = p * f + splat(1.339887440266574e-3f);
    p = p * f + splat(9.618437357674640e-3f);
    p = p * f + splat(5.550332471162809e-2f);
    p = p * f + splat(2.402264791363012e-1f);
    p = p * f + splat(6.931472028550421e-1f);
    p = p * f + splat(1.0f);
    return choose(given == given, (v16)((i16)p + (exponent << 23)), given);
}

// -------------------------------------------------------------------------------------------------------- projections

// Weights [out][inner] become panels [out / PANEL][inner][PANEL], padded with zeros.
void pack(const float *weights, int32_t out, int32_t inner, int32_t is_half, void *packed) {
    for (long panel = 0; panel * PANEL < out; panel++)
        for (long k = 0; k < inner; k++)
            for (long column = 0; column < PANEL; column++) {
                long row = panel * PANEL + column, at = (panel * inner + k) * PANEL + column;
                float value = row < out ? weights[row * inner + k] : 0.0f;
                if (is_half) ((uint16_t *)packed)[at] = _cvtss_sh(value, 0);
                else ((float *)packed)[at] = value;
            }
}

INLINE void tile(const float *x, long x_stride, const void *panel, int inner, float *y, long y_stride, int columns,
                 const int rows, const int is_half) {
    v16 sums[MAX_ROWS][PANEL_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] = (v16){};
    for (long k = 0; k < inner; k++) {
        v16 weights[PANEL_VECTORS];
        for (int v = 0; v < PANEL_VECTORS; v++) weights[v] = load_weights(panel, k * PANEL + 16 * v, is_half);
        for (int r = 0; r < rows; r++) {
            v16 value = splat(x[r * x_stride + k]);
            for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] += value * weights[v];
        }
    }
    for (int r = 0; r < rows; r++) {
        if (columns == PANEL) {
            for (int v = 0; v < PANEL_VECTORS; v++) store(y + r * y_stride + 16 * v, sums[r][v]);
        } else {
            float whole[PANEL];
            for (int v = 0; v < PANEL_VECTORS; v++) store(whole + 16 * v, sums[r][v]);
            memcpy(y + r * y_stride, whole, columns * sizeof(float));
        }
    }
}

#define TILE(n, half) case n: tile(x, x_stride, panel, inner, y, y_stride, columns, n, half); break;

static __attribute__((noinline)) void tile_float(const float *x, long x_stride, const void *panel, int inner, float *y,
                                                 long y_stride, int columns, int rows) {
    switch (rows) { TILE(1, 0) TILE(2, 0) TILE(3, 0) TILE(4, 0) TILE(5, 0) TILE(6, 0) }
}

static __attribute__((noinline)) void tile_half(const float *x, long x_stride, const void *panel, int inner, float *y,
                                                long y_stride, int columns, int rows) {
    switch (rows) { TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1) }
}

static void project(const float *x, int rows, int inner, const void *packed, int is_half, int out, float *y, int threads) {
    long panels = (out + PANEL - 1) / PANEL, panel_bytes = (long)inner * PANEL * (is_half ? 2 : 4);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long panel = 0; panel < panels; panel++) {
        const void *weights = (const char *)packed + panel * panel_bytes;
        int columns = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
        for (int row = 0; row < rows; row += MAX_ROWS) {
            int count = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            const float *from = x + (long)row * inner;
            float *to = y + (long)row * out + panel * PANEL;
            if (is_half) tile_half(from, inner, weights, inner, to, out, columns, count);
            else tile_float(from, inner, weights, inner, to, out, columns, count);
        }
    }
}

// ----------------------------------------------------------------------------------------------------- row by row parts

static void rms_norm(const float *x, const float *weight, float epsilon, int rows, int width, float *y) {
    for (int row = 0; row < rows; row++, x += width, y += width) {
        v16 squares = (v16){};
        for (int k = 0; k < width; k += 16) squares += load(x + k) * load(x + k);
        v16 scale = splat(1.0f / __builtin_sqrtf(sum(squares) / width + epsilon));
        for (int k = 0; k < width; k += 16) store(y + k, load(weight + k) * (load(x + k) * scale));
    }
}

static void rotate(float *head, const float *cosine, const float *sine, int width) {
    int half = width / 2;
    for (int k = 0; k < half; k++) {
        float first = head[k], second = head[k + half];
        head[k] = first * cosine[k] - second * sine[k];
        head[k + half] = second * cosine[k + half] + first * sine[k + half];
    }
}

// Rotates queries and keys in place and writes keys and values into the pool.
static void write_kv(const Model *m, const Batch *b, int layer) {
    long queries = (long)m->heads * m->head, width = queries + 2L * m->kv_heads * m->head;
    long part = (long)m->kv_heads * m->block * m->head, block = part * 2 * m->layers;
    for (int row = 0; row < b->rows; row++) {
        float *q = b->projected + row * width, *k = q + queries, *v = k + (long)m->kv_heads * m->head;
        const float *cosine = m->cosine + (long)b->positions[row] * m->head, *sine = m->sine + (long)b->positions[row] * m->head;
        for (int h = 0; h < m->heads; h++) rotate(q + h * m->head, cosine, sine, m->head);
        float *keys = b->blocks + b->slots[row] * block + 2L * layer * part, *values = keys + part;
        for (int h = 0; h < m->kv_heads; h++, k += m->head, v += m->head) {
            rotate(k, cosine, sine, m->head);
            float *to = keys + (long)h * m->block * m->head + b->offsets[row];
            for (int d = 0; d < m->head; d++) to[(long)d * m->block] = k[d];
            memcpy(values + ((long)h * m->block + b->offsets[row]) * m->head, v, m->head * sizeof(float));
        }
    }
}

static void silu_gate(const float *gate_up, int rows, int width, float *y) {
    for (int row = 0; row < rows; row++, gate_up += 2 * width, y += width)
        for (int k = 0; k < width; k += 16) {
            v16 gate = load(gate_up + k);
            store(y + k, gate / (splat(1.0f) + exponential(-gate)) * load(gate_up + width + k));
        }
}

static void add(float *x, const float *y, long count) {
    for (long k = 0; k < count; k += 16) store(x + k, load(x + k) + load(y + k));
}

// ---------------------------------------------------------------------------------------------------------- attention

// Some queries of one KV head, each with its own position, over sixteen keys at a time.
INLINE void attend(const float *const *query, float *const *out, const int *position, const int count, const float *blocks,
                   const int32_t *table, long block_stride, long part, int block, int width, float scale) {
    float best[MAX_QUERIES], total[MAX_QUERIES];
    int last = 0;
    for (int q = 0; q < count; q++) {
        best[q] = -__builtin_inff();
        total[q] = 0.0f;
        memset(out[q], 0, width * sizeof(float));
        last = position[q] > last ? position[q] : last;
    }
    const i16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int pair = 0; pair <= last; pair += 32) {
        // Two groups of sixteen keys at once keep the adders busy; each key's sum is the same as if it were alone. The next
        // two are asked for meanwhile: blocks lie anywhere in memory.
        int starts[2] = {pair, pair + 16 <= last ? pair + 16 : pair};
        int ahead = pair + 32 <= last ? pair + 32 : pair, beyond = pair + 48 <= last ? pair + 48 : ahead;
        const float *next[2] = {blocks + table[ahead / block] * block_stride, blocks + table[beyond / block] * block_stride};
        const float *keys[2], *all_values[2];
        for (int g = 0; g < 2; g++) {
            const float *at = blocks + table[starts[g] / block] * block_stride;
            keys[g] = at + starts[g] % block;
            all_values[g] = at + part + (long)(starts[g] % block) * width;
        }
        v16 scores[2][MAX_QUERIES];
        for (int q = 0; q < count; q++) scores[0][q] = scores[1][q] = (v16){};
        for (int d = 0; d < width; d++) {
            v16 first = load(keys[0] + (long)d * block), second = load(keys[1] + (long)d * block);
            for (int q = 0; q < count; q++) {
                v16 value = splat(query[q][d]);
                scores[0][q] += value * first;
                scores[1][q] += value * second;
            }
            __builtin_prefetch(next[0] + ahead % block + (long)d * block, 0, 2);
            __builtin_prefetch(next[0] + part + (long)(ahead % block) * width + (long)d * 16, 0, 2);
            __builtin_prefetch(next[1] + beyond % block + (long)d * block, 0, 2);
            __builtin_prefetch(next[1] + part + (long)(beyond % block) * width + (long)d * 16, 0, 2);
        }
        for (int g = 0; g < 2 && starts[g] == pair + 16 * g; g++) {
            int start = starts[g];
            const float *values = all_values[g];
            for (int q = 0; q < count; q++) {
                int seen = position[q] - start + 1;
                if (seen <= 0) continue;
                seen = seen < 16 ? seen : 16;
                v16 score = scores[g][q] * splat(scale);
                i16 is_seen = lanes < (lanes - lanes + seen);
                score = choose(is_seen, score, splat(-__builtin_inff()));
                float highest = largest(score);
                float next = highest > best[q] ? highest : best[q];
                v16 weights = exponential(score - splat(next));
                weights = choose(is_seen, weights, (v16){});
                if (next > best[q]) {
                    v16 rescale = exponential(splat(best[q] - next));
                    total[q] *= rescale[0];
                    for (int d = 0; d < width; d += 16) store(out[q] + d, load(out[q] + d) * rescale);
                }
                best[q] = next;
                total[q] += sum(weights);
                float weight[16];
                store(weight, weights);
                for (int d = 0; d + 64 <= width; d += 64) {
                    v16 a = load(out[q] + d), b = load(out[q] + d + 16), c = load(out[q] + d + 32), e = load(out[q] + d + 48);
                    for (int j = 0; j < seen; j++) {
                        const float *value = values + (long)j * width + d;
                        v16 w = splat(weight[j]);
                        a += w * load(value), b += w * load(value + 16), c += w * load(value + 32), e += w * load(value + 48);
                    }
                    store(out[q] + d, a), store(out[q] + d + 16, b), store(out[q] + d + 32, c), store(out[q] + d + 48, e);
                }
                for (int d = width / 64 * 64; d < width; d += 16) {
                    v16 a = load(out[q] + d);
                    for (int j = 0; j < seen; j++) a += splat(weight[j]) * load(values + (long)j * width + d);
                    store(out[q] + d, a);
                }
            }
        }
    }
    for (int q = 0; q < count; q++)
        for (int d = 0; d < width; d += 16) store(out[q] + d, load(out[q] + d) / splat(total[q]));
}

static void attention(const Model *m, const Batch *b, int layer) {
    int group = m->heads / m->kv_heads;
    long queries = (long)m->heads * m->head, width = queries + 2L * m->kv_heads * m->head;
    long part = (long)m->kv_heads * m->block * m->head, block_stride = part * 2 * m->layers;
    float scale = 1.0f / __builtin_sqrtf(m->head);
    for (int span = 0; span < b->spans; span++) {
        const int32_t *table = b->table + b->tables[span];
        int begin = b->begins[span], pairs = (b->begins[span + 1] - begin) * group;
        int tiles = (pairs + MAX_QUERIES - 1) / MAX_QUERIES;
#pragma omp parallel for schedule(dynamic) collapse(2) num_threads(b->threads) if (b->threads > 1)
        for (int h = 0; h < m->kv_heads; h++)
            for (int t = 0; t < tiles; t++) {
                const float *query[MAX_QUERIES];
                float *out[MAX_QUERIES];
                int position[MAX_QUERIES], count = pairs - t * MAX_QUERIES;
                count = count < MAX_QUERIES ? count : MAX_QUERIES;
                for (int q = 0; q < count; q++) {
                    int pair = t * MAX_QUERIES + q, row = begin + pair / group, head = h * group + pair % group;
                    query[q] = b->projected + row * width + (long)head * m->head;
                    out[q] = b->attended + row * queries + (long)head * m->head;
                    position[q] = b->positions[row];
                }
                const float *base = b->blocks + 2L * layer * part + (long)h * m->block * m->head;
#define ATTEND(n) case n: attend(query, out, position, n, base, table, block_stride, part, m->block, m->head, scale); break;
                switch (count) { ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) ATTEND(5) ATTEND(6) }
            }
    }
}

// ---------------------------------------------------------------------------------------------------------------- step

void step(const Model *m, const Batch *b) {
    int rows = b->rows, half = m->is_half, threads = b->threads;
    int queries = m->heads * m->head, projected = queries + 2 * m->kv_heads * m->head;
    for (int row = 0; row < rows; row++)
        memcpy(b->hidden + (long)row * m->hidden, m->embedding + (long)b->tokens[row] * m->hidden, m->hidden * sizeof(float));
    for (int layer = 0; layer < m->layers; layer++) {
        const Layer *l = m->layer + layer;
        rms_norm(b->hidden, l->input_norm, m->epsilon, rows, m->hidden, b->normed);
        project(b->normed, rows, m->hidden, l->query_key_value, half, projected, b->projected, threads);
        write_kv(m, b, layer);
        attention(m, b, layer);
        project(b->attended, rows, queries, l->output, half, m->hidden, b->normed, threads);
        add(b->hidden, b->normed, (long)rows * m->hidden);
        rms_norm(b->hidden, l->post_norm, m->epsilon, rows, m->hidden, b->normed);
        project(b->normed, rows, m->hidden, l->gate_up, half, 2 * m->intermediate, b->projected, threads);
        silu_gate(b->projected, rows, m->intermediate, b->gated);
        project(b->gated, rows, m->intermediate, l->down, half, m->hidden, b->normed, threads);
        add(b->hidden, b->normed, (long)rows * m->hidden);
    }
    if (!b->logit_rows) return;
    for (int k = 0; k < b->logit_rows; k++)
        memcpy(b->normed + (long)k * m->hidden, b->hidden + (long)b->logit_row[k] * m->hidden, m->hidden * sizeof(float));
    rms_norm(b->normed, m->norm, m->epsilon, b->logit_rows, m->hidden, b->projected);
    project(b->projected, b->logit_rows, m->hidden, m->output_layer, half, m->vocabulary, b->logits, threads);
}
