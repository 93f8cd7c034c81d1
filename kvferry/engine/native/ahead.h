// Asks for the KV that the next layer's attention begins with, while matrix products keep the arithmetic busy and leave the memory idle.
//
// The blocks' parts of one layer, in the order in which attention reads them, as runs of cache lines; each thread asks for every
// `threads`-th. It begins so late that the products end when all has been asked for, and asks for no more than MOST_LINES: what
// waits in the last level's cache must still be there when it is read. Changes no bit of a result.

#define LINE 64
#define MOST_LINES (4L * 1024 * 1024 / LINE)

#define MAX_QUERIES 6
#define GROUP_KEYS 32
#define MANY_TILES 8

typedef struct {
    int32_t layers, heads, kv_heads, head, block, window, is_bfloat16, in_pairs;
    float scale;
} Shape;

typedef struct {
    int32_t spans, threads;
    const int32_t *positions;        // [rows]
    const int32_t *begins, *tables;  // [spans + 1] rows; [spans] where a span's table begins in `table`
    const int32_t *table;            // slots
    void *blocks;
} Spans;

typedef struct {
    const Shape *shape;
    const Spans *spans;
    int layer, span, block, blocks;  // the block of the span that comes next, of how many
    const char *at;                  // the next line,
    long run;                        // and how many of its run are left
    long left;                       // lines that may be asked for
    long wait;                       // steps of a product to let pass before
} __attribute__((aligned(LINE))) Ahead;

static int first_block(const Shape *s, const Spans *b, int span) {
    int position = b->positions[b->begins[span]], first = s->window && position >= s->window ? position - s->window + 1 : 0;
    return first / GROUP_KEYS * GROUP_KEYS / s->block;
}

// Those of a span that few rows read: what many rows read stays in the cache by itself.
static int cold_blocks(const Shape *s, const Spans *b, int span) {
    int pairs = (b->begins[span + 1] - b->begins[span]) * (s->heads / s->kv_heads);
    if (pairs > (MANY_TILES - 1) * MAX_QUERIES) return 0;
    return b->positions[b->begins[span + 1] - 1] / s->block + 1 - first_block(s, b, span);
}

static long layer_lines(const Shape *s) { return 2L * s->kv_heads * s->block * s->head * (s->is_bfloat16 ? 2 : 4) / LINE; }

// From a layer's first block on (after the last, nothing), a line in each of `steps` of matrix products at most.
static void look_ahead(Ahead *each, const Shape *s, const Spans *b, int layer, long steps) {
    long all = 0;
    for (int span = 0; span < b->spans && layer < s->layers; span++) all += cold_blocks(s, b, span) * layer_lines(s);
    long most = all < MOST_LINES ? all : MOST_LINES;
    most = most < steps ? most : steps;
    for (int t = 0; t < b->threads; t++)
        each[t] = (Ahead){s, b, layer, 0, t, cold_blocks(s, b, 0), b->blocks, 0, most / b->threads, (steps - most) / b->threads};
}

static void find_run(Ahead *a) {
    const Spans *b = a->spans;
    while (a->block >= a->blocks) {
        a->block -= a->blocks;
        if (++a->span >= b->spans) {
            a->left = 0;
            return;
        }
        a->blocks = cold_blocks(a->shape, b, a->span);
    }
    long slot = b->table[b->tables[a->span] + first_block(a->shape, b, a->span) + a->block], lines = layer_lines(a->shape);
    a->at = (const char *)b->blocks + (slot * a->shape->layers + a->layer) * lines * LINE;
    a->run = lines;
    a->block += b->threads;
}

// For how many of `steps` a line each is to be asked for from `at` on, `stride` bytes apart: 0, the same again, where there is none.
INLINE long take(Ahead *a, long steps, const char **at, long *stride) {
    *stride = 0, *at = a->at;
    if (a->wait > 0) {
        a->wait -= steps;
        return steps;
    }
    if (a->left > 0 && a->run <= 0) find_run(a);
    if (a->left <= 0) return steps;
    steps = steps < a->run ? steps : a->run;
    *at = a->at, *stride = LINE;
    a->at += steps * LINE, a->run -= steps, a->left -= steps;
    return steps;
}
