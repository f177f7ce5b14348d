/* Another interposer: it defines the name and calls the next definition. */
#define _GNU_SOURCE
#include <dlfcn.h>

int cuMemAlloc_v2(void *out, unsigned long bytes) {
  int (*next)(void *, unsigned long) = (int (*)(void *, unsigned long))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
  return next ? 100 + next(out, bytes) : -1;
}
