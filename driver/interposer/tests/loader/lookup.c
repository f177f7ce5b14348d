/* Looks functions up in every possible way, and prints for each the file that contains the result.
 *
 *   lookup DRIVER NEEDS OWN NVML     paths of the libraries built from the other sources here
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include "version.h"

extern int cuMemAlloc_v2(void *, unsigned long) __attribute__((weak));

static const char *file_of(void *address) {
  Dl_info info;
  if (!address) return "none";
  if (!dladdr(address, &info)) return "nowhere";
  const char *slash = strrchr(info.dli_fname, '/');
  return slash ? slash + 1 : info.dli_fname;
}

static void say(const char *what, void *address) { printf("%s: %s\n", what, file_of(address)); }

static void *opened(const char *path, int flags) {
  void *handle = dlopen(path, flags);
  if (!handle) printf("dlopen: %s\n", dlerror());
  return handle;
}

typedef void *finder(const char *);

int main(int count, char **argument) {
  const char *name = "cuMemAlloc_v2";
  if (count < 5) return 2;

  /* If the program is not linked against the driver, the driver is not loaded yet. */
  say("at first", dlsym(RTLD_DEFAULT, name));
  const char *error = dlerror();
  if (error) printf("at first, error: %.31s\n", strstr(error, "undefined symbol"));
  say("next at first", dlsym(RTLD_NEXT, name));
  say("at first, the program's own", dlsym(RTLD_DEFAULT, "cuMemFree_v2"));

  void *apart = dlmopen(LM_ID_NEWLM, argument[1], RTLD_NOW);
  if (!apart) printf("dlmopen: %s\n", dlerror());
  say("dlmopen", dlsym(apart, name));
  dlclose(apart);

  void *driver = opened(argument[1], RTLD_NOW);
  say("absolute path", dlsym(driver, name));
  dlclose(driver);
  say("opened again", dlsym(driver = opened(argument[1], RTLD_NOW), name));
  say("SONAME", dlsym(opened("libcuda.so.1", RTLD_NOW), name));
  say("deep binding", dlsym(opened(argument[1], RTLD_NOW | RTLD_DEEPBIND), name));
  say("not hooked", dlsym(driver, "cuCtxGetDevice"));
  say("dlvsym", dlvsym(driver, name, "libcuda.so.1"));
  say("not there", dlsym(driver, "cuMemAlloc_v9"));
  printf("error: %s\n", strstr(dlerror(), "undefined symbol"));

  say("NVML", dlsym(opened(argument[4], RTLD_NOW), "nvmlDeviceSetMigMode"));
  say("another SONAME", dlsym(opened(argument[3], RTLD_NOW), name));

  void *libc = opened("libc.so.6", RTLD_NOW);
  void *(*again)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(libc, "dlsym", LIBC_VERSION);
  say("libc's dlsym", again);
  say("by libc's dlsym", again(driver, name));
  say("printf by libc's dlsym", again(libc, "printf"));
  say("libc's dlsym by a name alone", dlsym(libc, "dlsym"));
  say("libc's dlopen", dlsym(libc, "dlopen"));

  void *needs = opened(argument[2], RTLD_NOW);
  void *(*linked)(void) = (void *(*)(void))dlsym(needs, "needs_linked");
  say("linked", linked());
  say("next of a library", ((finder *)dlsym(needs, "needs_next"))(name));
  say("default", dlsym(RTLD_DEFAULT, name));
  say("next of the program", dlsym(RTLD_NEXT, name));

  say("next printf", dlsym(RTLD_NEXT, "printf"));
  say("next printf of a library", ((finder *)dlsym(needs, "needs_next"))("printf"));
  say("default printf", dlsym(RTLD_DEFAULT, "printf"));
  say("versioned printf", dlvsym(RTLD_NEXT, "printf", LIBC_VERSION));
  say("next main", dlsym(RTLD_NEXT, "main"));
  say("empty name", dlsym(RTLD_DEFAULT, ""));
  say("the program's own", dlsym(RTLD_DEFAULT, "cuMemFree_v2"));

  /* Bound by the loader itself, without dlsym. */
  if (cuMemAlloc_v2)
    printf("called: %d\n", cuMemAlloc_v2(0, 0));
  else
    printf("called: none\n");
  return 0;
}

/* A program may define a function with a hooked name. */
int cuMemFree_v2(unsigned long pointer) { return 0; }
