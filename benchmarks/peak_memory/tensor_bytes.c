/* Counts what torch's CPU allocator has given out: every posix_memalign that is called from libc10.so, until it is freed.
 *
 * Preloaded (LD_PRELOAD), so that it sees what any thread allocates, gloo's too, and nothing that is no tensor: oneDNN and
 * Python allocate from other libraries. Read and reset through ctypes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PLACES (1u << 20) /* live storages at once; a training has some thousands */

typedef struct {
  uintptr_t address; /* 0: never used; 1: given back */
  size_t size;
} Place;

static Place places[PLACES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t live, peak;
static int64_t missed; /* allocations that found no place: the figures are then worthless */
static int (*real_posix_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static uintptr_t c10_begin, c10_end; /* where libc10.so lies, once it is loaded */

static int look_for_c10(struct dl_phdr_info *info, size_t size, void *unused) {
  (void)size, (void)unused;
  if (info->dlpi_name == NULL || strstr(info->dlpi_name, "libc10.so") == NULL) return 0;
  for (int at = 0; at < info->dlpi_phnum; at++) {
    const ElfW(Phdr) *part = &info->dlpi_phdr[at];
    if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
    c10_end = info->dlpi_addr + part->p_vaddr + part->p_memsz;
    c10_begin = info->dlpi_addr + part->p_vaddr;
  }
  return 1;
}

/* Not by dladdr: it looks through all symbols of a library, and oneDNN allocates often. */
static int is_of_c10(uintptr_t caller) {
  if (c10_begin == 0) {
    dl_iterate_phdr(look_for_c10, NULL);
    if (c10_begin == 0) return 0;
  }
  return c10_begin <= caller && caller < c10_end;
}

static uint32_t first_place(uintptr_t address) {
  return (uint32_t)(((address >> 6) * 0x9E3779B97F4A7C15ull) >> 44);
}

static void take(uintptr_t address, size_t size) {
  pthread_mutex_lock(&lock);
  uint32_t at = first_place(address);
  for (uint32_t tried = 0; tried < PLACES; tried++, at = (at + 1) % PLACES) {
    if (places[at].address > 1) continue;
    places[at].address = address;
    places[at].size = size;
    live += (int64_t)size;
    if (live > peak) peak = live;
    pthread_mutex_unlock(&lock);
    return;
  }
  missed++;
  pthread_mutex_unlock(&lock);
}

static void give_back(uintptr_t address) {
  pthread_mutex_lock(&lock);
  uint32_t at = first_place(address);
  for (uint32_t tried = 0; tried < PLACES; tried++, at = (at + 1) % PLACES) {
    if (places[at].address == 0) break;
    if (places[at].address != address) continue;
    live -= (int64_t)places[at].size;
    places[at].address = 1;
    if (places[(at + 1) % PLACES].address == 0) /* the end of a chain need not be remembered */
      for (; places[at].address == 1; at = (at + PLACES - 1) % PLACES) places[at].address = 0;
    break;
  }
  pthread_mutex_unlock(&lock);
}

int posix_memalign(void **result, size_t alignment, size_t size) {
  if (real_posix_memalign == NULL)
    real_posix_memalign = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  int failed = real_posix_memalign(result, alignment, size);
  if (!failed && is_of_c10((uintptr_t)__builtin_return_address(0))) take((uintptr_t)*result, size);
  return failed;
}

void free(void *address) {
  if (real_free == NULL) real_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
  /* Tensors lie at multiples of 64; most of what is freed does not, and need not be looked for. */
  if (address != NULL && ((uintptr_t)address & 63) == 0) give_back((uintptr_t)address);
  real_free(address);
}

int64_t tensor_bytes_live(void) { return live; }
int64_t tensor_bytes_peak(void) { return missed ? -1 : peak; }
void tensor_bytes_begin_again(void) {
  pthread_mutex_lock(&lock);
  peak = live;
  pthread_mutex_unlock(&lock);
}
