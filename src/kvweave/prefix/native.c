/* Takes token ids out of a list as they lie in memory, without a call for each; looks for a negative one; compares runs
   and parts of them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { AHEAD = 128 }; /* a prompt's ints lie anywhere on the heap: each is sent for before its turn comes */

#if PY_VERSION_HEX >= 0x030C0000
#define IS_SHORT(item) PyUnstable_Long_IsCompact((const PyLongObject *)(item))
#define SHORT(item) ((long)PyUnstable_Long_CompactValue((const PyLongObject *)(item)))
#else
#define IS_SHORT(item) (Py_SIZE(item) == 1) /* 0 has no digit, and takes the longer way */
#define SHORT(item) ((long)((const PyLongObject *)(item))->ob_digit[0])
#endif

static inline int take_one(PyObject *item, int32_t *to)
{
    int overflow; /* then the value is -1 */
    if (!PyLong_CheckExact(item))
        return 0;
    long value = IS_SHORT(item) ? SHORT(item) : PyLong_AsLongAndOverflow(item, &overflow);
    *to = (int32_t)value;
    return value >= 0 && value <= INT32_MAX;
}

/* No Python runs in between, so the list stays as it is. */
static int take_all(PyObject *tokens, int32_t *to)
{
    PyObject **items = PySequence_Fast_ITEMS(tokens);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(tokens), i = 0;
    for (; i < count - AHEAD; i++) {
        __builtin_prefetch(items[i + AHEAD]);
        if (!take_one(items[i], to + i))
            return 0;
    }
    while (i < count && take_one(items[i], to + i))
        i++;
    return i == count;
}

static PyObject *take(PyObject *self, PyObject *args)
{
    PyObject *tokens, *answer = NULL;
    Py_buffer to;
    (void)self;
    if (!PyArg_ParseTuple(args, "Ow*", &tokens, &to))
        return NULL;
    if (!PyList_Check(tokens) && !PyTuple_Check(tokens))
        PyErr_SetString(PyExc_TypeError, "tokens are taken out of a list or a tuple");
    else if (to.len != PySequence_Fast_GET_SIZE(tokens) * (Py_ssize_t)sizeof(int32_t))
        PyErr_SetString(PyExc_ValueError, "four bytes for every token are needed");
    else
        answer = PyBool_FromLong(take_all(tokens, to.buf));
    PyBuffer_Release(&to);
    return answer;
}

static PyObject *has_negative(PyObject *self, PyObject *ids)
{
    Py_buffer run;
    int32_t signs = 0;
    (void)self;
    if (PyObject_GetBuffer(ids, &run, PyBUF_SIMPLE) < 0)
        return NULL;
    const int32_t *at = run.buf;
    for (Py_ssize_t i = 0; i < run.len / (Py_ssize_t)sizeof(int32_t); i++)
        signs |= at[i];
    PyBuffer_Release(&run);
    return PyBool_FromLong(signs < 0);
}

enum { TOGETHER = 64 }; /* ids that are compared at once */

static PyObject *num_equal(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer left, right;
    (void)self;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "two runs are compared");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &left, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[1], &right, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&left);
        return NULL;
    }
    const int32_t *a = left.buf, *b = right.buf;
    Py_ssize_t count = (left.len < right.len ? left.len : right.len) / (Py_ssize_t)sizeof(int32_t), i = 0;
    while (count - i >= TOGETHER && !memcmp(a + i, b + i, TOGETHER * sizeof(int32_t)))
        i += TOGETHER;
    while (i < count && a[i] == b[i])
        i++;
    PyBuffer_Release(&left);
    PyBuffer_Release(&right);
    return PyLong_FromSsize_t(i);
}

/* Places in a run, of arguments from `first` on; whether they are numbers that are not negative, the last one not 0. */
static int places(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t first, Py_ssize_t *start, Py_ssize_t *size)
{
    if (nargs != first + 2) {
        PyErr_SetString(PyExc_TypeError, "a start and a number of tokens come last");
        return 0;
    }
    *start = PyLong_AsSsize_t(args[first]);
    *size = PyLong_AsSsize_t(args[first + 1]);
    if (!PyErr_Occurred() && (*start < 0 || *size < 1))
        PyErr_SetString(PyExc_ValueError, "tokens are counted from 0 on, blocks have one at least");
    return !PyErr_Occurred();
}

static PyObject *token_bytes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer run;
    Py_ssize_t start, count;
    (void)self;
    if (!places(args, nargs, 1, &start, &count) || PyObject_GetBuffer(args[0], &run, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_ssize_t left = run.len / (Py_ssize_t)sizeof(int32_t) - start;
    count = left < count ? (left > 0 ? left : 0) : count;
    PyObject *bytes = PyBytes_FromStringAndSize(count ? (const char *)((const int32_t *)run.buf + start) : NULL,
                                                count * (Py_ssize_t)sizeof(int32_t));
    PyBuffer_Release(&run);
    return bytes;
}

static PyObject *last_tokens(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer run;
    Py_ssize_t start, size;
    (void)self;
    if (!places(args, nargs, 1, &start, &size) || PyObject_GetBuffer(args[0], &run, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_ssize_t left = run.len / (Py_ssize_t)sizeof(int32_t) - start, count = left > 0 ? left / size : 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int32_t));
    if (bytes) {
        int32_t *to = (int32_t *)PyBytes_AS_STRING(bytes);
        const int32_t *from = run.buf;
        for (Py_ssize_t i = 0; i < count; i++)
            to[i] = from[start + (i + 1) * size - 1];
    }
    PyBuffer_Release(&run);
    return bytes;
}

static PyObject *num_blocks_equal(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer ends, prompt;
    Py_ssize_t start, size, i = 0;
    (void)self;
    if (!places(args, nargs, 2, &start, &size) || PyObject_GetBuffer(args[0], &ends, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[1], &prompt, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&ends);
        return NULL;
    }
    Py_ssize_t left = prompt.len / (Py_ssize_t)sizeof(int32_t) - 1 - start, count = left > 0 ? left / size : 0;
    if (count > ends.len / (Py_ssize_t)sizeof(int32_t))
        count = ends.len / (Py_ssize_t)sizeof(int32_t);
    const int32_t *last = ends.buf, *tokens = prompt.buf;
    while (i < count && last[i] == tokens[start + (i + 1) * size - 1])
        i++;
    PyBuffer_Release(&ends);
    PyBuffer_Release(&prompt);
    return PyLong_FromSsize_t(i);
}

static PyMethodDef methods[] = {
    {"has_negative", has_negative, METH_O, "has_negative(ids): whether one of an array of int32 is negative"},
    {"num_equal", (PyCFunction)(void (*)(void))num_equal, METH_FASTCALL,
     "num_equal(run, other): how many int32 the starts of two arrays have in common"},
    {"last_tokens", (PyCFunction)(void (*)(void))last_tokens, METH_FASTCALL,
     "last_tokens(run, start, block_tokens): the bytes of the last int32 of each whole block from `start` on"},
    {"num_blocks_equal", (PyCFunction)(void (*)(void))num_blocks_equal, METH_FASTCALL,
     "num_blocks_equal(last_tokens, prompt, start, block_tokens): how many blocks from `start` on have these last int32,"
     " the last of the prompt not looked at"},
    {"take", take, METH_VARARGS, "take(tokens, to): whether all are ints from 0 to 2**31 - 1, which `to` then has"},
    {"token_bytes", (PyCFunction)(void (*)(void))token_bytes, METH_FASTCALL,
     "token_bytes(run, start, count): the bytes of `count` int32 from `start` on"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
