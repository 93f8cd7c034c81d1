// Causal attention of new tokens over the paged pool, for prefill's chunks and decode's single rows alike.
//
// A row's sum runs over keys in aligned groups of 32 from position 0 (or from where its window begins), with a running maximum (Milakov
// and Gimelshein, "Online normalizer calculation for softmax", 2018): its order depends on positions alone. Several rows that
// read the same keys go together in a tile, whatever sequence order they come in; each has its own maximum and masks.
//
// A block is [layer][K, V][KV head][...], K as [dim][token], V as [token][dim], so that neither needs a transpose.
//
// In pairs: of bfloat16 KV, with queries and weights rounded to bfloat16 too, two dims of a key, or one of two keys' values, are
// multiplied at a time.

#define MAX_HEADS 8   // of KV, that a tile goes over together
#define MAX_PAIRED_WIDTH 256
#define GROUP_VECTORS (GROUP_KEYS / LANES)
#define KEY_VECTORS 2  // of a group's keys, scored together: with 6 queries what the registers hold
#ifdef __AVX512F__
#define VALUE_VECTORS 4
#else
#define VALUE_VECTORS 2
#endif

INLINE vec load_kv(const void *base, long at, const int is_bfloat16) {
    return is_bfloat16 ? load_bfloat16((const uint16_t *)base + at) : load((const float *)base + at);
}

INLINE const void *element(const void *base, long at, const int is_bfloat16) {
    return (const char *)base + at * (is_bfloat16 ? 2 : 4);
}

// Where one head's queries of a tile stand: they go over the keys group by group, with other heads' in between.
typedef struct {
    const float *query[MAX_QUERIES];
    uint16_t rounded[MAX_QUERIES][MAX_PAIRED_WIDTH];  // the same, in pairs
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

// The keys of a group: two halves that may lie in two blocks anywhere in memory. The next group's are asked for meanwhile.
typedef struct {
    const void *keys[2], *values[2], *next_keys[2], *next_values[2];
} Group;

INLINE Group group_at(const void *blocks, const int32_t *table, long block_stride, long part, int block, int width, int start,
                      int last, const int is_bfloat16) {
    Group group;
    for (int half = 0; half < 2; half++) {
        int here = start + 16 * half <= last ? start + 16 * half : start;
        int ahead = here + GROUP_KEYS <= last ? here + GROUP_KEYS : here;
        const void *at = element(blocks, table[here / block] * block_stride, is_bfloat16);
        group.keys[half] = element(at, here % block, is_bfloat16);
        group.values[half] = element(at, part + (long)(here % block) * width, is_bfloat16);
        at = element(blocks, table[ahead / block] * block_stride, is_bfloat16);
        group.next_keys[half] = element(at, ahead % block, is_bfloat16);
        group.next_values[half] = element(at, part + (long)(ahead % block) * width, is_bfloat16);
    }
    return group;
}

INLINE void score_keys(const HeadTile *t, const int count, const Group *group, int block, int width, int is_cold,
                       vec scores[][MAX_QUERIES], const int is_bfloat16) {
    for (int begin = 0; begin < GROUP_VECTORS; begin += KEY_VECTORS) {
        vec sums[KEY_VECTORS][MAX_QUERIES];
        for (int g = 0; g < KEY_VECTORS; g++)
            for (int q = 0; q < count; q++) sums[g][q] = (vec){};
        for (int d = 0; d < width; d++) {
            vec key[KEY_VECTORS];
            for (int g = 0; g < KEY_VECTORS; g++) {
                int first = (begin + g) * LANES;
                key[g] = load_kv(group->keys[first / 16], (long)d * block + first % 16, is_bfloat16);
                IN_REGISTER(key[g]);
            }
            for (int q = 0; q < count; q++) {
                vec value = splat(t->query[q][d]);
                for (int g = 0; g < KEY_VECTORS; g++) sums[g][q] += value * key[g];
            }
            if (!is_cold || (is_bfloat16 && d & 1 && block == 16)) continue;  // of bfloat16 a line holds two rows
            for (int half = begin * LANES / 16; half < (begin + KEY_VECTORS) * LANES / 16; half++) {
                __builtin_prefetch(element(group->next_keys[half], (long)d * block, is_bfloat16), 0, 2);
                __builtin_prefetch(element(group->next_values[half], (long)d * 16, is_bfloat16), 0, 2);
            }
        }
        for (int g = 0; g < KEY_VECTORS; g++)
            for (int q = 0; q < count; q++) scores[begin + g][q] = sums[g][q];
    }
}

#ifdef __AVX512BF16__

// Sixteen pairs of one row's numbers with those of another.
INLINE vec pairs_of(const uint16_t *first, const uint16_t *second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                           18, 2, 17, 1, 16, 0);
    __m512i rows = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
    rows = _mm512_inserti64x4(rows, _mm256_loadu_si256((const __m256i *)second), 1);
    return (vec)_mm512_permutexvar_epi16(order, rows);
}

INLINE void score_key_pairs(const HeadTile *t, const int count, const Group *group, int block, int width, int is_cold,
                            vec scores[][MAX_QUERIES]) {
    vec sums[2][MAX_QUERIES];
    for (int half = 0; half < 2; half++)
        for (int q = 0; q < count; q++) sums[half][q] = (vec){};
    for (int d = 0; d < width; d += 2) {
        vec key[2];
        for (int half = 0; half < 2; half++) {
            const uint16_t *row = (const uint16_t *)group->keys[half] + (long)d * block;
            key[half] = pairs_of(row, row + block);
        }
        for (int q = 0; q < count; q++) {
            int32_t pair = pair_at(t->rounded[q] + d);
            for (int half = 0; half < 2; half++) sums[half][q] = add_pair(sums[half][q], key[half], pair);
        }
        if (!is_cold) continue;
        for (int half = 0; half < 2; half++) {
            __builtin_prefetch((const uint16_t *)group->next_keys[half] + (long)d * block, 0, 2);
            if (block > 16) __builtin_prefetch((const uint16_t *)group->next_keys[half] + (long)(d + 1) * block, 0, 2);
            __builtin_prefetch((const uint16_t *)group->next_values[half] + (long)d * 16, 0, 2);
        }
    }
    for (int half = 0; half < 2; half++)
        for (int q = 0; q < count; q++) scores[half][q] = sums[half][q];
}

// As add_values, with two keys' values at a time.
INLINE void add_value_pairs(HeadTile *t, const int count, const void *const *values, uint16_t weight[][GROUP_KEYS],
                            const Visible *see, int d, int width, const int vectors) {
    vec sums[MAX_QUERIES][VALUE_VECTORS];
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = load(t->out[q] + d + LANES * v);
    for (int j = 0; j < see->most; j += 2) {
        vec value[VALUE_VECTORS];
        const uint16_t *row = (const uint16_t *)values[j >> 4] + (long)(j & 15) * width + d;
        for (int v = 0; v < vectors; v++) value[v] = pairs_of(row + LANES * v, row + width + LANES * v);
        if (j >= see->from && j + 1 < see->until) {
            for (int q = 0; q < count; q++) {
                int32_t pair = pair_at(weight[q] + j);
                for (int v = 0; v < vectors; v++) sums[q][v] = add_pair(sums[q][v], value[v], pair);
            }
        } else {
            for (int q = 0; q < count; q++) {
                int is_first_seen = j >= see->first[q] && j < see->end[q];
                int is_second_seen = j + 1 >= see->first[q] && j + 1 < see->end[q];
                if (!is_first_seen && !is_second_seen) continue;
                int32_t pair = pair_at(weight[q] + j), seen = (is_first_seen ? 0xffff : 0) | (is_second_seen ? 0xffff0000 : 0);
                for (int v = 0; v < vectors; v++) sums[q][v] = add_pair(sums[q][v], (vec)((ivec)value[v] & seen), pair);
            }
        }
    }
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++) store(t->out[q] + d + LANES * v, sums[q][v]);
}

#endif

// Which keys of a group's vector a row sees: those before `seen`, from `unseen` on.
INLINE ivec is_visible(int vector, int seen, int unseen) {
    ivec key = lane_numbers() + vector * LANES;
    return (key < key - key + seen) & (key >= key - key + unseen);
}

// The keys `start` to `start` + 31 for one head.
INLINE void attend_group(HeadTile *t, const int *position, const int count, const void *blocks, const int32_t *table,
                         long block_stride, long part, int block, int width, int window, float scale, int start, int last,
                         const int is_bfloat16, const int in_pairs, int is_cold) {
    Group group = group_at(blocks, table, block_stride, part, block, width, start, last, is_bfloat16);
    vec scores[GROUP_VECTORS][MAX_QUERIES];
    float weight[MAX_QUERIES][GROUP_KEYS];
#ifdef __AVX512BF16__
    uint16_t rounded[MAX_QUERIES][GROUP_KEYS];
    if (in_pairs) score_key_pairs(t, count, &group, block, width, is_cold, scores);
    else
#endif
    score_keys(t, count, &group, block, width, is_cold, scores, is_bfloat16);
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
        if (exceeds(tops, splat(t->best[q]))) {  // seldom after the first groups: what follows does not wait for the largest
            float next = largest(tops);
            vec rescale = exponential(splat(t->best[q] - next));
            t->total[q] *= rescale;
            for (int d = 0; d < width; d += LANES) store(t->out[q] + d, load(t->out[q] + d) * rescale);
            t->best[q] = next;
        }
        for (int g = 0; g < GROUP_VECTORS; g++) {
            vec one = exponential(score[g] - splat(t->best[q]));
            if (is_cut) one = choose(is_visible(g, seen, unseen), one, (vec){});  // exactly nothing
#ifdef __AVX512BF16__
            if (in_pairs) {
                _mm256_storeu_si256((__m256i *)(rounded[q] + LANES * g), (__m256i)_mm512_cvtneps_pbh((__m512)one));
                one = load_bfloat16(rounded[q] + LANES * g);
            }
#endif
            t->total[q] += one;
            if (!in_pairs) store(weight[q] + LANES * g, one);
        }
    }
    int d = 0;
#ifdef __AVX512BF16__
    if (in_pairs) {
        for (; d + LANES * VALUE_VECTORS <= width; d += LANES * VALUE_VECTORS)
            add_value_pairs(t, count, group.values, rounded, &see, d, width, VALUE_VECTORS);
        for (; d < width; d += LANES) add_value_pairs(t, count, group.values, rounded, &see, d, width, 1);
        return;
    }
#endif
    for (; d + LANES * VALUE_VECTORS <= width; d += LANES * VALUE_VECTORS)
        add_values(t, count, group.values, weight, &see, d, width, VALUE_VECTORS, is_bfloat16);
    for (; d < width; d += LANES) add_values(t, count, group.values, weight, &see, d, width, 1, is_bfloat16);
}

// One tile: `count` queries, each with its own position, of each of `heads` KV heads. `blocks` is at the first head's keys.
INLINE void attend(HeadTile *tiles, int heads, const int *position, const int count, const void *blocks, const int32_t *table,
                   long block_stride, long part, int block, int width, int window, float scale, const int is_bfloat16,
                   const int in_pairs, int is_cold) {
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
            if (in_pairs) round_to_bfloat16(tiles[h].query[q], width, tiles[h].rounded[q]);
        }
    for (int start = begin / GROUP_KEYS * GROUP_KEYS; start <= last; start += GROUP_KEYS)
        for (int h = 0; h < heads; h++)
            attend_group(tiles + h, position, count, element(blocks, (long)h * block * width, is_bfloat16), table, block_stride,
                         part, block, width, window, scale, start, last, is_bfloat16, in_pairs, is_cold);
    for (int h = 0; h < heads; h++)
        for (int q = 0; q < count; q++) {
            float *out = tiles[h].out[q], total = sum(tiles[h].total[q]);
            for (int d = 0; d < width; d += LANES) store(out + d, load(out + d) / splat(total));
        }
}

#define ATTEND(n) case n: attend(tiles, heads, position, n, blocks, table, block_stride, part, s->block, s->head, s->window, s->scale, is_bfloat16, in_pairs, is_cold); break;
#define ATTEND_ALL switch (count) { ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) ATTEND(5) ATTEND(6) }

static __attribute__((noinline)) void attend_float32(const Shape *s, HeadTile *tiles, int heads, const int *position, int count,
                                                     const void *blocks, const int32_t *table, long block_stride, long part,
                                                     int is_cold) {
    const int is_bfloat16 = 0, in_pairs = 0;
    ATTEND_ALL
}

static __attribute__((noinline)) void attend_bfloat16(const Shape *s, HeadTile *tiles, int heads, const int *position, int count,
                                                      const void *blocks, const int32_t *table, long block_stride, long part,
                                                      int is_cold) {
    const int is_bfloat16 = 1, in_pairs = 0;
    ATTEND_ALL
}

#ifdef __AVX512BF16__
static __attribute__((noinline)) void attend_pairs(const Shape *s, HeadTile *tiles, int heads, const int *position, int count,
                                                   const void *blocks, const int32_t *table, long block_stride, long part,
                                                   int is_cold) {
    const int is_bfloat16 = 1, in_pairs = 1;
    ATTEND_ALL
}
#endif

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
#ifdef __AVX512BF16__
                if (s->in_pairs && s->head <= MAX_PAIRED_WIDTH)
                    attend_pairs(s, tile, num_heads, position, count, base, table, block_stride, part, is_cold);
                else
#endif
                if (s->is_bfloat16) attend_bfloat16(s, tile, num_heads, position, count, base, table, block_stride, part, is_cold);
                else attend_float32(s, tile, num_heads, position, count, base, table, block_stride, part, is_cold);
            }
    }
}
