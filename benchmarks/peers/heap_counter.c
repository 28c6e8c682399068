/* Counts a process's heap, preloaded in front of glibc's allocator: bytes live now, and the most since last asked.
 *
 * Every CPU tensor comes from posix_memalign; gloo's, oneDNN's and NumPy's scratch from malloc. Unlike resident memory
 * the count holds no freed pages that the allocator keeps, and no page cache. Blocks under 4 KiB are left out: Python
 * makes millions of them, and they do not add up. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

#define SMALLEST_COUNTED 4096

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static _Atomic long live, peak;

static long counted_size(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    return size < SMALLEST_COUNTED ? 0 : (long)size;
}

static void *counted(void *block) {
    long size = counted_size(block);
    if (size) {
        long now = atomic_fetch_add(&live, size) + size, highest = atomic_load(&peak);
        while (now > highest && !atomic_compare_exchange_weak(&peak, &highest, now)) {}
    }
    return block;
}

void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *block = memalign(alignment, size);
    if (!block) return ENOMEM;
    *result = block;
    return 0;
}

void free(void *block) {
    atomic_fetch_sub(&live, counted_size(block));
    __libc_free(block);
}

void *realloc(void *old, size_t size) {
    long old_size = counted_size(old);
    void *block = __libc_realloc(old, size);
    if (block || !size) atomic_fetch_sub(&live, old_size);  /* else it failed, and the old block is still there */
    return counted(block);
}

long heap_live_bytes(void) { return atomic_load(&live); }
long heap_take_peak_bytes(void) { return atomic_exchange(&peak, atomic_load(&live)); }
