/* Counts who holds the pages of a window, many pages in one call. `holders.py` says what each function does. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define TREE (INT64_C(1) << 32)
#define REFERENCES (TREE - 1)

/* The arguments that all functions have: counts by page, pages, counts by super-page (or none), pages of a super-page. */
typedef struct {
    Py_buffer holders_buffer, pages_buffer, evictable, out_buffer;
    Py_ssize_t size, count;
    int64_t *holders;
    int32_t *pages, *out;
} Call;

static inline void count_evictable(const Call *call, int32_t page, int64_t sign)
{
    if (call->evictable.len)
        ((int64_t *)call->evictable.buf)[page / call->size] += sign;
}

/* A page that nobody holds has the count of the table that will get it. */
static inline int32_t freed(const Call *call, int32_t page)
{
    call->holders[page] = 1;
    return page;
}

static void end(Call *call)
{
    PyBuffer_Release(&call->holders_buffer);
    PyBuffer_Release(&call->pages_buffer);
    PyBuffer_Release(&call->evictable);
    PyBuffer_Release(&call->out_buffer);
}

/* Every page has a counter, every counter a place: checked here, so that no loop has to. */
static int check(Call *call, int has_out)
{
    Py_ssize_t most = call->holders_buffer.len / 8;
    int fits = call->size > 0 && (!has_out || call->out_buffer.len >= call->pages_buffer.len);
    for (Py_ssize_t i = 0; i < call->count; i++)
        fits &= call->pages[i] >= 0 && call->pages[i] < most;
    if (fits && call->evictable.len && (most - 1) / call->size >= call->evictable.len / 8)
        fits = 0;
    if (!fits)
        PyErr_SetString(PyExc_IndexError, "a page has no counter");
    return fits;
}

/* `format` says how many of the arguments a function takes. */
static int begin(PyObject *args, Call *call, const char *format)
{
    memset(call, 0, sizeof *call);
    call->size = 1;
    int parsed = PyArg_ParseTuple(args, format, &call->holders_buffer, &call->pages_buffer, &call->evictable,
                                  &call->size, &call->out_buffer);
    call->holders = call->holders_buffer.buf;
    call->pages = call->pages_buffer.buf;
    call->out = call->out_buffer.buf;
    call->count = call->pages_buffer.len / 4;
    if (parsed && check(call, strlen(format) > 7))
        return 1;
    if (parsed)
        end(call);
    return 0;
}

static PyObject *share(PyObject *self, PyObject *args)
{
    Call call;
    (void)self;
    if (!begin(args, &call, "w*y*w*n"))
        return NULL;
    Py_ssize_t unnamed = 0;
    for (Py_ssize_t i = 0; i < call.count; i++)
        if (call.pages[i] && !(call.holders[call.pages[i]]++ & REFERENCES)) {
            count_evictable(&call, call.pages[i], -1);
            unnamed++;
        }
    end(&call);
    return PyLong_FromSsize_t(unnamed);
}

static PyObject *enter(PyObject *self, PyObject *args)
{
    Call call;
    (void)self;
    if (!begin(args, &call, "w*y*"))
        return NULL;
    Py_ssize_t entered = 0;
    for (Py_ssize_t i = 0; i < call.count; i++)
        if (call.pages[i]) {
            entered += call.holders[call.pages[i]] < TREE;
            call.holders[call.pages[i]] += TREE;
        }
    end(&call);
    return PyLong_FromSsize_t(entered);
}

static PyObject *release(PyObject *self, PyObject *args)
{
    Call call;
    (void)self;
    if (!begin(args, &call, "w*y*w*nw*"))
        return NULL;
    Py_ssize_t gone = 0, unnamed = 0;
    for (Py_ssize_t i = 0; i < call.count; i++) {
        if (!call.pages[i])
            continue;
        int64_t left = --call.holders[call.pages[i]];
        if (!left)
            call.out[gone++] = freed(&call, call.pages[i]);
        else if (!(left & REFERENCES)) {
            count_evictable(&call, call.pages[i], 1);
            unnamed++;
        }
    }
    end(&call);
    return Py_BuildValue("nn", gone, unnamed);
}

static PyObject *leave(PyObject *self, PyObject *args)
{
    Call call;
    (void)self;
    if (!begin(args, &call, "w*w*w*nw*"))
        return NULL;
    Py_ssize_t gone = 0, left_tree = 0;
    for (Py_ssize_t i = 0; i < call.count; i++) {
        if (!call.pages[i])
            continue;
        int64_t left = call.holders[call.pages[i]] -= TREE;
        if (!left) {
            call.out[gone++] = freed(&call, call.pages[i]);
            count_evictable(&call, call.pages[i], -1);
        }
        if (left < TREE) {
            left_tree++;
            call.pages[i] = 0;
        }
    }
    end(&call);
    return Py_BuildValue("nn", gone, left_tree);
}

static PyObject *prune(PyObject *self, PyObject *args)
{
    Call call;
    (void)self;
    if (!begin(args, &call, "w*w*"))
        return NULL;
    for (Py_ssize_t i = 0; i < call.count; i++)
        if (call.holders[call.pages[i]] < TREE)
            call.pages[i] = 0;
    end(&call);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"share", share, METH_VARARGS, "share(holders, pages, evictable_in, per_superpage) -> newly named"},
    {"enter", enter, METH_VARARGS, "enter(holders, pages) -> newly in the tree"},
    {"release", release, METH_VARARGS, "release(holders, pages, evictable_in, per_superpage, out) -> gone, unnamed"},
    {"leave", leave, METH_VARARGS, "leave(holders, pages, evictable_in, per_superpage, out) -> gone, left"},
    {"prune", prune, METH_VARARGS, "prune(holders, pages): NULL for those that are not in the tree"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
