/* Replaces libcuda.so.1 and libnvidia-ml.so.1, with only the functions that the tests need. */
#include <string.h>

int cuInit(unsigned flags) { return 1000 + (int)flags; }
int cuMemAlloc(void *out, unsigned bytes) { return 11; }
int cuMemAlloc_v2(void *out, unsigned long bytes) { return 12; }
int cuMemAllocAsync(void *out, unsigned long bytes, void *stream) { return 13; }
int cuMemAllocAsync_ptsz(void *out, unsigned long bytes, void *stream) { return 14; }
int cuMemAllocNext(void *out) { return 15; }
int cuCtxGetDevice(int *device) { return *device = 0; }
int nvmlDeviceSetMigMode(void *device, unsigned mode, int *status) { return 4000 + (int)mode; }

int cuGetProcAddress(const char *symbol, void **out, int version, unsigned long flags);
/* Has a version of cuMemAlloc that is newer than any current header. */
int cuGetProcAddress_v2(const char *symbol, void **out, int version, unsigned long flags, int *status) {
  *out = 0;
  if (!strcmp(symbol, "cuMemAlloc"))
    *out = version >= 90000 ? (void *)cuMemAllocNext : version >= 3020 ? (void *)cuMemAlloc_v2 : (void *)cuMemAlloc;
  if (!strcmp(symbol, "cuMemAllocAsync") && version >= 11020)
    *out = flags == 2 ? (void *)cuMemAllocAsync_ptsz : (void *)cuMemAllocAsync;
  if (!strcmp(symbol, "cuGetProcAddress"))
    *out = version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
  if (!strcmp(symbol, "cuCtxGetDevice"))
    *out = (void *)cuCtxGetDevice;
  if (status)
    *status = *out ? 0 : 1;
  return *out ? 0 : 500;
}
int cuGetProcAddress(const char *symbol, void **out, int version, unsigned long flags) {
  return cuGetProcAddress_v2(symbol, out, version, flags, 0);
}
