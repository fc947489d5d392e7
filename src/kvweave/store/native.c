/* What the store does with every byte, in one pass and without the interpreter:
 *
 *   digests, links   SHA-256 of each chunk of tokens, and the chain over them
 *   sums             XXH3 (64 bits) of each part of a message
 *   copy             memory to memory, past the cache, with the sums of what was copied
 *   read, write      striped files to memory and back, summed while a piece is in the cache, several under way
 *
 * Results are those of hashlib and xxhash, which stand in where this cannot be built or the processor is too old.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <immintrin.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WITH_SHA __attribute__((target("sha,sse4.1")))
#define WITH_AVX512 __attribute__((target("avx512f")))
#define WITH_AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline))

/* ---- SHA-256 */

enum { BLOCK = 64, DIGEST = 32, LANES = 16 };

static const uint32_t ROUNDS[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static const uint32_t FIRST[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

/* One message: the processor's own rounds, which want the state as f e b a and h g d c. */
WITH_SHA INLINE void compress(__m128i *abef, __m128i *cdgh, const uint8_t *block)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    const __m128i *from = (const __m128i *)block, abef_before = *abef, cdgh_before = *cdgh;
    __m128i words[4];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        __m128i *word = words + i % 4, last = words[(i + 3) % 4];
        if (i < 4) {
            *word = _mm_shuffle_epi8(_mm_loadu_si128(from + i), swap);
        } else {
            *word = _mm_add_epi32(_mm_sha256msg1_epu32(*word, words[(i + 1) % 4]),
                                  _mm_alignr_epi8(last, words[(i + 2) % 4], 4));
            *word = _mm_sha256msg2_epu32(*word, last);
        }
        __m128i keyed = _mm_add_epi32(*word, _mm_load_si128((const __m128i *)ROUNDS + i));
        *cdgh = _mm_sha256rnds2_epu32(*cdgh, *abef, keyed);
        *abef = _mm_sha256rnds2_epu32(*abef, *cdgh, _mm_shuffle_epi32(keyed, 0x0e));
    }
    *abef = _mm_add_epi32(*abef, abef_before);
    *cdgh = _mm_add_epi32(*cdgh, cdgh_before);
}

/* What stands behind the last whole block: the rest, one bit, and the length in bits. Returns its length. */
INLINE size_t pad(uint8_t tail[2 * BLOCK], const uint8_t *message, size_t size)
{
    size_t rest = size % BLOCK, end = rest < BLOCK - 8 ? BLOCK : 2 * BLOCK;
    uint64_t bits = __builtin_bswap64((uint64_t)size * 8);
    memset(tail, 0, 2 * BLOCK);
    memcpy(tail, message + size - rest, rest);
    tail[rest] = 0x80;
    memcpy(tail + end - sizeof bits, &bits, sizeof bits);
    return end;
}

WITH_SHA static void digest(const uint8_t *message, size_t size, uint8_t *out)
{
    const __m128i reverse = _mm_set_epi64x(0x0001020304050607LL, 0x08090a0b0c0d0e0fLL);
    __m128i abef = _mm_set_epi32(FIRST[0], FIRST[1], FIRST[4], FIRST[5]);
    __m128i cdgh = _mm_set_epi32(FIRST[2], FIRST[3], FIRST[6], FIRST[7]);
    uint8_t tail[2 * BLOCK];
    size_t end = pad(tail, message, size);
    for (size_t at = 0; at + BLOCK <= size; at += BLOCK)
        compress(&abef, &cdgh, message + at);
    for (size_t at = 0; at < end; at += BLOCK)
        compress(&abef, &cdgh, tail + at);
    _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(_mm_unpackhi_epi64(cdgh, abef), reverse));
    _mm_storeu_si128((__m128i *)out + 1, _mm_shuffle_epi8(_mm_unpacklo_epi64(cdgh, abef), reverse));
}

/* Sixteen messages at once, a word of each in every register: three times as fast as one after the other. */
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

#define TURNED(x, bits) ((x) >> (bits) | (x) << (32 - (bits)))

WITH_AVX512 INLINE void compress_lanes(Words state[8], const uint8_t *block, size_t stride)
{
    Words w[16], now[8];
    memcpy(now, state, sizeof now);
    for (int i = 0; i < 16; i++)
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t word;
            memcpy(&word, block + lane * stride + 4 * i, sizeof word);
            w[i][lane] = __builtin_bswap32(word);
        }
#pragma GCC unroll 64
    for (int i = 0; i < 64; i++) {
        /* instead of moving the eight words on, their names move: h of this round is a of the next */
        Words *a = now + (64 - i) % 8, *b = now + (65 - i) % 8, *c = now + (66 - i) % 8, *d = now + (67 - i) % 8;
        Words *e = now + (68 - i) % 8, *f = now + (69 - i) % 8, *g = now + (70 - i) % 8, *h = now + (71 - i) % 8;
        if (i >= 16) {
            Words x = w[(i + 1) % 16], y = w[(i + 14) % 16];
            w[i % 16] += (TURNED(x, 7) ^ TURNED(x, 18) ^ x >> 3) + w[(i + 9) % 16] +
                         (TURNED(y, 17) ^ TURNED(y, 19) ^ y >> 10);
        }
        *h += (TURNED(*e, 6) ^ TURNED(*e, 11) ^ TURNED(*e, 25)) + ((*e & *f) ^ (~*e & *g)) + ROUNDS[i] + w[i % 16];
        *d += *h;
        *h += (TURNED(*a, 2) ^ TURNED(*a, 13) ^ TURNED(*a, 22)) + ((*a & *b) ^ (*a & *c) ^ (*b & *c));
    }
    for (int i = 0; i < 8; i++)
        state[i] += now[i];
}

WITH_AVX512 static void digest_lanes(const uint8_t *messages, size_t size, uint8_t *out)
{
    Words state[8];
    uint8_t tails[LANES][2 * BLOCK];
    size_t end = 0;
    for (int i = 0; i < 8; i++)
        state[i] = (Words){0} + FIRST[i];
    for (int lane = 0; lane < LANES; lane++)
        end = pad(tails[lane], messages + lane * size, size);
    for (size_t at = 0; at + BLOCK <= size; at += BLOCK)
        compress_lanes(state, messages + at, size);
    for (size_t at = 0; at < end; at += BLOCK)
        compress_lanes(state, tails[0] + at, sizeof tails[0]);
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 8; i++) {
            uint32_t word = __builtin_bswap32(state[i][lane]);
            memcpy(out + lane * DIGEST + 4 * i, &word, sizeof word);
        }
}

static void digest_all(const uint8_t *messages, size_t size, size_t count, uint8_t *out)
{
    size_t i = 0;
    if (__builtin_cpu_supports("avx512f"))
        for (; i + LANES <= count; i += LANES)
            digest_lanes(messages + i * size, size, out + i * DIGEST);
    for (; i < count; i++)
        digest(messages + i * size, size, out + i * DIGEST);
}

/* Every link is the digest of the one before it and the next leaf. */
static void link_all(const uint8_t *first, const uint8_t *leaves, size_t count, uint8_t *out)
{
    uint8_t pair[2 * DIGEST];
    memcpy(pair, first, DIGEST);
    for (size_t i = 0; i < count; i++) {
        memcpy(pair + DIGEST, leaves + i * DIGEST, DIGEST);
        digest(pair, sizeof pair, out + i * DIGEST);
        memcpy(pair, out + i * DIGEST, DIGEST);
    }
}

static PyObject *digests(PyObject *self, PyObject *args)
{
    Py_buffer messages;
    Py_ssize_t size;
    PyObject *made = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*n", &messages, &size))
        return NULL;
    if (size < 1 || messages.len % size)
        PyErr_Format(PyExc_ValueError, "%zd bytes are no messages of %zd", messages.len, size);
    else if ((made = PyBytes_FromStringAndSize(NULL, messages.len / size * DIGEST)))
        digest_all(messages.buf, size, messages.len / size, (uint8_t *)PyBytes_AS_STRING(made));
    PyBuffer_Release(&messages);
    return made;
}

static PyObject *links(PyObject *self, PyObject *args)
{
    Py_buffer first, leaves;
    PyObject *made = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*", &first, &leaves))
        return NULL;
    if (first.len != DIGEST || leaves.len % DIGEST)
        PyErr_Format(PyExc_ValueError, "%zd and %zd bytes are no digests of 32", first.len, leaves.len);
    else if ((made = PyBytes_FromStringAndSize(NULL, leaves.len)))
        link_all(first.buf, leaves.buf, leaves.len / DIGEST, (uint8_t *)PyBytes_AS_STRING(made));
    PyBuffer_Release(&first);
    PyBuffer_Release(&leaves);
    return made;
}

/* ---- XXH3, 64 bits, for more than 240 bytes */

enum { STRIPE = 64, STRIPES = 16, SPAN = STRIPE * STRIPES, PIECE = 1 << 17, SHORTEST = 241, AHEAD = 2048 };
enum { PART = 1 << 15 }; /* as `checksums.PART_BYTES` */

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9;
static const uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5;

/* A sum over bytes [0, seen) of a message that lies in one piece, `seen` being whole spans until it is finished. */
typedef struct {
    uint64_t lanes[8] __attribute__((aligned(32)));
} Sum;

INLINE void start(Sum *sum)
{
    const uint64_t first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(sum->lanes, first, sizeof first);
}

/* What is read is written to `to` too, if there is one: past the cache if that is asked for, and `to` aligned. */
WITH_AVX2 INLINE void add_stripe(__m256i acc[2], const uint8_t *from, const uint8_t *secret, uint8_t *to, int streaming)
{
    for (int half = 0; half < 2; half++) {
        __m256i data = _mm256_loadu_si256((const __m256i *)from + half);
        __asm__ volatile("" : "+x"(data)); /* read once: others may write there, and the sum must be of what is kept */
        __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret + half));
        __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        acc[half] = _mm256_add_epi64(acc[half], _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4e)));
        if (to && streaming)
            _mm256_stream_si256((__m256i *)to + half, data);
        else if (to)
            _mm256_storeu_si256((__m256i *)to + half, data);
    }
}

WITH_AVX2 INLINE void scramble(__m256i acc[2])
{
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    for (int half = 0; half < 2; half++) {
        __m256i mixed = _mm256_xor_si256(acc[half], _mm256_srli_epi64(acc[half], 47));
        mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((const __m256i *)(SECRET + sizeof SECRET - STRIPE) + half));
        __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
        acc[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
}

/* The next `size` bytes, whole spans of them. What comes `from` memory is fetched ahead: the processor does so by
 * itself, but never across the end of a page. */
WITH_AVX2 INLINE void add_spans(Sum *sum, const uint8_t *from, uint8_t *to, size_t size, int streaming, int ahead)
{
    __m256i acc[2] = {_mm256_load_si256((__m256i *)sum->lanes), _mm256_load_si256((__m256i *)sum->lanes + 1)};
    for (size_t at = 0; at < size; at += SPAN) {
        for (int i = 0; i < STRIPES; i++) {
            if (ahead)
                _mm_prefetch((const char *)from + at + i * STRIPE + ahead, _MM_HINT_T0);
            add_stripe(acc, from + at + i * STRIPE, SECRET + 8 * i, to ? to + at + i * STRIPE : NULL, streaming);
        }
        scramble(acc);
    }
    _mm256_store_si256((__m256i *)sum->lanes, acc[0]);
    _mm256_store_si256((__m256i *)sum->lanes + 1, acc[1]);
}

/* The same in registers twice as wide, past the cache to `to`, aligned, if there is one: of bytes in the cache, sums take
 * most time. */
WITH_AVX512 INLINE void add_wide_spans(Sum *sum, const uint8_t *from, uint8_t *to, size_t size)
{
    const __m512i prime = _mm512_set1_epi64(PRIME32_1), last = _mm512_loadu_si512(SECRET + sizeof SECRET - STRIPE);
    __m512i acc = _mm512_loadu_si512(sum->lanes), secrets[STRIPES];
    for (int i = 0; i < STRIPES; i++)
        secrets[i] = _mm512_loadu_si512(SECRET + 8 * i);
    for (size_t at = 0; at < size; at += SPAN) {
#pragma GCC unroll 16
        for (int i = 0; i < STRIPES; i++) {
            __m512i data = _mm512_loadu_si512(from + at + i * STRIPE);
            __m512i keyed = _mm512_xor_si512(data, secrets[i]);
            __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
            acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, _mm512_shuffle_epi32(data, 0x4e)));
            if (to)
                _mm512_stream_si512((__m512i *)(to + at + i * STRIPE), data);
        }
        __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), last);
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
        acc = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_storeu_si512(sum->lanes, acc);
}

WITH_AVX512 static void stream_spans(Sum *sum, const uint8_t *from, uint8_t *to, size_t size)
{
    add_wide_spans(sum, from, to, size);
}

WITH_AVX512 static void sum_spans(Sum *sum, const uint8_t *from, size_t size)
{
    add_wide_spans(sum, from, NULL, size);
}

INLINE uint64_t folded(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* What is left behind the whole spans of a message, at least a byte; and at least a stripe of its end. */
INLINE size_t rest_of(size_t size)
{
    return size - (size - 1) / SPAN * SPAN;
}

INLINE size_t end_of(size_t size)
{
    return rest_of(size) < STRIPE ? STRIPE : rest_of(size);
}

/* The digest of a message of `size` bytes that were added. */
INLINE uint64_t digest_of(const Sum *sum, size_t size)
{
    uint64_t result = size * PRIME64_1, key[8];
    memcpy(key, SECRET + 11, sizeof key);
    for (int i = 0; i < 8; i += 2)
        result += folded(sum->lanes[i] ^ key[i], sum->lanes[i + 1] ^ key[i + 1]);
    result = (result ^ result >> 37) * 0x165667919E3779F9;
    return result ^ result >> 32;
}

static const uint8_t *const LAST_KEYS = SECRET + sizeof SECRET - STRIPE - 7; /* of the last stripe of a message */

/* The same, where the whole spans were added and `end` are the last `end_of(size)` bytes. */
WITH_AVX2 static uint64_t finish(Sum *sum, const uint8_t *end, size_t size)
{
    __m256i acc[2] = {_mm256_load_si256((__m256i *)sum->lanes), _mm256_load_si256((__m256i *)sum->lanes + 1)};
    const uint8_t *rest = end + end_of(size) - rest_of(size);
    for (size_t i = 0; (i + 1) * STRIPE <= rest_of(size) - 1; i++)
        add_stripe(acc, rest + i * STRIPE, SECRET + 8 * i, NULL, 0);
    add_stripe(acc, end + end_of(size) - STRIPE, LAST_KEYS, NULL, 0);
    _mm256_store_si256((__m256i *)sum->lanes, acc[0]);
    _mm256_store_si256((__m256i *)sum->lanes + 1, acc[1]);
    return digest_of(sum, size);
}

/* A message is summed in parts, each by itself, so that others may sum them side by side; what is left over belongs to
 * the last one. `at` bytes, whole spans, were added; `sums` has room for one of each part. */
typedef struct {
    Sum part;
    size_t at, size;
    uint64_t *sums;
} Parts;

INLINE size_t parts_of(size_t size)
{
    return size < PART ? 1 : size / PART;
}

INLINE void start_parts(Parts *parts, size_t size, uint64_t *sums)
{
    parts->at = 0;
    parts->size = size;
    parts->sums = sums;
    start(&parts->part);
}

/* The last span of a part, copied as it is read; returns the part's digest. */
WITH_AVX2 INLINE uint64_t end_part(Sum *sum, const uint8_t *from, uint8_t *to, int streaming)
{
    __m256i acc[2] = {_mm256_load_si256((__m256i *)sum->lanes), _mm256_load_si256((__m256i *)sum->lanes + 1)};
    for (int i = 0; i < STRIPES; i++)
        add_stripe(acc, from + i * STRIPE, i < STRIPES - 1 ? SECRET + 8 * i : LAST_KEYS, to ? to + i * STRIPE : NULL,
                   streaming);
    _mm256_store_si256((__m256i *)sum->lanes, acc[0]);
    _mm256_store_si256((__m256i *)sum->lanes + 1, acc[1]);
    return digest_of(sum, PART);
}

enum { CACHED, STREAMED, WIDE }; /* how spans are written: to the cache, past it, or past it in wide registers */

/* The next `size` bytes, whole spans of them. */
WITH_AVX2 INLINE void add_parts(Parts *parts, const uint8_t *from, uint8_t *to, size_t size, int way, int ahead)
{
    size_t last = (parts_of(parts->size) - 1) * PART;
    while (size) {
        size_t within = parts->at % PART, count = PART - SPAN - within, is_last = parts->at >= last;
        count = is_last || count > size ? size : count;
        if (way == WIDE && to)
            stream_spans(&parts->part, from, to, count);
        else if (way == WIDE)
            sum_spans(&parts->part, from, count);
        else
            add_spans(&parts->part, from, to, count, way == STREAMED, ahead);
        if (!is_last && within + count == PART - SPAN && size > count) {
            parts->sums[parts->at / PART] = end_part(&parts->part, from + count, to ? to + count : NULL, way != CACHED);
            start(&parts->part);
            count += SPAN;
        }
        parts->at += count;
        size -= count;
        from += count;
        to = to ? to + count : NULL;
    }
}

/* Bytes of the last part, of which `end_of` are needed at the end. */
INLINE size_t last_part(size_t size)
{
    return size - (parts_of(size) - 1) * PART;
}

INLINE void finish_parts(Parts *parts, const uint8_t *end)
{
    size_t size = last_part(parts->size);
    parts->sums[parts_of(parts->size) - 1] = finish(&parts->part, end, size);
}

/* Whole spans from memory that nobody changes, or that is copied elsewhere first. */
WITH_AVX2 static void sum_all(const uint8_t *from, size_t size, uint64_t *sums)
{
    Parts parts;
    start_parts(&parts, size, sums);
    add_parts(&parts, from, NULL, (size - 1) / SPAN * SPAN, __builtin_cpu_supports("avx512f") ? WIDE : CACHED, AHEAD);
    finish_parts(&parts, from + size - end_of(size));
}

static int is_over(double until)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec >= until;
}

/* Whether all was copied before `until`. Sums are of what was written, even if `from` or `to` change meanwhile. */
WITH_AVX2 static int copy_all(uint8_t *to, const uint8_t *from, size_t size, int streaming, double until, uint64_t *sums)
{
    Parts parts;
    uint8_t end[2 * SPAN]; /* the last span and the rest, whose last stripe the sum reads twice */
    size_t whole = (size - 1) / SPAN * SPAN, direct = whole ? whole - SPAN : 0;
    streaming = streaming && (uintptr_t)to % sizeof(__m256i) == 0;
    start_parts(&parts, size, sums);
    memcpy(end, from + direct, size - direct);
    for (size_t at = 0; at < direct; at += PIECE) {
        size_t count = direct - at < PIECE ? direct - at : PIECE;
        if (is_over(until))
            return 0;
        if (streaming)
            add_parts(&parts, from + at, to + at, count, STREAMED, AHEAD);
        else
            add_parts(&parts, from + at, to + at, count, CACHED, AHEAD);
    }
    if (is_over(until))
        return 0;
    add_parts(&parts, end, to + direct, whole - direct, CACHED, 0);
    memcpy(to + whole, end + whole - direct, size - whole);
    _mm_sfence();
    finish_parts(&parts, end + size - direct - end_of(size));
    return 1;
}

/* Room for the sums of a message. */
static PyObject *new_sums(size_t size)
{
    return PyBytes_FromStringAndSize(NULL, parts_of(size) * sizeof(uint64_t));
}

static uint64_t *sums_in(PyObject *made)
{
    return (uint64_t *)PyBytes_AS_STRING(made);
}

static PyObject *sums(PyObject *self, PyObject *args)
{
    Py_buffer from;
    PyObject *made = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*", &from))
        return NULL;
    if (from.len < SHORTEST) {
        PyErr_Format(PyExc_ValueError, "%zd bytes; at least 241", from.len);
    } else if ((made = new_sums(from.len))) {
        Py_BEGIN_ALLOW_THREADS
        sum_all(from.buf, from.len, sums_in(made));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&from);
    return made;
}

static PyObject *copy(PyObject *self, PyObject *args)
{
    Py_buffer to, from;
    int streaming, in_time = 0;
    double until;
    PyObject *made = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "w*y*pd", &to, &from, &streaming, &until))
        return NULL;
    if (to.len != from.len || to.len < SHORTEST) {
        PyErr_Format(PyExc_ValueError, "%zd bytes into %zd; as many, and at least 241", from.len, to.len);
    } else if ((made = new_sums(to.len))) {
        Py_BEGIN_ALLOW_THREADS
        in_time = copy_all(to.buf, from.buf, to.len, streaming, until, sums_in(made));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    if (!made || in_time)
        return made;
    Py_DECREF(made);
    Py_RETURN_NONE;
}

/* ---- striped files */

/* Some files as one run of bytes, which are dealt to them in turns, a stripe to each; they are moved in whole sectors. */
typedef struct {
    const int *fds;
    size_t count, stripe, sector;
} Files;

typedef struct {
    int fd;
    off_t at;
    size_t room;
} Place;

INLINE Place place_of(const Files *files, size_t at)
{
    size_t number = at / files->stripe, within = at % files->stripe;
    off_t turn = number / files->count * files->stripe;
    return (Place){files->fds[number % files->count], turn + within, files->stripe - within};
}

INLINE size_t in_sectors(const Files *files, size_t size)
{
    return (size + files->sector - 1) / files->sector * files->sector;
}

/* Bytes between memory and files. `moved` of them are done: so many, `PENDING`, or -1 with an error. */
typedef struct {
    uint8_t *memory;
    size_t size, at;
    ssize_t moved;
    int error;
} Transfer;

enum { SLOTS = 8, PENDING = -2 };

/* A thread's transfers. Those the kernel takes run by themselves; what it does not take, or not whole, is done at last
 * by waiting for it, which also says what is wrong. */
typedef struct {
    aio_context_t context;
    Transfer slots[SLOTS];
} Queue;

static void move(const Files *files, int writing, Transfer *transfer)
{
    ssize_t count = 1;
    while (transfer->moved < (ssize_t)transfer->size && count && transfer->moved % files->sector == 0) {
        Place place = place_of(files, transfer->at + transfer->moved);
        uint8_t *memory = transfer->memory + transfer->moved;
        size_t left = transfer->size - transfer->moved, size = left < place.room ? left : place.room;
        count = writing ? pwrite(place.fd, memory, size, place.at) : pread(place.fd, memory, size, place.at);
        if (count < 0 && errno != EINTR) {
            transfer->error = errno;
            transfer->moved = -1;
            return;
        }
        transfer->moved += count > 0 ? count : 0;
    }
}

static void begin(Queue *queue, int slot, const Files *files, int writing, uint8_t *memory, size_t size, size_t at)
{
    Place place = place_of(files, at);
    struct iocb call = {.aio_data = slot, .aio_lio_opcode = writing ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
                        .aio_fildes = place.fd, .aio_buf = (uintptr_t)memory, .aio_nbytes = size, .aio_offset = place.at};
    struct iocb *calls[] = {&call};
    queue->slots[slot] = (Transfer){memory, size, at, 0, 0};
    if (queue->context && size <= place.room && syscall(SYS_io_submit, queue->context, 1L, calls) == 1)
        queue->slots[slot].moved = PENDING;
}

/* Blocks until nothing is under way. */
static void give_up(Queue *queue)
{
    if (queue->context)
        syscall(SYS_io_destroy, queue->context);
    queue->context = 0;
    for (int slot = 0; slot < SLOTS; slot++)
        if (queue->slots[slot].moved == PENDING)
            queue->slots[slot].moved = 0;
}

static void await(Queue *queue, int slot)
{
    struct io_event events[SLOTS];
    while (queue->slots[slot].moved == PENDING) {
        long count = syscall(SYS_io_getevents, queue->context, 1L, (long)SLOTS, events, NULL);
        if (count < 0 && errno != EINTR)
            give_up(queue);
        for (long i = 0; i < count; i++)
            queue->slots[events[i].data].moved = events[i].res > 0 ? events[i].res : 0;
    }
}

/* Bytes moved, fewer where the files end; -1, with errno, where they could not be. */
static ssize_t end(Queue *queue, int slot, const Files *files, int writing)
{
    Transfer *transfer = queue->slots + slot;
    await(queue, slot);
    move(files, writing, transfer);
    errno = transfer->error;
    return transfer->moved;
}

/* The memory of a transfer that failed is not left while others still use it. */
static int failed(Queue *queue, int result)
{
    int error = errno;
    for (int slot = 0; slot < SLOTS; slot++)
        await(queue, slot);
    errno = error;
    return result;
}

/* How many bytes at `at`, of which `before` (whole spans) were moved, are the next piece: up to a multiple of a piece,
 * so that it is of one stripe, if whole spans are. */
INLINE size_t next_piece(size_t at, size_t before, size_t piece, size_t left)
{
    size_t count = piece - at % piece, over = (before + count) % SPAN;
    count = count > over ? count - over : piece;
    return count < left ? count : left;
}

/* Memory through which pieces go, a slot for each that is under way. */
typedef struct {
    uint8_t *memory;
    size_t piece;
    int slots;
} Bounce;

/* What of a piece is behind the head and in whole spans: summed, and copied to `to` if there is one. */
WITH_AVX2 static void take_spans(Parts *parts, const uint8_t *from, uint8_t *to, size_t size)
{
    if (__builtin_cpu_supports("avx512f") && (uintptr_t)to % STRIPE == 0)
        add_parts(parts, from, to, size, WIDE, 0);
    else
        add_parts(parts, from, to, size, STREAMED, 0);
}

/* Whether there were `size` bytes, with the sums of what stands behind `head` of them; -1, with errno, where they could
 * not be read. Through a bounce the kernel writes to a small memory that stays in the cache, and from there it goes past
 * the cache to its place. Without one the kernel writes to the place itself, and each piece is summed while it is in the
 * cache: a copy less. */
WITH_AVX2 static int read_all(const Files *files, Queue *queue, uint8_t *to, size_t head, size_t size, size_t at,
                              Bounce bounce, uint64_t *sums)
{
    Parts parts;
    size_t whole = (size - head - 1) / SPAN * SPAN, asked = 0, counts[SLOTS];
    int begun = 0, ended = 0;
    start_parts(&parts, size - head, sums);
    for (size_t done = 0; done < size; ended++) {
        for (; asked < size && begun - ended < bounce.slots; begun++) {
            int slot = begun % bounce.slots;
            size_t count = next_piece(at + asked, asked, bounce.piece, size - asked);
            uint8_t *memory = bounce.memory ? bounce.memory + slot * bounce.piece : to + asked;
            begin(queue, slot, files, 0, memory, in_sectors(files, count), at + asked);
            counts[slot] = count;
            asked += count;
        }
        int slot = ended % bounce.slots;
        const uint8_t *from = queue->slots[slot].memory;
        size_t count = counts[slot], of_head = done < head ? head - done : 0;
        ssize_t moved = end(queue, slot, files, 0);
        if (moved < (ssize_t)count)
            return failed(queue, moved < 0 ? -1 : 0);
        of_head = of_head < count ? of_head : count;
        size_t left = head + whole - done - of_head, spans = count - of_head < left ? count - of_head : left;
        take_spans(&parts, from + of_head, bounce.memory ? to + done + of_head : NULL, spans);
        if (bounce.memory) {
            memcpy(to + done, from, of_head);
            memcpy(to + done + of_head + spans, from + of_head + spans, count - of_head - spans);
        }
        done += count;
    }
    _mm_sfence();
    finish_parts(&parts, to + size - end_of(size - head));
    return 1;
}

static int is_written(Queue *queue, int slot, const Files *files)
{
    ssize_t moved = end(queue, slot, files, 1);
    if (moved >= 0)
        errno = EIO;
    return moved == (ssize_t)queue->slots[slot].size;
}

/* Blocks for what makes a file longer, all at once: the file system would wait for each piece that does. If there are
 * none, writing says so. */
static void grow(const Files *files, size_t size, size_t at)
{
    struct stat now;
    for (size_t done = 0, count; done < size; done += count) {
        Place place = place_of(files, at + done);
        count = size - done < place.room ? size - done : place.room;
        if (!fstat(place.fd, &now) && now.st_size < place.at + (off_t)count)
            (void)!fallocate(place.fd, 0, place.at, count);
    }
}

/* Whether all was written, with its sums; -1, with errno, where it could not be. A piece is summed while it is in the
 * cache for the kernel's copy of it, or for ours if there is a bounce. */
WITH_AVX2 static int write_all(const Files *files, Queue *queue, const uint8_t *from, size_t size, size_t at,
                               Bounce bounce, uint64_t *sums)
{
    Parts parts;
    size_t whole = (size - 1) / SPAN * SPAN, count;
    int begun = 0, ended = 0;
    start_parts(&parts, size, sums);
    if (bounce.memory)
        grow(files, in_sectors(files, size), at);
    for (size_t done = 0; done < size; done += count, begun++) {
        if (begun - ended == bounce.slots && !is_written(queue, ended++ % bounce.slots, files))
            return failed(queue, -1);
        int slot = begun % bounce.slots;
        count = next_piece(at + done, done, bounce.piece, size - done);
        size_t spans = whole - done < count ? whole - done : count;
        uint8_t *memory = (uint8_t *)from + done;
        if (bounce.memory) {
            memory = bounce.memory + slot * bounce.piece;
            add_parts(&parts, from + done, memory, spans, CACHED, AHEAD);
            memcpy(memory + spans, from + done + spans, count - spans);
            memset(memory + count, 0, in_sectors(files, count) - count);
        } else {
            add_parts(&parts, memory, NULL, spans, CACHED, AHEAD);
        }
        begin(queue, slot, files, 1, memory, in_sectors(files, count), at + done);
    }
    for (; ended < begun; ended++)
        if (!is_written(queue, ended % bounce.slots, files))
            return failed(queue, -1);
    finish_parts(&parts, from + size - end_of(size));
    return 1;
}

static void free_queue(PyObject *capsule)
{
    Queue *queue = PyCapsule_GetPointer(capsule, NULL);
    give_up(queue);
    PyMem_Free(queue);
}

static PyObject *queue_(PyObject *self, PyObject *args)
{
    int asynchronous;
    (void)self;
    if (!PyArg_ParseTuple(args, "p", &asynchronous))
        return NULL;
    Queue *queue = PyMem_Calloc(1, sizeof *queue);
    if (!queue)
        return PyErr_NoMemory();
    if (asynchronous && syscall(SYS_io_setup, (long)SLOTS, &queue->context))
        queue->context = 0;
    PyObject *made = PyCapsule_New(queue, NULL, free_queue);
    if (!made) {
        give_up(queue);
        PyMem_Free(queue);
    }
    return made;
}

/* The result of a transfer of `fine` (1: whole, 0: the files end, -1: errno). */
static PyObject *summed(int fine, PyObject *made)
{
    if (!made || fine > 0)
        return made;
    if (fine < 0)
        PyErr_SetFromErrno(PyExc_OSError);
    Py_DECREF(made);
    if (fine < 0)
        return NULL;
    Py_RETURN_NONE;
}

static int is_sound(const Files *files, Py_ssize_t at, Py_ssize_t piece, Py_ssize_t bounced)
{
    return files->count && (Py_ssize_t)files->stripe > 0 && (Py_ssize_t)files->sector > 0 && at >= 0 && piece > 0 &&
           piece % SPAN == 0 && bounced / piece <= SLOTS &&
           (files->sector == 1 || (files->sector % SPAN == 0 && piece % files->sector == 0 &&
                                   files->stripe % files->sector == 0 && at % files->sector == 0));
}

static PyObject *read_(PyObject *self, PyObject *args)
{
    Py_buffer fds, to, memory;
    Py_ssize_t stripe, sector, at, head, piece;
    PyObject *capsule;
    PyObject *made = NULL;
    int fine = -1;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*nnnw*nw*nO", &fds, &stripe, &sector, &at, &to, &head, &memory, &piece, &capsule))
        return NULL;
    Files files = {fds.buf, fds.len / sizeof(int), stripe, sector};
    Queue *queue = PyCapsule_GetPointer(capsule, NULL);
    int bounced = memory.len >= piece;
    int fits = queue && is_sound(&files, at, piece, memory.len) && (bounced || sector == 1) && head >= 0 &&
               head % SPAN == 0 && to.len >= head + SHORTEST &&
               (!bounced || ((uintptr_t)to.buf + head) % sizeof(__m256i) == 0);
    if (fits && (made = new_sums(to.len - head))) {
        Bounce bounce = {bounced ? memory.buf : NULL, piece, bounced ? memory.len / piece : 1};
        Py_BEGIN_ALLOW_THREADS
        fine = read_all(&files, queue, to.buf, head, to.len, at, bounce, sums_in(made));
        Py_END_ALLOW_THREADS
    } else if (queue && !fits) {
        PyErr_Format(PyExc_ValueError, "%zd bytes with a head of %zd: too few, or not aligned", to.len, head);
    }
    PyBuffer_Release(&fds);
    PyBuffer_Release(&to);
    PyBuffer_Release(&memory);
    return summed(fine, made);
}

static PyObject *write_(PyObject *self, PyObject *args)
{
    Py_buffer fds, from, memory;
    Py_ssize_t stripe, sector, at, piece;
    PyObject *capsule;
    PyObject *made = NULL;
    int fine = -1;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*nnny*w*nO", &fds, &stripe, &sector, &at, &from, &memory, &piece, &capsule))
        return NULL;
    Files files = {fds.buf, fds.len / sizeof(int), stripe, sector};
    Queue *queue = PyCapsule_GetPointer(capsule, NULL);
    int bounced = memory.len >= piece;
    int fits = queue && is_sound(&files, at, piece, memory.len) && (bounced || sector == 1) && from.len >= SHORTEST;
    if (fits && (made = new_sums(from.len))) {
        Bounce bounce = {bounced ? memory.buf : NULL, piece, bounced ? memory.len / piece : 1};
        Py_BEGIN_ALLOW_THREADS
        fine = write_all(&files, queue, from.buf, from.len, at, bounce, sums_in(made));
        Py_END_ALLOW_THREADS
    } else if (queue && !fits) {
        PyErr_Format(PyExc_ValueError, "%zd bytes at %zd: too few, or not aligned", from.len, at);
    }
    PyBuffer_Release(&fds);
    PyBuffer_Release(&from);
    PyBuffer_Release(&memory);
    return summed(fine, made);
}

static PyMethodDef methods[] = {
    {"digests", digests, METH_VARARGS, "digests(messages, size): the SHA-256 of each message, one after the other"},
    {"links", links, METH_VARARGS, "links(first, leaves): a chain of SHA-256 over digests"},
    {"queue", queue_, METH_VARARGS, "queue(asynchronous): what a thread needs for `read` and `write`"},
    {"read", read_, METH_VARARGS,
     "read(fds, stripe, sector, start, to, head, bounce, piece, queue): sums behind `head`; None if the files end"},
    {"write", write_, METH_VARARGS,
     "write(fds, stripe, sector, start, source, bounce, piece, queue): sums of what was written"},
    {"sums", sums, METH_VARARGS, "sums(message): the XXH3 of each of its parts, one after the other"},
    {"copy", copy, METH_VARARGS, "copy(to, source, streaming, until): sums of what was copied; None if it was late"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("sha")) {
        PyErr_SetString(PyExc_ImportError, "the processor has no AVX2 or no SHA instructions");
        return NULL;
    }
    return PyModule_Create(&module);
}
