/* A library that is linked against the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>

int cuMemAlloc_v2(void *out, unsigned long bytes);
void *needs_linked(void) { return (void *)cuMemAlloc_v2; }
void *needs_next(const char *name) { return dlsym(RTLD_NEXT, name); }
void *needs_default(const char *name) { return dlsym(RTLD_DEFAULT, name); }
