/* cuda-client MIB: a CUDA program that takes so many MiB of the first GPU, says what it got, and stays.
 *
 * Prints one line of JSON: the device's memory as it is told, what it holds, and the driver's error that ended it (0:
 * none). The work of pods in the cluster's tests. */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *find(void *library, const char *name)
{
	void *found = dlsym(library, name);
	if (!found) {
		fprintf(stderr, "%s: %s\n", name, dlerror());
		exit(1);
	}
	return found;
}

int main(int count, char **words)
{
	long goal = count > 1 ? atol(words[1]) : 0, got = 0;
	size_t left, total = 0;
	unsigned long long address;
	int device, code;
	void *context, *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	int (*init)(unsigned) = (int (*)(unsigned))find(library, "cuInit");
	int (*first)(int *, int) = (int (*)(int *, int))find(library, "cuDeviceGet");
	int (*retain)(void **, int) = (int (*)(void **, int))find(library, "cuDevicePrimaryCtxRetain");
	int (*use)(void *) = (int (*)(void *))find(library, "cuCtxSetCurrent");
	int (*info)(size_t *, size_t *) = (int (*)(size_t *, size_t *))find(library, "cuMemGetInfo_v2");
	int (*allocate)(unsigned long long *, size_t) =
		(int (*)(unsigned long long *, size_t))find(library, "cuMemAlloc_v2");
	if (!(code = init(0)) && !(code = first(&device, 0)) && !(code = retain(&context, device)) && !(code = use(context)))
		code = info(&left, &total);
	for (; !code && got < goal; got += 16)
		if ((code = allocate(&address, 16 << 20)))
			break;
	printf("{\"total\": %zu, \"held\": %ld, \"error\": %d}\n", total >> 20, got, code);
	fflush(stdout);
	signal(SIGTERM, SIG_DFL);
	for (;;)
		pause();
}
