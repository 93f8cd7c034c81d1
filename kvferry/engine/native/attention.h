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
#define GROUP_VECTORS (GROUP_KEYS / LANES)
#define KEY_VECTORS 2  // of a group's keys, scored together: with 6 queries what the registers hold
#ifdef __AVX512F__
#define VALUE_VECTORS 4
#else
#define VALUE_VECTORS 2
#endif

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

INLINE vec load_kv(const void *base, long at, const int is_bfloat16) {
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
    vec total[MAX_QUERIES];  // by lane; added up at the end
} HeadTile;

// Which keys of a group each query sees: from `first` on, before `end`. All of them see those from `from` on, before `until`.
typedef struct {
    int first[MAX_QUERIES], end[MAX_QUERIES], from, until, most;
} Visible;

// Adds the weighted values of a group's keys, dims `d` on, `vectors` of LANES. A value that a query does not see is not touched
// for it, not even with the weight 0: it may be another's fault, or never have been written.
INLINE void add_values(HeadTile *t, const int count, const void *const *values, float weight[][GROUP_KEYS], const Visible *see,
                       int d, int width, const int vectors, const int is_bfloat16) {
    vec sums[MAX_QUERIES][VALUE_VECTORS];
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = load(t->out[q] + d + LANES * v);
    for (int j = 0; j < see->most; j++) {
        vec value[VALUE_VECTORS];
        for (int v = 0; v < vectors; v++)
            value[v] = load_kv(values[j >> 4], (long)(j & 15) * width + d + LANES * v, is_bfloat16);
        if (j >= see->from && j < see->until) {
            for (int q = 0; q < count; q++) {
                vec w = splat(weight[q][j]);
                for (int v = 0; v < vectors; v++) sums[q][v] += w * value[v];
            }
        } else {
            for (int q = 0; q < count; q++) {
                if (j < see->first[q] || j >= see->end[q]) continue;
                vec w = splat(weight[q][j]);
                for (int v = 0; v < vectors; v++) sums[q][v] += w * value[v];
            }
        }
    }
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++) store(t->out[q] + d + LANES * v, sums[q][v]);
}

// Which keys of a group's vector a row sees: those before `seen`, from `unseen` on.
INLINE ivec is_visible(int vector, int seen, int unseen) {
    ivec key = lane_numbers() + vector * LANES;
    return (key < key - key + seen) & (key >= key - key + unseen);
}

// The keys `start` to `start` + 31 for one head: two halves that may lie in two blocks anywhere in memory. The next group's are
// asked for meanwhile.
INLINE void attend_group(HeadTile *t, const int *position, const int count, const void *blocks, const int32_t *table,
                         long block_stride, long part, int block, int width, int window, float scale, int start, int last,
                         const int is_bfloat16, int is_cold) {
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
    vec scores[GROUP_VECTORS][MAX_QUERIES];
    for (int begin = 0; begin < GROUP_VECTORS; begin += KEY_VECTORS) {
        vec sums[KEY_VECTORS][MAX_QUERIES];
        for (int g = 0; g < KEY_VECTORS; g++)
            for (int q = 0; q < count; q++) sums[g][q] = (vec){};
        for (int d = 0; d < width; d++) {
            vec key[KEY_VECTORS];
            for (int g = 0; g < KEY_VECTORS; g++) {
                int first = (begin + g) * LANES;
                key[g] = load_kv(keys[first / 16], (long)d * block + first % 16, is_bfloat16);
            }
            for (int q = 0; q < count; q++) {
                vec value = splat(t->query[q][d]);
                for (int g = 0; g < KEY_VECTORS; g++) sums[g][q] += value * key[g];
            }
            if (!is_cold || (is_bfloat16 && d & 1 && block == 16)) continue;  // of bfloat16 a line holds two rows
            for (int half = begin * LANES / 16; half < (begin + KEY_VECTORS) * LANES / 16; half++) {
                __builtin_prefetch(element(next_keys[half], (long)d * block, is_bfloat16), 0, 2);
                __builtin_prefetch(element(next_values[half], (long)d * 16, is_bfloat16), 0, 2);
            }
        }
        for (int g = 0; g < KEY_VECTORS; g++)
            for (int q = 0; q < count; q++) scores[begin + g][q] = sums[g][q];
    }
    float weight[MAX_QUERIES][GROUP_KEYS];
    Visible see = {.until = GROUP_KEYS};
    for (int q = 0; q < count; q++) {
        int seen = position[q] - start + 1, unseen = window ? position[q] - window + 1 - start : 0;
        see.first[q] = unseen > 0 ? unseen : 0, see.end[q] = seen < GROUP_KEYS ? seen : GROUP_KEYS;
        see.from = see.first[q] > see.from ? see.first[q] : see.from;
        see.until = see.end[q] < see.until ? see.end[q] : see.until;
        see.most = see.end[q] > see.most ? see.end[q] : see.most;
        if (seen <= 0 || unseen >= GROUP_KEYS) continue;
        const int is_cut = seen < GROUP_KEYS || unseen > 0;
        vec score[GROUP_VECTORS], tops = splat(-__builtin_inff());
        for (int g = 0; g < GROUP_VECTORS; g++) {
            score[g] = scores[g][q] * splat(scale);
            if (is_cut) score[g] = choose(is_visible(g, seen, unseen), score[g], splat(-__builtin_inff()));
            tops = larger(tops, score[g]);
        }
        float highest = largest(tops), next = highest > t->best[q] ? highest : t->best[q];
        if (next > t->best[q]) {
            float rescale = exponential(splat(t->best[q] - next))[0];
            t->total[q] *= splat(rescale);
            for (int d = 0; d < width; d += LANES) store(t->out[q] + d, load(t->out[q] + d) * splat(rescale));
        }
        t->best[q] = next;
        for (int g = 0; g < GROUP_VECTORS; g++) {
            vec one = exponential(score[g] - splat(next));
            if (is_cut) one = choose(is_visible(g, seen, unseen), one, (vec){});  // exactly nothing
            t->total[q] += one;
            store(weight[q] + LANES * g, one);
        }
    }
    int d = 0;
    for (; d + LANES * VALUE_VECTORS <= width; d += LANES * VALUE_VECTORS)
        add_values(t, count, values, weight, &see, d, width, VALUE_VECTORS, is_bfloat16);
    for (; d < width; d += LANES) add_values(t, count, values, weight, &see, d, width, 1, is_bfloat16);
}

// One tile: `count` queries, each with its own position, of each of `heads` KV heads. `blocks` is at the first head's keys.
INLINE void attend(HeadTile *tiles, int heads, const int *position, const int count, const void *blocks, const int32_t *table,
                   long block_stride, long part, int block, int width, int window, float scale, const int is_bfloat16, int is_cold) {
    int last = 0, begin = 0x7fffffff;
    for (int q = 0; q < count; q++) {
        int first = window && position[q] >= window ? position[q] - window + 1 : 0;
        last = position[q] > last ? position[q] : last;
        begin = first < begin ? first : begin;
    }
    for (int h = 0; h < heads; h++)
        for (int q = 0; q < count; q++) {
            tiles[h].best[q] = -__builtin_inff();
            tiles[h].total[q] = (vec){};
            memset(tiles[h].out[q], 0, width * sizeof(float));
        }
    for (int start = begin / GROUP_KEYS * GROUP_KEYS; start <= last; start += GROUP_KEYS)
        for (int h = 0; h < heads; h++)
            attend_group(tiles + h, position, count, element(blocks, (long)h * block * width, is_bfloat16), table, block_stride,
                         part, block, width, window, scale, start, last, is_bfloat16, is_cold);
    for (int h = 0; h < heads; h++)
        for (int q = 0; q < count; q++) {
            float *out = tiles[h].out[q], total = sum(tiles[h].total[q]);
            for (int d = 0; d < width; d += LANES) store(out + d, load(out + d) / splat(total));
        }
}

#define ATTEND(n) case n: attend(tiles, heads, position, n, blocks, table, block_stride, part, s->block, s->head, s->window, s->scale, is_bfloat16, is_cold); break;
#define ATTEND_ALL switch (count) { ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) ATTEND(5) ATTEND(6) }

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
