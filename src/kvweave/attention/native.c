/* Attention over pages on a CPU: rows of keys and values are read where they are, in tiles of 64 tokens. At the end, states:
 * one token of each row is taken into them.
 *
 * The work is cut into items: some queries of one sequence, the query heads of one KV head, a run of tiles. An item has
 * `rows` = queries x heads rows that share every key it reads. Few rows (decode) take dot products with the keys as they
 * lie; many (chunks of a prompt, MLA) take matrix products, for which a tile of keys is transposed into a buffer once.
 * Sequences whose rows fit one item are cut along the context too, and their parts merged. How the work is cut does not
 * depend on the number of threads, so neither does a bit of the result.
 *
 * Threads are those of the OpenMP runtime that torch has brought into the process; without one, the caller works alone.
 * Addresses come from Python, which has checked dtypes and shapes; block ids and slots are checked here.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* no vector crosses a call: all that have one are inlined */
#endif
#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Whole){__VA_ARGS__})
#endif

enum { LANES = 16, TILE = 64, EIGHT = 8, ROWS = 6, FEW = 8, MOST = 192, SPLIT = 8, MAX_DIM = 1024 };
enum { FLOAT32, FLOAT16, BFLOAT16, E4M3, E5M2, INT8 };

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Whole __attribute__((vector_size(64), aligned(4), may_alias));

typedef struct { /* strides in bytes; `per` columns share a scale */
    const char *at;
    int64_t block, head, token, dim, dtype;
    const char *scales;
    int64_t scale_block, scale_head, scale_token, per;
} Plane;

typedef struct { /* as `cpu.py` packs it */
    int64_t tokens, blocks, kv_heads, planes, head, back, step, causal;
    double scale, softcap;
    const float *sinks;
    Plane key[2], value;
} Layer;

typedef struct {
    const char *queries;
    int64_t query_token, query_head, dtype;
    char *out;
    const int32_t *starts, *lengths, *table;
    int64_t num_rows, width, heads, most; /* rows of an item */
} Call;

typedef struct { /* queries [first, last) of a sequence, tiles [from, to) of those they need; `part`: the place of its rows */
    int64_t row, kv_head, first, last, from, to, part;
} Item;

typedef struct {
    const Layer *layer;
    const Call *call;
    Item *items;
    int64_t num_items, room, part_rows, next, bad_block;
    float *partial;
} Job;

typedef struct { /* what the queries of an item need: tiles [0, head_tiles) and from `tail_tile` on */
    int64_t position, low, high, head_tiles, tail_tile, tiles;
} Span;

static const float NOTHING[MAX_DIM];

/* ---- numbers */

static const int64_t ITEM_BYTES[] = {4, 2, 2, 1, 1, 1};

INLINE float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* The exponent's bias is changed by a product, which is right for numbers below normal ones too. */
INLINE float of_half(uint32_t half)
{
    float size = of_bits((half & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits = bits_of(size) | ((half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0);
    return of_bits(bits | (half & 0x8000) << 16);
}

INLINE float of_e4m3(uint32_t byte)
{
    uint32_t bits = bits_of(of_bits((byte & 0x7f) << 20) * 0x1p120f) | ((byte & 0x7f) == 0x7f ? 0x7fc00000 : 0);
    return of_bits(bits | (byte & 0x80) << 24);
}

INLINE void widen(float *restrict to, const char *from, int64_t dtype, int64_t count)
{
    const uint16_t *halves = (const uint16_t *)from;
    const uint8_t *bytes = (const uint8_t *)from;
    const int8_t *whole = (const int8_t *)from;
    switch (dtype) {
    case FLOAT32: memcpy(to, from, 4 * count); break;
    case FLOAT16: for (int64_t i = 0; i < count; i++) to[i] = of_half(halves[i]); break;
    case BFLOAT16: for (int64_t i = 0; i < count; i++) to[i] = of_bits((uint32_t)halves[i] << 16); break;
    case E4M3: for (int64_t i = 0; i < count; i++) to[i] = of_e4m3(bytes[i]); break;
    case E5M2: for (int64_t i = 0; i < count; i++) to[i] = of_half((uint32_t)bytes[i] << 8); break;
    default: for (int64_t i = 0; i < count; i++) to[i] = whole[i];
    }
}

INLINE uint16_t to_bfloat(float value)
{
    uint32_t bits = bits_of(value);
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE uint16_t to_half(float value)
{
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000)
        return sign | 0x7e00;
    if (size >= 0x477ff000) /* rounds to 65536 or more */
        return sign | 0x7c00;
    if (size < 0x38800000) /* below normal: the sum rounds to a multiple of 2**-24 */
        return sign | (bits_of(of_bits(size) + 0.5f) - bits_of(0.5f));
    return sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
}

INLINE void narrow(char *to, const float *restrict from, int64_t dtype, int64_t count)
{
    uint16_t *halves = (uint16_t *)to;
    if (dtype == FLOAT32)
        memcpy(to, from, 4 * count);
    else if (dtype == BFLOAT16)
        for (int64_t i = 0; i < count; i++) halves[i] = to_bfloat(from[i]);
    else
        for (int64_t i = 0; i < count; i++) halves[i] = to_half(from[i]);
}

INLINE Vector all(float value)
{
    return value - (Vector){0};
}

INLINE Vector larger(Vector a, Vector b)
{
    Whole first = a > b;
    return (Vector)(((Whole)a & first) | ((Whole)b & ~first));
}

/* e**x to two units in the last place; 0 below -87, which is where float32 ends. */
INLINE Vector exponential(Vector x)
{
    Whole none = x < -87.0f;
    x = larger(x, all(-87.0f));
    Vector whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    Vector rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    Whole power = (__builtin_convertvector(whole, Whole) + 127) << 23;
    return (Vector)((Whole)(sum * (Vector)power) & ~none);
}

INLINE Vector capped(Vector x, float cap)
{
    Vector twice = x * (2.0f / cap);
    twice = -larger(-twice, all(-80.0f));
    return cap - 2.0f * cap / (exponential(twice) + 1.0f);
}

/* Sums of neighbours: those of `a`, then those of `b`. */
INLINE Vector neighbours(Vector a, Vector b)
{
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* The sums of eight vectors, one after the other, twice. */
INLINE Vector sums_of(const Vector *v)
{
    Vector first = neighbours(neighbours(v[0], v[1]), neighbours(v[2], v[3]));
    Vector last = neighbours(neighbours(v[4], v[5]), neighbours(v[6], v[7]));
    Vector both = neighbours(first, last);
    return neighbours(both, both);
}

INLINE float sum_of(Vector v)
{
    for (int i = 0; i < 4; i++)
        v = neighbours(v, v);
    return v[0];
}

INLINE float largest_of(Vector v)
{
    float most = v[0];
    for (int i = 1; i < LANES; i++)
        most = v[i] > most ? v[i] : most;
    return most;
}

INLINE float weight_of(float x) /* e**x, the same as in `exponential` */
{
    return exponential(all(x))[0];
}

/* ---- what is needed */

INLINE int64_t padded(int64_t count, int64_t to)
{
    return (count + to - 1) / to * to;
}

INLINE int64_t tail_of(const Layer *layer, int64_t position)
{
    int64_t back = position - layer->back;
    return back < 0 ? 0 : back / layer->step * layer->step;
}

static Span span_of(const Layer *layer, const Call *call, int64_t row, int64_t first, int64_t last)
{
    int64_t length = call->lengths[row], count = call->starts[row + 1] - call->starts[row];
    Span span = {.position = length - count + first};
    span.low = tail_of(layer, span.position < 0 ? 0 : span.position);
    span.high = layer->causal ? length - count + last : length;
    if (span.high > call->width * layer->tokens)
        span.high = call->width * layer->tokens;
    if (span.high <= 0)
        return span;
    int64_t head = layer->head < span.low ? layer->head : span.low, end = padded(span.high, TILE) / TILE;
    span.head_tiles = padded(head, TILE) / TILE;
    span.tail_tile = span.low / TILE > span.head_tiles ? span.low / TILE : span.head_tiles;
    span.tiles = span.head_tiles + (end > span.tail_tile ? end - span.tail_tile : 0);
    return span;
}

/* ---- an item */

typedef struct {
    float *queries, *keys, *values, *packed, *scores, *sums, *most, *total;
    int64_t key_dim, value_dim;
    const float *key[TILE], *value[TILE];
    int64_t block[TILE], token[TILE]; /* where the tokens of a tile are, 0: nowhere */
    const char *key_ahead[TILE / EIGHT], *value_ahead[TILE / EIGHT];
    int64_t key_bytes, value_bytes; /* of eight rows */
} Scratch;

static __thread struct {
    float *memory;
    size_t size;
} own;

static int take_scratch(Scratch *scratch, const Layer *layer, int64_t most)
{
    int64_t key_dim = layer->key[0].dim + (layer->planes > 1 ? layer->key[1].dim : 0);
    scratch->key_dim = padded(key_dim, LANES), scratch->value_dim = padded(layer->value.dim, LANES);
    int64_t rows = padded(most, ROWS) + ROWS;
    float **parts[] = {&scratch->queries, &scratch->keys, &scratch->values, &scratch->packed,
                       &scratch->scores,  &scratch->sums, &scratch->most,   &scratch->total};
    size_t sizes[] = {rows * scratch->key_dim, TILE * scratch->key_dim, TILE * scratch->value_dim,
                      TILE * scratch->key_dim, rows * TILE,            rows * scratch->value_dim,
                      rows,                    rows};
    size_t size = 0;
    for (int i = 0; i < 8; i++)
        size += padded(sizes[i], LANES);
    if (own.size < size) {
        free(own.memory);
        own.memory = aligned_alloc(64, 4 * size);
        own.size = own.memory ? size : 0;
        if (!own.memory)
            return 0;
    }
    float *at = own.memory;
    for (int i = 0; i < 8; at += padded(sizes[i], LANES), i++)
        *parts[i] = at;
    return 1;
}

/* A row of a plane as floats at `to`. */
INLINE void take_row(float *restrict to, const Plane *plane, int64_t block, int64_t head, int64_t token)
{
    widen(to, plane->at + block * plane->block + head * plane->head + token * plane->token, plane->dtype, plane->dim);
    if (!plane->scales)
        return;
    const float *scales = (const float *)(plane->scales + block * plane->scale_block + head * plane->scale_head +
                                          token * plane->scale_token);
    for (int64_t i = 0, end; i < plane->dim; i = end, scales++) {
        end = i + plane->per < plane->dim ? i + plane->per : plane->dim;
        for (int64_t k = i; k < end; k++)
            to[k] *= *scales;
    }
}

/* Rows of a plane for the tokens of a tile: where they lie, or converted into `room`. Tokens without a block are zeros. */
INLINE void find_rows(const float **rows, float *room, const Plane *planes, int64_t count, int64_t width,
                      const Scratch *scratch, int64_t head)
{
    int direct = count == 1 && planes->dtype == FLOAT32 && planes->dim == width;
    const char *at = planes->at + head * planes->head;
    for (int64_t i = 0; direct && i < TILE; i++)
        rows[i] = scratch->block[i] ? (const float *)(at + scratch->block[i] * planes->block +
                                                      scratch->token[i] * planes->token)
                                    : NOTHING;
    for (int64_t i = 0; !direct && i < TILE; i++, room += width) {
        rows[i] = NOTHING;
        if (!scratch->block[i])
            continue;
        int64_t column = 0;
        for (int64_t part = 0; part < count; column += planes[part++].dim)
            take_row(room + column, planes + part, scratch->block[i], head, scratch->token[i]);
        memset(room + column, 0, 4 * (width - column));
        rows[i] = room;
    }
}

/* The blocks of a tile's tokens, 0 for those that nobody sees; how many are seen. A block that is not there is noted. */
INLINE int64_t find_blocks(Scratch *scratch, Job *job, const Item *item, const Span *span, int64_t start)
{
    const Layer *layer = job->layer;
    const int32_t *table = job->call->table + item->row * job->call->width;
    int64_t found = 0, number = start / layer->tokens, token = start % layer->tokens;
    for (int64_t i = 0; i < TILE; number++, token = 0) {
        int64_t block = start + i < span->high ? table[number] : 0;
        if (block < 0 || block >= layer->blocks) {
            __atomic_store_n(&job->bad_block, block, __ATOMIC_RELAXED);
            block = 0;
        }
        for (; i < TILE && token < layer->tokens; i++, token++) {
            int64_t at = start + i;
            int seen = at < span->high && (at < layer->head || at >= span->low);
            scratch->block[i] = seen ? block : 0, scratch->token[i] = token;
            found += seen && block;
        }
    }
    return found;
}

/* Where rows lie that are read a tile later, eight by eight. Within a block the processor foresees what is read next, but
 * not where the next block is, and what comes out of memory comes faster if it is asked for early. */
INLINE int64_t look_ahead(const char **ahead, const Plane *plane, const Job *job, const Item *item, int64_t start)
{
    const Layer *layer = job->layer;
    const int32_t *table = job->call->table + item->row * job->call->width;
    int64_t number = start / layer->tokens, token = start % layer->tokens;
    if (layer->tokens % EIGHT)
        return 0;
    for (int64_t i = 0; i < TILE / EIGHT; i++) {
        int64_t block = number < job->call->width ? table[number] : 0;
        ahead[i] = plane->at + block * plane->block + item->kv_head * plane->head + token * plane->token;
        token += EIGHT;
        if (token == layer->tokens)
            token = 0, number++;
    }
    return EIGHT * plane->dim * ITEM_BYTES[plane->dtype];
}

INLINE void ask_for(const char *at, int64_t size)
{
    for (int64_t i = 0; i < size; i += 64)
        __builtin_prefetch(at + i, 0, 2);
}

/* scores[m][t] = queries[m] . key[t], for few rows: eight tokens at a time, keys as they lie. */
INLINE void dot_products(Scratch *scratch, int64_t rows)
{
    int64_t dim = scratch->key_dim;
    for (int64_t t = 0; t < TILE; t += EIGHT) {
        const float *const *key = scratch->key + t;
        ask_for(scratch->key_ahead[t / EIGHT], scratch->key_bytes);
        for (int64_t m = 0; m < rows; m++) {
            const float *query = scratch->queries + m * dim;
            Vector sums[EIGHT] = {{0}};
            for (int64_t d = 0; d < dim; d += LANES) {
                Vector x = *(const Vector *)(query + d);
                for (int i = 0; i < EIGHT; i++)
                    sums[i] += x * *(const Vector *)(key[i] + d);
            }
            Vector found = sums_of(sums);
            memcpy(scratch->scores + m * TILE + t, &found, EIGHT * sizeof(float));
        }
    }
}

/* sums[m] += scores[m][t] * value[t], for few rows: eight tokens at a time, values as they lie. */
INLINE void add_values(Scratch *scratch, int64_t rows)
{
    int64_t dim = scratch->value_dim;
    for (int64_t t = 0; t < TILE; t += EIGHT) {
        const float *const *value = scratch->value + t;
        ask_for(scratch->value_ahead[t / EIGHT], scratch->value_bytes);
        for (int64_t m = 0; m < rows; m++) {
            const float *weight = scratch->scores + m * TILE + t;
            float *sums = scratch->sums + m * dim;
            for (int64_t d = 0; d < dim; d += LANES) {
                Vector sum = *(const Vector *)(sums + d);
                for (int i = 0; i < EIGHT; i++)
                    sum += *(const Vector *)(value[i] + d) * weight[i];
                *(Vector *)(sums + d) = sum;
            }
        }
    }
}

/* c[ROWS][LANES] (+)= a[ROWS][count] b[count][LANES]; the strides are those of rows. */
INLINE void micro_product(const float *a, int64_t a_row, const float *b, int64_t b_row, int64_t count, float *c,
                          int64_t c_row, int adds)
{
    Vector sums[ROWS];
    for (int i = 0; i < ROWS; i++)
        sums[i] = adds ? *(const Vector *)(c + i * c_row) : (Vector){0};
    for (int64_t k = 0; k < count; k++) {
        Vector right = *(const Vector *)(b + k * b_row);
        for (int i = 0; i < ROWS; i++)
            sums[i] += a[i * a_row + k] * right;
    }
    for (int i = 0; i < ROWS; i++)
        *(Vector *)(c + i * c_row) = sums[i];
}

INLINE void key_product(Scratch *scratch, int64_t rows)
{
    int64_t dim = scratch->key_dim;
    for (int64_t t = 0; t < TILE; t += LANES) {
        for (int64_t d = 0; d < dim; d++)
            for (int64_t i = 0; i < LANES; i++)
                scratch->packed[d * LANES + i] = scratch->key[t + i][d];
        for (int64_t m = 0; m < rows; m += ROWS)
            micro_product(scratch->queries + m * dim, dim, scratch->packed, LANES, dim,
                          scratch->scores + m * TILE + t, TILE, 0);
    }
}

INLINE void value_product(Scratch *scratch, int64_t rows)
{
    int64_t dim = scratch->value_dim;
    for (int64_t i = 0; i < TILE; i++)
        if (scratch->value[i] != scratch->values + i * dim)
            memcpy(scratch->values + i * dim, scratch->value[i], 4 * dim);
    for (int64_t d = 0; d < dim; d += LANES)
        for (int64_t m = 0; m < rows; m += ROWS)
            micro_product(scratch->scores + m * TILE, TILE, scratch->values + d, dim, TILE, scratch->sums + m * dim + d,
                          dim, 1);
}

/* What a row does not see counts as -infinity. */
INLINE void hide(const Layer *layer, const Scratch *scratch, float *scores, int64_t start, int64_t position,
                 int64_t high)
{
    int64_t last = layer->causal ? position : high - 1, tail = tail_of(layer, position < 0 ? 0 : position);
    for (int64_t i = 0, j = start; i < TILE; i++, j++)
        if (j > last || (j >= layer->head && j < tail) || !scratch->block[i] || position < 0)
            scores[i] = -INFINITY;
}

/* Scores of a row become weights, relative to the largest score so far; what was summed before is put in relation. */
INLINE void weigh(Scratch *scratch, int64_t m)
{
    Vector *scores = (Vector *)(scratch->scores + m * TILE), most = scores[0], total = {0};
    for (int i = 1; i < TILE / LANES; i++)
        most = larger(most, scores[i]);
    float before = scratch->most[m], now = largest_of(most);
    now = now > before ? now : before;
    if (now == -INFINITY) {
        memset(scores, 0, 4 * TILE);
        return;
    }
    for (int i = 0; i < TILE / LANES; i++) {
        scores[i] = exponential(scores[i] - now);
        total += scores[i];
    }
    if (now > before) {
        float share = weight_of(before - now), *sums = scratch->sums + m * scratch->value_dim;
        scratch->total[m] *= share;
        for (int64_t d = 0; d < scratch->value_dim; d += LANES)
            *(Vector *)(sums + d) *= share;
    }
    scratch->most[m] = now, scratch->total[m] += sum_of(total);
}

INLINE void score_tile(Scratch *scratch, Job *job, const Item *item, const Span *span, int64_t tile, int64_t rows)
{
    const Layer *layer = job->layer;
    int64_t start = tile * TILE, group = job->call->heads / layer->kv_heads;
    int64_t found = find_blocks(scratch, job, item, span, start);
    if (!found)
        return;
    find_rows(scratch->key, scratch->keys, layer->key, layer->planes, scratch->key_dim, scratch, item->kv_head);
    find_rows(scratch->value, scratch->values, &layer->value, 1, scratch->value_dim, scratch, item->kv_head);
    if (rows <= FEW) {
        scratch->key_bytes = look_ahead(scratch->key_ahead, layer->key, job, item, start + TILE);
        scratch->value_bytes = look_ahead(scratch->value_ahead, &layer->value, job, item, start + TILE);
        dot_products(scratch, rows);
    } else
        key_product(scratch, rows);
    int64_t latest = span->position + item->last - item->first - 1;
    int whole = found == TILE && (!layer->causal || start + TILE - 1 <= span->position) &&
                (start >= tail_of(layer, latest < 0 ? 0 : latest) || start + TILE <= layer->head);
    for (int64_t m = 0; m < rows; m++) {
        Vector *scores = (Vector *)(scratch->scores + m * TILE);
        if (layer->softcap)
            for (int i = 0; i < TILE / LANES; i++)
                scores[i] = capped(scores[i], layer->softcap);
        if (!whole)
            hide(layer, scratch, scratch->scores + m * TILE, start, span->position + m / group, span->high);
        weigh(scratch, m);
    }
    if (rows <= FEW)
        add_values(scratch, rows);
    else
        value_product(scratch, rows);
}

INLINE void take_queries(Scratch *scratch, const Layer *layer, const Call *call, const Item *item)
{
    int64_t group = call->heads / layer->kv_heads, dim = scratch->key_dim, size = ITEM_BYTES[call->dtype];
    int64_t count = layer->key[0].dim + (layer->planes > 1 ? layer->key[1].dim : 0);
    float *to = scratch->queries;
    for (int64_t q = item->first; q < item->last; q++)
        for (int64_t g = 0; g < group; g++, to += dim) {
            int64_t token = call->starts[item->row] + q, head = item->kv_head * group + g;
            widen(to, call->queries + (token * call->query_token + head * call->query_head) * size, call->dtype, count);
            for (int64_t d = 0; d < count; d++)
                to[d] *= (float)layer->scale;
            memset(to + count, 0, 4 * (dim - count));
        }
    memset(to, 0, 4 * dim * ROWS); /* rows that fill up the last product */
}

/* The output of one row of an item: `sums` over `total`, the sink's share added. */
INLINE void put_out(const Layer *layer, const Call *call, int64_t token, int64_t head, float *sums, float most,
                    float total)
{
    int64_t dim = layer->value.dim;
    float share = 1;
    if (layer->sinks && most > -INFINITY) {
        float sink = layer->sinks[head], now = sink > most ? sink : most;
        share = weight_of(most - now);
        total = total * share + weight_of(sink - now);
    }
    share = total == 0 ? 0 : share / total;
    for (int64_t d = 0; d < dim; d++)
        sums[d] *= share;
    narrow(call->out + (token * call->heads + head) * dim * ITEM_BYTES[call->dtype], sums, call->dtype, dim);
}

FOR_EACH_CPU
static void do_item(Job *job, const Item *item, Scratch *scratch)
{
    const Layer *layer = job->layer;
    const Call *call = job->call;
    int64_t group = call->heads / layer->kv_heads, rows = (item->last - item->first) * group, dim = scratch->value_dim;
    Span span = span_of(layer, call, item->row, item->first, item->last);
    take_queries(scratch, layer, call, item);
    memset(scratch->sums, 0, 4 * padded(rows, ROWS) * dim);
    for (int64_t m = 0; m < rows; m++)
        scratch->most[m] = -INFINITY, scratch->total[m] = 0;
    for (int64_t i = item->from; i < item->to; i++)
        score_tile(scratch, job, item, &span, i < span.head_tiles ? i : i - span.head_tiles + span.tail_tile, rows);
    if (item->part >= 0) {
        float *to = job->partial + item->part * (dim + 2);
        for (int64_t m = 0; m < rows; m++, to += dim + 2) {
            memcpy(to, scratch->sums + m * dim, 4 * dim);
            to[dim] = scratch->most[m], to[dim + 1] = scratch->total[m];
        }
        return;
    }
    for (int64_t m = 0; m < rows; m++)
        put_out(layer, call, call->starts[item->row] + item->first + m / group, item->kv_head * group + m % group,
                scratch->sums + m * dim, scratch->most[m], scratch->total[m]);
}

/* `count` parts of one run of rows, one after the other, become its output. */
FOR_EACH_CPU
static void merge(const Job *job, const Item *item, int64_t count)
{
    const Layer *layer = job->layer;
    const Call *call = job->call;
    int64_t group = call->heads / layer->kv_heads, rows = (item->last - item->first) * group;
    int64_t dim = padded(layer->value.dim, LANES), stride = rows * (dim + 2);
    for (int64_t m = 0; m < rows; m++) {
        float *sums = job->partial + (item->part + m) * (dim + 2), most = sums[dim], total = 0;
        for (int64_t p = 1; p < count; p++)
            most = sums[p * stride + dim] > most ? sums[p * stride + dim] : most;
        for (int64_t p = 0; p < count && most > -INFINITY; p++) {
            float *part = sums + p * stride, share = weight_of(part[dim] - most);
            total += share * part[dim + 1];
            for (int64_t d = 0; d < dim; d++)
                sums[d] = p ? sums[d] + share * part[d] : share * part[d];
        }
        put_out(layer, call, call->starts[item->row] + item->first + m / group, item->kv_head * group + m % group,
                sums, most, total);
    }
}

/* ---- the work, and who does it */

static int add_item(Job *job, Item item)
{
    if (job->num_items == job->room) {
        int64_t room = job->room ? 2 * job->room : 64;
        Item *items = realloc(job->items, room * sizeof(Item));
        if (!items)
            return 0;
        job->items = items, job->room = room;
    }
    job->items[job->num_items++] = item;
    return 1;
}

static int cut_row(Job *job, int64_t row)
{
    const Layer *layer = job->layer;
    const Call *call = job->call;
    int64_t count = call->starts[row + 1] - call->starts[row], group = call->heads / layer->kv_heads;
    int64_t most = call->most / group;
    for (int64_t first = 0; first < count; first += most) {
        int64_t last = first + most < count ? first + most : count;
        Span span = span_of(layer, call, row, first, last);
        int64_t split = count <= most ? SPLIT : span.tiles + 1;
        for (int64_t head = 0; head < layer->kv_heads; head++) {
            Item item = {row, head, first, last, 0, span.tiles, -1};
            if (span.tiles <= split) {
                if (!add_item(job, item))
                    return 0;
                continue;
            }
            for (; item.from < span.tiles; item.from = item.to) {
                item.to = item.from + split < span.tiles ? item.from + split : span.tiles;
                item.part = job->part_rows, job->part_rows += (last - first) * group;
                if (!add_item(job, item))
                    return 0;
            }
        }
    }
    return 1;
}

static void work(void *given)
{
    Job *job = given;
    Scratch scratch;
    if (!take_scratch(&scratch, job->layer, job->call->most)) {
        __atomic_store_n(&job->bad_block, INT64_MIN, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->num_items;)
        do_item(job, job->items + i, &scratch);
}

static void work_merging(void *given)
{
    Job *job = given;
    for (int64_t i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->num_items;) {
        const Item *item = job->items + i;
        if (item->part < 0 || item->from)
            continue;
        int64_t count = 1;
        while (i + count < job->num_items && item[count].from)
            count++;
        merge(job, item, count);
    }
}

static void run_by(void (*act)(void *), void *job, int64_t threads)
{
    static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    static int asked;
    if (!asked) {
        *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
        asked = 1;
    }
    if (parallel && threads > 1)
        parallel(act, job, threads, 0);
    else
        act(job);
}

static void share_out(void (*act)(void *), Job *job, int64_t threads)
{
    job->next = 0;
    run_by(act, job, threads < job->num_items ? threads : job->num_items);
}

static int carry_out(Job *job, int64_t threads)
{
    int made = 1;
    for (int64_t row = 0; made && row < job->call->num_rows; row++)
        made = cut_row(job, row);
    int64_t dim = padded(job->layer->value.dim, LANES);
    if (made && job->part_rows)
        made = !!(job->partial = malloc(4 * job->part_rows * (dim + 2)));
    if (made) {
        share_out(work, job, threads);
        if (job->part_rows)
            share_out(work_merging, job, threads);
    }
    free(job->items);
    free(job->partial);
    return made && job->bad_block != INT64_MIN;
}

/* ---- states: one token of each row, in place; all are float32, strides are counted in numbers */

/* The first row whose slot is not there, or -1. */
static int64_t bad_row(const int64_t *slots, int64_t rows, int64_t num_states)
{
    for (int64_t row = 0; slots && row < rows; row++)
        if (slots[row] < 0 || slots[row] >= num_states)
            return row;
    return -1;
}

typedef struct { /* as `state_rules.py` passes them; rows and heads of [rows, 1, heads, dim] */
    const float *queries, *keys, *values, *decays, *betas;
    float *states, *out;
    const int64_t *slots; /* of each row's state; NULL: its row */
    int64_t query_row, query_head, key_row, key_head, value_row, value_head, decay_row, decay_head, beta_row, beta_head;
    int64_t decay_key; /* 0: one decay for all keys of a head */
    int64_t state_row, num_states, rows, heads, key_dim, value_dim, normalises;
    int64_t next;
} DeltaRule;

INLINE void take_unit(float *to, const float *from, int64_t dim, float scale, int64_t normalises)
{
    float sum = 0;
    for (int64_t i = 0; i < dim; i++)
        sum += from[i] * from[i];
    if (normalises)
        scale /= sqrtf(sum + 1e-6f);
    for (int64_t i = 0; i < dim; i++)
        to[i] = from[i] * scale;
}

/* state = decay state + key (x) delta, where delta = beta (value - decay state^T key); out = state^T query. */
FOR_EACH_CPU
static void delta_head(const DeltaRule *r, int64_t row, int64_t head)
{
    float query[MAX_DIM], key[MAX_DIM], decay[MAX_DIM], delta[MAX_DIM] = {0};
    int64_t dim = r->value_dim;
    float *restrict state = r->states + (r->slots ? r->slots[row] : row) * r->state_row + head * r->key_dim * dim;
    float *restrict out = r->out + (row * r->heads + head) * dim;
    const float *value = r->values + row * r->value_row + head * r->value_head;
    const float *decays = r->decays + row * r->decay_row + head * r->decay_head;
    float beta = r->betas[row * r->beta_row + head * r->beta_head];
    take_unit(query, r->queries + row * r->query_row + head * r->query_head, r->key_dim, 1 / sqrtf(r->key_dim),
              r->normalises);
    take_unit(key, r->keys + row * r->key_row + head * r->key_head, r->key_dim, 1, r->normalises);
    for (int64_t i = 0; i < r->key_dim; i++) {
        decay[i] = i && !r->decay_key ? decay[0] : expf(decays[i * r->decay_key]);
        for (int64_t d = 0; d < dim; d++)
            delta[d] += key[i] * decay[i] * state[i * dim + d];
    }
    for (int64_t d = 0; d < dim; d++)
        delta[d] = (value[d] - delta[d]) * beta, out[d] = 0;
    for (int64_t i = 0; i < r->key_dim; i++)
        for (int64_t d = 0; d < dim; d++) {
            float now = state[i * dim + d] * decay[i] + key[i] * delta[d];
            state[i * dim + d] = now;
            out[d] += query[i] * now;
        }
}

static void delta_work(void *given)
{
    DeltaRule *rule = given;
    for (int64_t i; (i = __atomic_fetch_add(&rule->next, 1, __ATOMIC_RELAXED)) < rule->rows * rule->heads;)
        delta_head(rule, i / rule->heads, i % rule->heads);
}

typedef struct { /* as `state_rules.py` passes them; strides of [rows, heads, dim], [heads, dim, size], [rows, groups] */
    const float *inputs, *steps, *rates, *ins, *outs, *skips, *biases, *gates;
    float *states, *out;
    const int64_t *slots; /* of each row's state; NULL: its row */
    int64_t input[3], step[3], rate[3], in[2], to[2], skip[2], bias[2], gate[3];
    int64_t state_row, num_states, rows, heads, dim, size, per_group, has_softplus;
    int64_t next;
} SelectiveState;

INLINE float at3(const float *from, const int64_t *strides, int64_t i, int64_t j, int64_t k)
{
    return from[i * strides[0] + j * strides[1] + k * strides[2]];
}

/* state = exp(step rate) state + step in input; out = state out + skip input, times silu(gate). */
FOR_EACH_CPU
static void select_part(const SelectiveState *s, int64_t row, int64_t head, int64_t first)
{
    int64_t last = first + TILE < s->dim ? first + TILE : s->dim;
    float *states = s->states + (s->slots ? s->slots[row] : row) * s->state_row + head * s->dim * s->size;
    const float *in = s->ins + row * s->in[0] + head / s->per_group * s->in[1];
    const float *to = s->outs + row * s->to[0] + head / s->per_group * s->to[1];
    for (int64_t d = first; d < last; d++) {
        float *restrict state = states + d * s->size, sum = 0, x = at3(s->inputs, s->input, row, head, d);
        const float *rate = s->rates + head * s->rate[0] + d * s->rate[1];
        float step = at3(s->steps, s->step, row, head, d);
        step += s->biases ? s->biases[head * s->bias[0] + d * s->bias[1]] : 0;
        if (s->has_softplus && step <= 20)
            step = log1pf(expf(step));
        float decay = expf(step * rate[0]), new = step * x;
        int64_t n = 0;
        for (; s->rate[2] && n + LANES <= s->size; n += LANES) {
            Vector decays = all(0), rates;
            memcpy(&rates, rate + n, sizeof rates);
            decays = exponential(-larger(-step * rates, all(-88.0f)));
            for (int i = 0; i < LANES; i++)
                state[n + i] = decays[i] * state[n + i] + new * in[n + i];
        }
        for (; n < s->size; n++)
            state[n] = (s->rate[2] ? expf(step * rate[n]) : decay) * state[n] + new * in[n];
        for (n = 0; n < s->size; n++)
            sum += state[n] * to[n];
        sum += s->skips ? x * s->skips[head * s->skip[0] + d * s->skip[1]] : 0;
        if (s->gates) {
            float gate = at3(s->gates, s->gate, row, head, d);
            sum *= gate / (1 + expf(-gate));
        }
        s->out[(row * s->heads + head) * s->dim + d] = sum;
    }
}

static int64_t num_parts(const SelectiveState *s)
{
    return s->rows * s->heads * ((s->dim + TILE - 1) / TILE);
}

static void select_work(void *given)
{
    SelectiveState *s = given;
    int64_t parts = (s->dim + TILE - 1) / TILE;
    for (int64_t i; (i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < num_parts(s);)
        select_part(s, i / parts / s->heads, i / parts % s->heads, i % parts * TILE);
}

/* Each channel's last inputs, the new one among them, times its weights. */
FOR_EACH_CPU
static void convolve(float *states, const int64_t *slots, int64_t state_row, int64_t state_channel, const float *new,
                     int64_t new_row, int64_t new_channel, const float *weights, const float *bias, float *out,
                     int64_t rows, int64_t channels, int64_t length, int64_t size, int64_t has_silu)
{
    for (int64_t i = 0; i < rows * channels; i++) {
        int64_t row = i / channels, c = i % channels;
        float *state = states + (slots ? slots[row] : row) * state_row + c * state_channel;
        float x = new[row * new_row + c * new_channel];
        const float *weight = weights + c * size;
        float sum = (bias ? bias[c] : 0) + weight[size - 1] * x;
        for (int64_t k = 0; k < size - 1; k++)
            sum += weight[k] * state[length + 1 - size + k];
        memmove(state, state + 1, 4 * (length - 1));
        state[length - 1] = x;
        out[i] = has_silu ? sum / (1 + expf(-sum)) : sum;
    }
}

/* ---- Python */

/* A rule's record, as `state_rules.py` packs it. */
static int take_record(PyObject *args, void *rule, Py_ssize_t size, long long *threads)
{
    Py_buffer record;
    if (!PyArg_ParseTuple(args, "y*L", &record, threads))
        return 0;
    int fits = record.len == size;
    if (fits)
        memcpy(rule, record.buf, size);
    else
        PyErr_Format(PyExc_ValueError, "a record is %zd bytes, not %zd", size, record.len);
    PyBuffer_Release(&record);
    return fits;
}

static PyObject *delta_rule(PyObject *self, PyObject *args)
{
    DeltaRule rule = {0};
    long long threads;
    (void)self;
    if (!take_record(args, &rule, offsetof(DeltaRule, next), &threads))
        return NULL;
    int64_t bad = bad_row(rule.slots, rule.rows, rule.num_states);
    if (bad == -1) {
        Py_BEGIN_ALLOW_THREADS
        run_by(delta_work, &rule, threads < rule.rows * rule.heads ? threads : rule.rows * rule.heads);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLongLong(bad);
}

static PyObject *selective_state(PyObject *self, PyObject *args)
{
    SelectiveState rule = {0};
    long long threads;
    (void)self;
    if (!take_record(args, &rule, offsetof(SelectiveState, next), &threads))
        return NULL;
    int64_t bad = bad_row(rule.slots, rule.rows, rule.num_states);
    if (bad == -1) {
        Py_BEGIN_ALLOW_THREADS
        run_by(select_work, &rule, threads < num_parts(&rule) ? threads : num_parts(&rule));
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLongLong(bad);
}

static PyObject *convolve_one(PyObject *self, PyObject *args)
{
    long long states, slots, num_states, state_row, state_channel, new, new_row, new_channel, weights, bias, out, rows;
    long long channels, length, size, has_silu;
    (void)self;
    if (!PyArg_ParseTuple(args, "LLLLLLLLLLLLLLLL", &states, &slots, &num_states, &state_row, &state_channel, &new,
                          &new_row, &new_channel, &weights, &bias, &out, &rows, &channels, &length, &size, &has_silu))
        return NULL;
    int64_t bad = bad_row((const int64_t *)slots, rows, num_states);
    if (bad == -1) {
        Py_BEGIN_ALLOW_THREADS
        convolve((float *)states, (const int64_t *)slots, state_row, state_channel, (const float *)new, new_row,
                 new_channel, (const float *)weights, (const float *)bias, (float *)out, rows, channels, length, size,
                 has_silu);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLongLong(bad);
}

static PyObject *attend(PyObject *self, PyObject *args)
{
    Py_buffer record;
    Call call;
    long long queries, out, starts, lengths, table, query_token, query_head, dtype, num_rows, width, heads, threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*LLLLLLLLLLLL", &record, &queries, &query_token, &query_head, &dtype, &out, &starts,
                          &lengths, &table, &num_rows, &width, &heads, &threads))
        return NULL;
    if (record.len != sizeof(Layer)) {
        PyErr_Format(PyExc_ValueError, "a layer is %zu bytes, not %zd", sizeof(Layer), record.len);
        PyBuffer_Release(&record);
        return NULL;
    }
    const Layer *layer = record.buf;
    int64_t most = heads / layer->kv_heads > MOST ? heads / layer->kv_heads : MOST;
    call = (Call){(const char *)queries, query_token, query_head, dtype, (char *)out, (const int32_t *)starts,
                  (const int32_t *)lengths, (const int32_t *)table, num_rows, width, heads, most};
    Job job = {.layer = layer, .call = &call};
    int made;
    Py_BEGIN_ALLOW_THREADS
    made = carry_out(&job, threads);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&record);
    if (!made)
        return PyErr_NoMemory();
    return PyLong_FromLongLong(job.bad_block);
}

typedef struct { /* as `cpu.py` packs it; strides in bytes */
    char *to;
    int64_t block, head, token, from_token, from_head, heads, size, tokens, num_slots;
} CopyTarget;

/* Copy `heads` runs of `size` bytes for each token to its slot; -1 is skipped. There are as many sources as targets.
 * Returns the first slot that is not there, before anything is copied, or -1. */
static PyObject *write_rows(PyObject *self, PyObject *args)
{
    Py_buffer record;
    long long sources[2] = {0}, slots, count;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*LLLL", &record, &sources[0], &sources[1], &slots, &count))
        return NULL;
    const CopyTarget *targets = record.buf;
    int64_t planes = record.len / (int64_t)sizeof(CopyTarget), wrong = -1;
    const int64_t *slot = (const int64_t *)slots;
    for (int64_t i = 0; i < count && wrong == -1; i++)
        if (slot[i] < -1 || slot[i] >= targets->num_slots)
            wrong = slot[i];
    for (int64_t p = 0; p < planes && wrong == -1; p++) {
        CopyTarget t = targets[p];
        for (int64_t i = 0; i < count; i++)
            for (int64_t h = 0; slot[i] >= 0 && h < t.heads; h++)
                memcpy(t.to + slot[i] / t.tokens * t.block + slot[i] % t.tokens * t.token + h * t.head,
                       (const char *)sources[p] + i * t.from_token + h * t.from_head, t.size);
    }
    PyBuffer_Release(&record);
    return PyLong_FromLongLong(wrong);
}

static PyMethodDef methods[] = {
    {"attend", attend, METH_VARARGS, "attend(layer, queries, strides, ...): a block id that is not there, or 0"},
    {"write_rows", write_rows, METH_VARARGS, "write_rows(targets, keys, values, slots, count): a bad slot, or -1"},
    {"delta_rule", delta_rule, METH_VARARGS, "delta_rule(record, threads): a row with a bad slot, or -1"},
    {"selective_state", selective_state, METH_VARARGS, "selective_state(record, threads): likewise"},
    {"convolve_one", convolve_one, METH_VARARGS, "convolve_one(states, slots, ...): a row with a bad slot, or -1"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
