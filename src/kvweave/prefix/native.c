/* Takes token ids out of a list as they lie in memory, without a call for each; looks for a negative one; compares runs. */
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

static PyMethodDef methods[] = {
    {"has_negative", has_negative, METH_O, "has_negative(ids): whether one of an array of int32 is negative"},
    {"num_equal", (PyCFunction)(void (*)(void))num_equal, METH_FASTCALL,
     "num_equal(run, other): how many int32 the starts of two arrays have in common"},
    {"take", take, METH_VARARGS, "take(tokens, to): whether all are ints from 0 to 2**31 - 1, which `to` then has"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
