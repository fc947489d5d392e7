/* Direct calls to the CUDA driver: those recorded as rows of integers (`command_buffer.py`), made one after the other
 * without Python between them; and queries of events, streams and memory.
 *
 * The driver library is loaded at the first use, so nothing of CUDA is needed to build this. All functions return the
 * driver's error codes, 0 for success.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

enum { LAUNCH, COPY, COPY_ROWS, COPY_MANY, RECORD, WAIT, AFTER, MARK };
enum { NUMBERS = 16, ARGUMENTS = 8, UNIFIED = 4, IN_STREAM_ORDER = 1, NO_TIMING = 2, MEMORY_TYPE = 2, HOST = 1 };
enum { NOT_READY = 600, NOT_SUPPORTED = 801, FEW = 4, GROWTH = 8 };

typedef struct {
    size_t source_x, source_y;
    int source_type;
    const void *source_host;
    uint64_t source;
    void *source_array;
    size_t source_pitch, target_x, target_y;
    int target_type;
    void *target_host;
    uint64_t target;
    void *target_array;
    size_t target_pitch, width, height;
} Rows;

typedef struct {
    int order, source_kind, source_number, target_kind, target_number;
    unsigned flags;
} Attributes;

static struct {
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuCtxGetCurrent)(void **);
    int (*cuCtxPushCurrent_v2)(void *);
    int (*cuCtxPopCurrent_v2)(void **);
    int (*cuEventCreate)(void **, unsigned);
    int (*cuEventRecord)(void *, void *);
    int (*cuEventQuery)(void *);
    int (*cuEventSynchronize)(void *);
    int (*cuStreamQuery)(void *);
    int (*cuStreamWaitEvent)(void *, void *, unsigned);
    int (*cuPointerGetAttribute)(void *, int, uint64_t);
    int (*cuLaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                          void **);
    int (*cuMemcpyAsync)(uint64_t, uint64_t, size_t, void *);
    int (*cuMemcpy2DAsync_v2)(const Rows *, void *);
    int (*cuMemcpyBatchAsync_v2)(uint64_t *, uint64_t *, size_t *, size_t, Attributes *, size_t *, size_t, void *);
} cuda;

/* Calls from here on are for `context`, whatever the thread has; `leave` undoes it. */
static int enter(void *context, int *pushed)
{
    void *current = NULL;
    int code = cuda.cuCtxGetCurrent(&current);
    *pushed = !code && current != context;
    return *pushed ? cuda.cuCtxPushCurrent_v2(context) : code;
}

static int leave(int code, int pushed)
{
    void *popped;
    if (pushed)
        cuda.cuCtxPopCurrent_v2(&popped);
    return code;
}

static int launch(const int64_t *row, void *stream)
{
    uint64_t values[ARGUMENTS];
    void *places[ARGUMENTS];
    for (int i = 0; i < ARGUMENTS; i++) {
        values[i] = (uint64_t)row[7 + i];
        places[i] = values + i;
    }
    return cuda.cuLaunchKernel((void *)row[2], row[3], row[4], 1, row[5], 1, 1, row[6], stream, places, NULL);
}

static int copy_rows(const int64_t *row, void *stream)
{
    Rows rows = {.target_type = UNIFIED, .target = row[2], .target_pitch = row[3], .source_type = UNIFIED,
                 .source = row[4], .source_pitch = row[5], .width = row[6], .height = row[7]};
    return cuda.cuMemcpy2DAsync_v2(&rows, stream);
}

/* With drivers of CUDA 13 and on, some at a time: the first are on their way while the next, more each time, are handed
 * over. Others take them one by one. */
static int copy_many(const int64_t *row, void *stream)
{
    uint64_t *targets = (uint64_t *)row[2], *sources = (uint64_t *)row[3];
    size_t *sizes = (size_t *)row[4], count = row[5], first = 0, some = FEW;
    Attributes attributes = {.order = IN_STREAM_ORDER};
    int code = 0;
    for (size_t at = 0; at < count && !code; at += some, some *= GROWTH) {
        some = count - at < some ? count - at : some;
        if (cuda.cuMemcpyBatchAsync_v2)
            code = cuda.cuMemcpyBatchAsync_v2(targets + at, sources + at, sizes + at, some, &attributes, &first, 1,
                                              stream);
        else
            for (size_t i = at; i < at + some && !code; i++)
                code = cuda.cuMemcpyAsync(targets[i], sources[i], sizes[i], stream);
    }
    return code;
}

/* What is put on two streams from now on comes after what is on `caller`. */
static int after(const int64_t *row, void *caller)
{
    int code = cuda.cuStreamQuery(caller);
    if (code != NOT_READY || (code = cuda.cuEventRecord((void *)row[2], caller)) ||
        (code = cuda.cuStreamWaitEvent((void *)row[1], (void *)row[2], 0)))
        return code;
    return cuda.cuStreamWaitEvent((void *)row[3], (void *)row[2], 0);
}

static int play_rows(const int64_t *row, size_t count, void *caller, void *mark)
{
    int code = 0;
    for (size_t i = 0; i < count && !code; i++, row += NUMBERS) {
        void *stream = (void *)row[1];
        switch (row[0]) {
        case LAUNCH: code = launch(row, stream); break;
        case COPY: code = cuda.cuMemcpyAsync(row[2], row[3], row[4], stream); break;
        case COPY_ROWS: code = copy_rows(row, stream); break;
        case COPY_MANY: code = copy_many(row, stream); break;
        case RECORD: code = cuda.cuEventRecord((void *)row[2], stream); break;
        case WAIT: code = cuda.cuStreamWaitEvent(stream, (void *)row[2], 0); break;
        case AFTER: code = after(row, caller); break;
        case MARK: code = cuda.cuEventRecord(mark, stream); break;
        default: code = NOT_SUPPORTED;
        }
    }
    return code;
}

static PyObject *play(PyObject *self, PyObject *args)
{
    Py_buffer rows;
    unsigned long long context, caller, mark;
    int code, pushed;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*KKK", &rows, &context, &caller, &mark))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    code = enter((void *)context, &pushed);
    if (!code)
        code = leave(play_rows(rows.buf, rows.len / sizeof(int64_t) / NUMBERS, (void *)caller, (void *)mark), pushed);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rows);
    return PyLong_FromLong(code);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static PyObject *asked(PyObject *args, int (*question)(void *))
{
    unsigned long long context, about;
    int code, pushed;
    if (!PyArg_ParseTuple(args, "KK", &context, &about))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (!(code = enter((void *)context, &pushed)))
        code = leave(question((void *)about), pushed);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

static PyObject *query(PyObject *self, PyObject *args)
{
    (void)self;
    return asked(args, cuda.cuEventQuery);
}

static PyObject *query_stream(PyObject *self, PyObject *args)
{
    (void)self;
    return asked(args, cuda.cuStreamQuery);
}

static PyObject *finish(PyObject *self, PyObject *args)
{
    (void)self;
    return asked(args, cuda.cuEventSynchronize);
}

static int order(void *event, void *stream)
{
    return cuda.cuStreamWaitEvent(stream, event, 0);
}

static PyObject *told(PyObject *args, int (*call)(void *, void *))
{
    unsigned long long context, event, stream;
    int code, pushed;
    if (!PyArg_ParseTuple(args, "KKK", &context, &event, &stream))
        return NULL;
    if (!(code = enter((void *)context, &pushed)))
        code = leave(call((void *)event, (void *)stream), pushed);
    return PyLong_FromLong(code);
}

static PyObject *record(PyObject *self, PyObject *args)
{
    (void)self;
    return told(args, cuda.cuEventRecord);
}

static PyObject *hold(PyObject *self, PyObject *args)
{
    (void)self;
    return told(args, order);
}

/* Looks for an event's end and nothing else, but lets other threads go first. */
static int watch_until(void *event, double until)
{
    int code;
    while ((code = cuda.cuEventQuery(event)) == NOT_READY && now() < until)
        sched_yield();
    return code;
}

static PyObject *watch(PyObject *self, PyObject *args)
{
    unsigned long long context, event;
    double seconds;
    int code, pushed;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKd", &context, &event, &seconds))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (!(code = enter((void *)context, &pushed)))
        code = leave(watch_until((void *)event, now() + seconds), pushed);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

static PyObject *event(PyObject *self, PyObject *context)
{
    void *handle = (void *)PyLong_AsUnsignedLongLong(context), *made = NULL;
    int code, pushed;
    (void)self;
    if (PyErr_Occurred())
        return NULL;
    if (!(code = enter(handle, &pushed)))
        code = leave(cuda.cuEventCreate(&made, NO_TIMING), pushed);
    return Py_BuildValue("iK", code, (unsigned long long)made);
}

static PyObject *is_pinned(PyObject *self, PyObject *address)
{
    unsigned long long at = PyLong_AsUnsignedLongLong(address);
    unsigned kind = 0;
    (void)self;
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(!cuda.cuPointerGetAttribute(&kind, MEMORY_TYPE, at) && kind == HOST);
}

static PyObject *addresses(PyObject *self, PyObject *arrays)
{
    PyObject *fast = PySequence_Fast(arrays, "a sequence of arrays"), *found = NULL;
    Py_ssize_t count = fast ? PySequence_Fast_GET_SIZE(fast) : 0;
    (void)self;
    if (fast)
        found = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    for (Py_ssize_t i = 0; found && i < count; i++) {
        Py_buffer memory;
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(fast, i), &memory, PyBUF_SIMPLE)) {
            Py_CLEAR(found);
            break;
        }
        ((int64_t *)PyBytes_AS_STRING(found))[i] = (int64_t)memory.buf;
        PyBuffer_Release(&memory);
    }
    Py_XDECREF(fast);
    return found;
}

static PyObject *context(PyObject *self, PyObject *device)
{
    long number = PyLong_AsLong(device);
    void *made = NULL;
    (void)self;
    if (PyErr_Occurred())
        return NULL;
    int code = cuda.cuDevicePrimaryCtxRetain(&made, (int)number);
    return Py_BuildValue("iK", code, (unsigned long long)made);
}

static PyObject *load(PyObject *self, PyObject *path)
{
    static const char *const NAMES[] = {
        "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent",  "cuCtxPushCurrent_v2",   "cuCtxPopCurrent_v2",
        "cuEventCreate",            "cuEventRecord",    "cuEventQuery",          "cuEventSynchronize",
        "cuStreamQuery",            "cuStreamWaitEvent", "cuPointerGetAttribute", "cuLaunchKernel",
        "cuMemcpyAsync",            "cuMemcpy2DAsync_v2", "cuMemcpyBatchAsync_v2",
    };
    const size_t count = sizeof NAMES / sizeof *NAMES;
    void *calls[sizeof NAMES / sizeof *NAMES];
    const char *name = PyUnicode_AsUTF8(path);
    (void)self;
    _Static_assert(sizeof calls == sizeof cuda, "a name for each call");
    if (!name)
        return NULL;
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return PyErr_Format(PyExc_OSError, "%s", dlerror());
    for (size_t i = 0; i < count; i++) /* older drivers lack the last */
        if (!(calls[i] = dlsym(library, NAMES[i])) && i + 1 < count)
            return PyErr_Format(PyExc_OSError, "%s has no %s", name, NAMES[i]);
    memcpy(&cuda, calls, sizeof cuda);
    return PyBool_FromLong(cuda.cuMemcpyBatchAsync_v2 != NULL);
}

static PyMethodDef methods[] = {
    {"load", load, METH_O, "load(library): find the driver, before all else; whether it copies many runs in one call"},
    {"context", context, METH_O, "context(device): the code, and the primary context of a device"},
    {"event", event, METH_O, "event(context): the code, and a new event"},
    {"record", record, METH_VARARGS, "record(context, event, stream): over when the stream has come here"},
    {"hold", hold, METH_VARARGS, "hold(context, event, stream): what comes next there comes after the event"},
    {"query", query, METH_VARARGS, "query(context, event): 0 when it is over, 600 before"},
    {"query_stream", query_stream, METH_VARARGS, "query_stream(context, stream): 0 when it is idle, 600 before"},
    {"finish", finish, METH_VARARGS, "finish(context, event): block until it is over"},
    {"watch", watch, METH_VARARGS, "watch(context, event, seconds): look for its end, for so long at most"},
    {"addresses", addresses, METH_O, "addresses(arrays): of their memory, 8 bytes each"},
    {"is_pinned", is_pinned, METH_O, "is_pinned(address): whether devices can reach this memory of the host"},
    {"play", play, METH_VARARGS, "play(rows, context, caller, mark): make the calls, up to one that fails"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
