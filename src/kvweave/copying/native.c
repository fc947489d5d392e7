/* Copies blocks of bytes between strided memories, by several threads, without the interpreter.
 *
 * A block is `planes` x `rows` runs of `size` bytes, the same for all blocks; runs are contiguous, and packed or
 * strided on either side. Addresses come from Python, which has checked that every run lies in memory it holds.
 *
 * Why not memcpy alone: to write a line with a plain store the processor reads it first. Large memcpys write past the
 * cache and save that, but each run here is too short for memcpy to know that the whole is large.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#define STREAMS 1
#else
#define STREAMS 0
#endif

enum { LINE = 64, AHEAD = 2048, MOST_THREADS = 64 };

typedef struct {
    const int64_t *starts; /* of the blocks */
    Py_ssize_t plane_stride, row_stride;
} Side;

typedef struct {
    Side to, from;
    Py_ssize_t blocks, planes, rows, size;
    int streaming;
} Job;

/* A thread's share: the bytes [first, last) of the job, counted run after run. */
typedef struct {
    const Job *job;
    uint64_t first, last;
    pthread_t thread;
} Share;

#if STREAMS
/* Whole lines go past the cache; what is left of a line at either end is stored as usual. The processor foresees lines
 * within a run by itself, but not where the next run is: its first lines are asked for with the last ones of this. */
static void stream(char *to, const char *from, size_t size, const char *next)
{
    size_t head = (size_t)(-(uintptr_t)to) % LINE;
    if (head >= size) {
        memcpy(to, from, size);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= LINE; to += LINE, from += LINE, size -= LINE) {
        const __m128i *source = (const __m128i *)from;
        __m128i *target = (__m128i *)to;
        _mm_prefetch(size >= AHEAD ? from + AHEAD : next, _MM_HINT_T0);
        next += size >= AHEAD ? 0 : LINE;
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(to, from, size);
}
#endif

/* Where a run is among the others: counted up, since to divide takes longer than to copy a short run. */
typedef struct {
    Py_ssize_t block, plane, row;
} Place;

static Place place_of(const Job *job, uint64_t run)
{
    Place place = {run / job->rows / job->planes, run / job->rows % job->planes, run % job->rows};
    return place;
}

static void step(const Job *job, Place *place)
{
    if (++place->row == job->rows) {
        place->row = 0;
        if (++place->plane == job->planes) {
            place->plane = 0;
            place->block++;
        }
    }
}

static char *run_at(const Side *side, const Place *place)
{
    return (char *)(intptr_t)(side->starts[place->block] + place->plane * side->plane_stride +
                              place->row * side->row_stride);
}

/* Runs of one element, as where one side is the other's transpose: a call of memcpy each would be most of the time. */
static void copy_short(char *to, const char *from, size_t size)
{
    switch (size) {
    case 2: memcpy(to, from, 2); break;
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    default: memcpy(to, from, size);
    }
}

static void *carry_out(void *given)
{
    const Share *share = given;
    const Job *job = share->job;
    uint64_t skip = share->first % job->size;
    Place place = place_of(job, share->first / job->size);
    for (uint64_t at = share->first; at < share->last; skip = 0) {
        uint64_t size = job->size - skip;
        if (size > share->last - at)
            size = share->last - at;
        char *to = run_at(&job->to, &place) + skip;
        const char *from = run_at(&job->from, &place) + skip;
        at += size;
        step(job, &place);
#if STREAMS
        if (job->streaming && job->size >= LINE)
            stream(to, from, size, at < share->last ? run_at(&job->from, &place) : from);
        else
#endif
            copy_short(to, from, size);
    }
#if STREAMS
    if (job->streaming)
        _mm_sfence(); /* streamed lines are seen in any order until here */
#endif
    return NULL;
}

static void share_out(const Job *job, Py_ssize_t threads)
{
    Share shares[MOST_THREADS];
    uint64_t total = (uint64_t)job->blocks * job->planes * job->rows * job->size;
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    for (Py_ssize_t i = 0; i < threads; i++) {
        shares[i].job = job;
        shares[i].first = total / threads * i / LINE * LINE;
        shares[i].last = i + 1 < threads ? total / threads * (i + 1) / LINE * LINE : total;
    }
    Py_ssize_t begun = 1;
    while (begun < threads && pthread_create(&shares[begun].thread, NULL, carry_out, &shares[begun]) == 0)
        begun++;
    carry_out(&shares[0]);
    for (Py_ssize_t i = begun; i < threads; i++) /* the machine gave no more threads */
        carry_out(&shares[i]);
    for (Py_ssize_t i = 1; i < begun; i++)
        pthread_join(shares[i].thread, NULL);
}

static PyObject *copy(PyObject *self, PyObject *args)
{
    Job job;
    Py_buffer to, from;
    Py_ssize_t threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*(nn)y*(nn)(nnn)pn", &to, &job.to.plane_stride, &job.to.row_stride, &from,
                          &job.from.plane_stride, &job.from.row_stride, &job.planes, &job.rows, &job.size,
                          &job.streaming, &threads))
        return NULL;
    job.to.starts = to.buf, job.from.starts = from.buf;
    job.blocks = to.len / (Py_ssize_t)sizeof(int64_t);
    if (to.len != from.len || job.planes < 1 || job.rows < 1 || job.size < 1 || threads < 1) {
        PyErr_SetString(PyExc_ValueError, "as many addresses on both sides, and at least one byte and one thread");
    } else {
        Py_BEGIN_ALLOW_THREADS
        share_out(&job, threads);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(to, to_strides, source, source_strides, shape, streaming, threads)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
