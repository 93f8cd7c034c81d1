// Causal attention of new tokens over the paged pool, for prefill's chunks and decode's single rows alike.
//
// A row's sum runs over keys in aligned groups of 32 from position 0 (or from where its window begins), with a running maximum (Milakov
// and Gimelshein, "Online normalizer calculation for softmax", 2018): its order depends on positions alone. Several rows that
// read the same keys go together in a tile, whatever sequence order they come in; each has its own maximum and masks.
//
// A block is [layer][K, V][KV head][...], K as [dim][token], V as [token][dim], so that neither needs a transpose.

#define MAX_QUERIES 6
#define GROUP_KEYS 32
#define MAX_HEADS 8   // of KV, that a tile goes over together
#define MANY_TILES 8

typedef struct {
    int32_t layers, heads, kv_heads, head, block, window, is_bfloat16;
    float scale;
} Shape;

typedef struct {
    int32_t spans, threads;
    const int32_t *positions;        // [rows]
    const int32_t *begins, *tables;  // [spans + 1] rows; [spans] where a span's table begins in `table`
    const int32_t *table;            // slots
    void *blocks;
} Spans;

INLINE v16 load_kv(const void *base, long at, const int is_bfloat16) {
    return is_bfloat16 ? load_bfloat16((const uint16_t *)base + at) : load((const float *)base + at);
}

INLINE const void *element(const void *base, long at, const int is_bfloat16) {
    return (const char *)base + at * (is_bfloat16 ? 2 : 4);
}

// Where one head's queries of a tile stand: they go over the keys group by group, with other heads' in between.
typedef struct {
    const float *query[MAX_QUERIES];
    float *out[MAX_QUERIES];
    float best[MAX_QUERIES];
    v16 total[MAX_QUERIES];  // by lane; added up at the end
} HeadTile;

// The keys `start` to `start` + 31 for one head: two halves that may lie in two blocks anywhere in memory. The next group's are
// asked for meanwhile.
INLINE void attend_group(HeadTile *t, const int *position, const int count, const void *blocks, const int32_t *table,
                         long block_stride, long part, int block, int width, int window, float scale, int start, int last,
                         const int is_bfloat16, const int is_cold) {
    const i16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const void *keys[2], *values[2], *next_keys[2], *next_values[2];
    for (int g = 0; g < 2; g++) {
        int here = start + 16 * g <= last ? start + 16 * g : start, ahead = here + GROUP_KEYS <= last ? here + GROUP_KEYS : here;
        const void *at = element(blocks, table[here / block] * block_stride, is_bfloat16);
        keys[g] = element(at, here % block, is_bfloat16);
        values[g] = element(at, part + (long)(here % block) * width, is_bfloat16);
        at = element(blocks, table[ahead / block] * block_stride, is_bfloat16);
        next_keys[g] = element(at, ahead % block, is_bfloat16);
        next_values[g] = element(at, part + (long)(ahead % block) * width, is_bfloat16);
    }
    v16 scores[2][MAX_QUERIES];
    for (int q = 0; q < count; q++) scores[0][q] = scores[1][q] = (v16){};
    for (int d = 0; d < width; d++) {
        v16 first = load_kv(keys[0], (long)d * block, is_bfloat16), second = load_kv(keys[1], (long)d * block, is_bfloat16);
        for (int q = 0; q < count; q++) {
            v16 value = splat(t->query[q][d]);
            scores[0][q] += value * first;
            scores[1][q] += value * second;
        }
        for (int g = 0; g < 2 && is_cold; g++) {
            if (is_bfloat16 && d & 1 && block == 16) continue;  // a line holds two rows
            __builtin_prefetch(element(next_keys[g], (long)d * block, is_bfloat16), 0, 2);
            __builtin_prefetch(element(next_values[g], (long)d * 16, is_bfloat16), 0, 2);
        }
    }
    float weight[MAX_QUERIES][GROUP_KEYS];
    int most = 0;
    for (int q = 0; q < count; q++) {
        int seen = position[q] - start + 1, unseen = window ? position[q] - window + 1 - start : 0;
        if (seen <= 0 || unseen >= GROUP_KEYS) {
            memset(weight[q], 0, sizeof weight[q]);
            continue;
        }
        most = seen > most ? seen : most;
        v16 first = scores[0][q] * splat(scale), second = scores[1][q] * splat(scale), none = splat(-__builtin_inff());
        if (seen < GROUP_KEYS || unseen > 0) {
            first = choose((lanes < lanes - lanes + seen) & (lanes >= lanes - lanes + unseen), first, none);
            second = choose((lanes + 16 < lanes - lanes + seen) & (lanes + 16 >= lanes - lanes + unseen), second, none);
        }
        float highest = largest(larger(first, second));
        float next = highest > t->best[q] ? highest : t->best[q];
        first = exponential(first - splat(next));
        second = exponential(second - splat(next));
        if (seen < GROUP_KEYS || unseen > 0) {  // exactly nothing
            first = choose((lanes < lanes - lanes + seen) & (lanes >= lanes - lanes + unseen), first, (v16){});
            second = choose((lanes + 16 < lanes - lanes + seen) & (lanes + 16 >= lanes - lanes + unseen), second, (v16){});
        }
        if (next > t->best[q]) {
            float rescale = exponential(splat(t->best[q] - next))[0];
            t->total[q] *= splat(rescale);
            for (int d = 0; d < width; d += 16) store(t->out[q] + d, load(t->out[q] + d) * splat(rescale));
        }
        t->best[q] = next;
        t->total[q] += first + second;
        store(weight[q], first);
        store(weight[q] + 16, second);
    }
    most = most < GROUP_KEYS ? most : GROUP_KEYS;  // a key that no row sees may never have been written
    for (int d = 0; d < width; d += 64) {
        if (width - d >= 64) {
            v16 sums[MAX_QUERIES][4];
            for (int q = 0; q < count; q++)
                for (int v = 0; v < 4; v++) sums[q][v] = load(t->out[q] + d + 16 * v);
            for (int j = 0; j < most; j++) {
                v16 value[4];
                for (int v = 0; v < 4; v++)
                    value[v] = load_kv(values[j >> 4], (long)(j & 15) * width + d + 16 * v, is_bfloat16);
                for (int q = 0; q < count; q++) {
                    v16 w = splat(weight[q][j]);
                    for (int v = 0; v < 4; v++) sums[q][v] += w * value[v];
                }
            }
            for (int q = 0; q < count; q++)
                for (int v = 0; v < 4; v++) store(t->out[q] + d + 16 * v, sums[q][v]);
            continue;
        }
        for (int v = 0; v < (width - d) / 16; v++)
            for (int q = 0; q < count; q++) {
                v16 sums = load(t->out[q] + d + 16 * v);
                for (int j = 0; j < most; j++)
                    sums += splat(weight[q][j]) * load_kv(values[j >> 4], (long)(j & 15) * width + d + 16 * v, is_bfloat16);
                store(t->out[q] + d + 16 * v, sums);
            }
    }
}

// One tile: `count` queries, each with its own position, of each of `heads` KV heads. `blocks` is at the first head's keys.
INLINE void attend(HeadTile *tiles, int heads, const int *position, const int count, const void *blocks, const int32_t *table,
                   long block_stride, long part, int block, int width, int window, float scale, const int is_bfloat16, const int is_cold) {
    int last = 0, begin = 0x7fffffff;
    for (int q = 0; q < count; q++) {
        int first = window && position[q] >= window ? position[q] - window + 1 : 0;
        last = position[q] > last ? position[q] : last;
        begin = first < begin ? first : begin;
    }
    for (int h = 0; h < heads; h++)
        for (int q = 0; q < count; q++) {
            tiles[h].best[q] = -__builtin_inff();
            tiles[h].total[q] = (v16){};
            memset(tiles[h].out[q], 0, width * sizeof(float));
        }
    for (int start = begin / GROUP_KEYS * GROUP_KEYS; start <= last; start += GROUP_KEYS)
        for (int h = 0; h < heads; h++)
            attend_group(tiles + h, position, count, element(blocks, (long)h * block * width, is_bfloat16), table, block_stride,
                         part, block, width, window, scale, start, last, is_bfloat16, is_cold);
    for (int h = 0; h < heads; h++)
        for (int q = 0; q < count; q++) {
            float *out = tiles[h].out[q], total = sum(tiles[h].total[q]);
            for (int d = 0; d < width; d += 16) store(out + d, load(out + d) / splat(total));
        }
}

#define ATTEND(n, cold) case n: attend(tiles, heads, position, n, blocks, table, block_stride, part, s->block, s->head, s->window, s->scale, is_bfloat16, cold); break;
#define ATTEND_ALL \
    if (is_cold) switch (count) { ATTEND(1, 1) ATTEND(2, 1) ATTEND(3, 1) ATTEND(4, 1) ATTEND(5, 1) ATTEND(6, 1) } \
    else switch (count) { ATTEND(1, 0) ATTEND(2, 0) ATTEND(3, 0) ATTEND(4, 0) ATTEND(5, 0) ATTEND(6, 0) }

static __attribute__((noinline)) void attend_float32(const Shape *s, HeadTile *tiles, int heads, const int *position, int count,
                                                     const void *blocks, const int32_t *table, long block_stride, long part,
                                                     int is_cold) {
    const int is_bfloat16 = 0;
    ATTEND_ALL
}

static __attribute__((noinline)) void attend_bfloat16(const Shape *s, HeadTile *tiles, int heads, const int *position, int count,
                                                      const void *blocks, const int32_t *table, long block_stride, long part,
                                                      int is_cold) {
    const int is_bfloat16 = 1;
    ATTEND_ALL
}

// `query_rows` and `out_rows` point at the first row's first head; strides are in floats.
static void attention(const Shape *s, const Spans *b, int layer, const float *query_rows, long query_stride, float *out_rows,
                      long out_stride) {
    int group = s->heads / s->kv_heads;
    long part = (long)s->kv_heads * s->block * s->head, block_stride = part * 2 * s->layers;
    for (int span = 0; span < b->spans; span++) {
        const int32_t *table = b->table + b->tables[span];
        int begin = b->begins[span], pairs = (b->begins[span + 1] - begin) * group;
        int tiles = (pairs + MAX_QUERIES - 1) / MAX_QUERIES;
        // A few tiles read each block once, in one long run over its heads; many tiles keep one head's keys in the cache.
        int heads = tiles >= MANY_TILES || b->threads > 1 ? 1 : MAX_HEADS;
        int is_cold = tiles < MANY_TILES;
        int parts = (s->kv_heads + heads - 1) / heads;
#pragma omp parallel for schedule(dynamic) collapse(2) num_threads(b->threads) if (b->threads > 1)
        for (int first = 0; first < parts; first++)
            for (int t = 0; t < tiles; t++) {
                HeadTile tile[MAX_HEADS];
                int position[MAX_QUERIES], count = pairs - t * MAX_QUERIES, num_heads = s->kv_heads - first * heads;
                count = count < MAX_QUERIES ? count : MAX_QUERIES;
                num_heads = num_heads < heads ? num_heads : heads;
                for (int q = 0; q < count; q++) {
                    int pair = t * MAX_QUERIES + q, row = begin + pair / group;
                    position[q] = b->positions[row];
                    for (int h = 0; h < num_heads; h++) {
                        long head = (long)(first * heads + h) * group + pair % group;
                        tile[h].query[q] = query_rows + row * query_stride + head * s->head;
                        tile[h].out[q] = out_rows + row * out_stride + head * s->head;
                    }
                }
                long at = 2L * layer * part + (long)first * heads * s->block * s->head;
                const void *base = element(b->blocks, at, s->is_bfloat16);
                if (s->is_bfloat16) attend_bfloat16(s, tile, num_heads, position, count, base, table, block_stride, part, is_cold);
                else attend_float32(s, tile, num_heads, position, count, base, table, block_stride, part, is_cold);
            }
    }
}
