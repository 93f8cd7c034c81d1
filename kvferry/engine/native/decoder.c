// A step of a decoder of the Llama family over the paged pool: projections, norms, rotary positions, attention, output layer.
//
// Every sum runs in an order that depends on positions and sizes alone: a projection's along its inner dimension, a norm's over
// lanes, an attention's over aligned groups of keys. So a row's bits do not depend on who shares the step, on how a
// prompt was cut, or on the number of threads, which only share out whole output panels and whole (row, head) pairs.
// Loaded by kvferry/engine/native/library.py. Knows nothing of sequences, pools or sampling.

#include <omp.h>

#include "vectors.h"
#include "ahead.h"
#include "weights.h"
#include "attention.h"
#include "ceilings.h"

typedef struct {
    const float *input_norm;
    const void *query_key_value;
    const float *bias, *query_norm, *key_norm;  // NULL where the family has none
    const void *output;
    const float *post_norm;
    const void *gate_up, *down;
} Layer;

typedef struct {
    int32_t hidden, intermediate, vocabulary, kind;
    float epsilon;
    Shape shape;
    const float *cosine, *sine, *norm;
    const void *output_layer;
    const Layer *layer;
} Model;

typedef struct {
    int32_t rows, logit_rows;
    Spans spans;
    const int32_t *slots, *offsets;  // [rows]
    const int32_t *logit_row;        // [logit_rows]
    float *logits;
    float *hidden;  // [rows][hidden]: embeddings in, the last layer's output out
    float *normed, *projected, *attended, *gated;
    void *quantized;
    double *seconds;  // [PARTS], added to
} Batch;

enum { PART_PROJECTIONS, PART_ATTENTION, PART_OUTPUT_LAYER, PART_OTHERS, PARTS };

// Adds the time since the last call to a part; the first call of a step has no part.
typedef struct { struct timespec last; } Watch;

static void lap(Watch *watch, const Batch *b, int part) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (part < PARTS) b->seconds[part] += (now.tv_sec - watch->last.tv_sec) + (now.tv_nsec - watch->last.tv_nsec) * 1e-9;
    watch->last = now;
}

static void rms_norm(const float *x, const float *weight, float epsilon, int rows, int width, float *y) {
    for (int row = 0; row < rows; row++, x += width, y += width) {
        vec squares = (vec){};
        for (int k = 0; k < width; k += LANES) squares += load(x + k) * load(x + k);
        vec scale = splat(1.0f / __builtin_sqrtf(sum(squares) / width + epsilon));
        for (int k = 0; k < width; k += LANES) store(y + k, load(weight + k) * (load(x + k) * scale));
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

static void write_block(void *keys, void *values, int block, int width, int offset, const float *k, const float *v,
                        int is_bfloat16) {
    if (is_bfloat16) {
        uint16_t *to = (uint16_t *)keys + offset, *row = (uint16_t *)values + (long)offset * width;
        for (int d = 0; d < width; d++) to[(long)d * block] = to_bfloat16(k[d]);
        for (int d = 0; d < width; d++) row[d] = to_bfloat16(v[d]);
    } else {
        float *to = (float *)keys + offset;
        for (int d = 0; d < width; d++) to[(long)d * block] = k[d];
        memcpy((float *)values + (long)offset * width, v, width * sizeof(float));
    }
}

// Norms and rotates queries and keys in place, and writes keys and values into the pool.
static void write_kv(const Model *m, const Batch *b, int layer) {
    const Shape *s = &m->shape;
    const Layer *l = m->layer + layer;
    long queries = (long)s->heads * s->head, width = queries + 2L * s->kv_heads * s->head;
    long part = (long)s->kv_heads * s->block * s->head, block = part * 2 * s->layers, head_part = (long)s->block * s->head;
    for (int row = 0; row < b->rows; row++) {
        float *q = b->projected + row * width, *k = q + queries, *v = k + (long)s->kv_heads * s->head;
        const float *cosine = m->cosine + (long)b->spans.positions[row] * s->head;
        const float *sine = m->sine + (long)b->spans.positions[row] * s->head;
        for (int h = 0; h < s->heads; h++, q += s->head) {
            if (l->query_norm) rms_norm(q, l->query_norm, m->epsilon, 1, s->head, q);
            rotate(q, cosine, sine, s->head);
        }
        for (int h = 0; h < s->kv_heads; h++, k += s->head, v += s->head) {
            if (l->key_norm) rms_norm(k, l->key_norm, m->epsilon, 1, s->head, k);
            rotate(k, cosine, sine, s->head);
            long at = b->slots[row] * block + 2L * layer * part + h * head_part;
            void *keys = (void *)element(b->spans.blocks, at, s->is_bfloat16);
            void *values = (void *)element(b->spans.blocks, at + part, s->is_bfloat16);
            write_block(keys, values, s->block, s->head, b->offsets[row], k, v, s->is_bfloat16);
        }
    }
}

static void silu_gate(const float *gate_up, int rows, int width, float *y) {
    for (int row = 0; row < rows; row++, gate_up += 2 * width, y += width)
        for (int k = 0; k < width; k += LANES) {
            vec gate = load(gate_up + k);
            store(y + k, gate / (splat(1.0f) + exponential(-gate)) * load(gate_up + width + k));
        }
}

static void add(float *x, const float *y, long count) {
    for (long k = 0; k < count; k += LANES) store(x + k, load(x + k) + load(y + k));
}

// All layers: writes the rows' KV, and leaves their hidden states in `hidden`.
void forward(const Model *m, const Batch *b) {
    const Shape *s = &m->shape;
    int rows = b->rows, kind = m->kind, threads = b->spans.threads, hidden = m->hidden;
    int queries = s->heads * s->head, projected = queries + 2 * s->kv_heads * s->head;
    long first = steps_of(rows, hidden, projected, kind);
    long steps = first + steps_of(rows, queries, hidden, kind) + steps_of(rows, hidden, 2 * m->intermediate, kind) +
                 steps_of(rows, m->intermediate, hidden, kind);
    Ahead ahead[threads];
    look_ahead(ahead, s, &b->spans, 0, first);
    Watch watch;
    lap(&watch, b, PARTS);
    for (int layer = 0; layer < s->layers; layer++) {
        const Layer *l = m->layer + layer;
        rms_norm(b->hidden, l->input_norm, m->epsilon, rows, hidden, b->normed);
        lap(&watch, b, PART_OTHERS);
        project(b->normed, rows, hidden, l->query_key_value, kind, projected, l->bias, b->projected, b->quantized, threads,
                ahead);
        lap(&watch, b, PART_PROJECTIONS);
        write_kv(m, b, layer);
        lap(&watch, b, PART_OTHERS);
        attention(s, &b->spans, layer, b->projected, projected, b->attended, queries);
        lap(&watch, b, PART_ATTENTION);
        look_ahead(ahead, s, &b->spans, layer + 1, steps);
        project(b->attended, rows, queries, l->output, kind, hidden, NULL, b->normed, b->quantized, threads, ahead);
        lap(&watch, b, PART_PROJECTIONS);
        add(b->hidden, b->normed, (long)rows * hidden);
        rms_norm(b->hidden, l->post_norm, m->epsilon, rows, hidden, b->normed);
        lap(&watch, b, PART_OTHERS);
        project(b->normed, rows, hidden, l->gate_up, kind, 2 * m->intermediate, NULL, b->projected, b->quantized, threads,
                ahead);
        lap(&watch, b, PART_PROJECTIONS);
        silu_gate(b->projected, rows, m->intermediate, b->gated);
        lap(&watch, b, PART_OTHERS);
        project(b->gated, rows, m->intermediate, l->down, kind, hidden, NULL, b->normed, b->quantized, threads, ahead);
        lap(&watch, b, PART_PROJECTIONS);
        add(b->hidden, b->normed, (long)rows * hidden);
        lap(&watch, b, PART_OTHERS);
    }
}

// Logits [logit_rows][vocabulary] of some of the rows that `forward` left.
void output(const Model *m, const Batch *b) {
    int hidden = m->hidden;
    Ahead nothing[b->spans.threads];
    memset(nothing, 0, sizeof nothing);
    Watch watch;
    lap(&watch, b, PARTS);
    for (int k = 0; k < b->logit_rows; k++)
        memcpy(b->normed + (long)k * hidden, b->hidden + (long)b->logit_row[k] * hidden, hidden * sizeof(float));
    rms_norm(b->normed, m->norm, m->epsilon, b->logit_rows, hidden, b->projected);
    project(b->projected, b->logit_rows, hidden, m->output_layer, m->kind, m->vocabulary, NULL, b->logits, b->quantized,
            b->spans.threads, nothing);
    lap(&watch, b, PART_OUTPUT_LAYER);
}

// The attention of one layer alone, for models whose other parts run elsewhere. queries, out [rows][heads][head].
void paged_attention(const Shape *s, const Spans *b, int32_t layer, const float *queries, float *out) {
    long stride = (long)s->heads * s->head;
    attention(s, b, layer, queries, stride, out, stride);
}
