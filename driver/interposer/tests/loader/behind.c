/* Another interposer of dlsym, loaded after this library. It calls libc's, which it finds by libc's handle. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include "version.h"

void *dlsym(void *handle, const char *name) {
  static void *(*libcs)(void *, const char *);
  if (!libcs) libcs = (void *(*)(void *, const char *))dlvsym(dlopen("libc.so.6", RTLD_NOW), "dlsym", LIBC_VERSION);
  return libcs(handle, name);
}
