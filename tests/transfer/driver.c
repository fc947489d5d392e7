/* A CUDA driver that does nothing but keep a list of what it was asked (test_tape.py). */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t U;

static char list[1 << 16], refused[64];
static int code, busy;
static U current;

#define IS_REFUSED(name) (*refused && !strncmp(name, refused, strcspn(name, " ")))
#define NOTE(name, ...) (sprintf(list + strlen(list), name "\n", __VA_ARGS__), IS_REFUSED(name) ? code : 0)

const char *taken(void)
{
    static char copy[sizeof list];
    strcpy(copy, list);
    *list = 0;
    return copy;
}

void set(int is_busy, U context, const char *name, int error)
{
    busy = is_busy, current = context, code = error;
    strcpy(refused, name);
}

int cuDevicePrimaryCtxRetain(U *context, int device) { return *context = 100 + device, 0; }
int cuCtxGetCurrent(U *context) { return *context = current, 0; }
int cuCtxPushCurrent_v2(U context) { return NOTE("push %lu", context); }
int cuCtxPopCurrent_v2(U *context) { return NOTE("pop %lu", *context = 0); }
int cuEventRecord(U event, U stream) { return NOTE("record %lu %lu", event, stream); }
int cuEventQuery(U event) { return event && busy ? 600 : IS_REFUSED("query ") ? code : 0; }
int cuEventSynchronize(U event) { return NOTE("finish %lu", event); }
int cuStreamQuery(U stream) { return stream && busy ? 600 : 0; }
int cuStreamWaitEvent(U stream, U event, unsigned flags) { return NOTE("wait %lu %lu %u", stream, event, flags); }
int cuMemcpyAsync(U to, U from, U size, U stream) { return NOTE("copy %lu %lu %lu %lu", to, from, size, stream); }

int cuEventCreate(U *event, unsigned flags)
{
    static U next = 1000;
    *event = next++;
    return NOTE("create %u", flags);
}

int cuPointerGetAttribute(unsigned *kind, int what, U address)
{
    *kind = what == 2 && address == 77 ? 1 : 2;
    return 0;
}

int cuLaunchKernel(U function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c,
                   unsigned shared, U stream, U **values, void **extra)
{
    return NOTE("launch %lu %u %u %u %u %u %u %u %lu: %lu %lu %lu %lu", function, x, y, z, threads, b, c, shared, stream,
                *values[0], *values[1], *values[2], *values[7] + (extra != NULL));
}

int cuMemcpy2DAsync_v2(const U *rows, U stream) /* counted in words of 8 bytes, the types filling up one each */
{
    return NOTE("rows %lu+%lu %lu+%lu %lux%lu %u %u %lu", rows[11], rows[13], rows[4], rows[6], rows[14], rows[15],
                *(unsigned *)(rows + 2), *(unsigned *)(rows + 9), stream);
}

#ifdef BATCH
int cuMemcpyBatchAsync_v2(U *to, U *from, U *sizes, U count, unsigned *attributes, U *first, U number, U stream)
{
    return NOTE("batch %lu %lu %lu %lu %u %lu %lu %lu", to[count - 1], from[count - 1], sizes[count - 1], count,
                *attributes, *first, number, stream);
}
#endif
