/* Another interposer of dlsym, loaded behind: it goes on to libc's, which it looks for by libc's handle. */
#define _GNU_SOURCE
#include <dlfcn.h>

#ifdef __x86_64__
#define LIBC_VERSION "GLIBC_2.2.5"
#else
#define LIBC_VERSION "GLIBC_2.17"
#endif

void *dlsym(void *handle, const char *name) {
  static void *(*libcs)(void *, const char *);
  if (!libcs) libcs = (void *(*)(void *, const char *))dlvsym(dlopen("libc.so.6", RTLD_NOW), "dlsym", LIBC_VERSION);
  return libcs(handle, name);
}
