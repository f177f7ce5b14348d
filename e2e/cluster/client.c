/* cuda-client MIB [work]: a CUDA program that allocates MIB of the first GPU, reports the result, and stays alive.
 *
 * It prints a line of JSON: the device's total memory, the memory that it holds, and the CUDA error that stopped the
 * allocations (0 for none). With `work` it then launches kernels of a millisecond until it is killed. Every three
 * seconds it prints a line with the part of the device's time that its kernels used, in per cent. The pods of the
 * cluster's tests run it. */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char PTX[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry kernel_1ms()\n{\n ret;\n}\n";

static void *find(void *library, const char *name)
{
	void *found = dlsym(library, name);
	if (!found) {
		fprintf(stderr, "%s: %s\n", name, dlerror());
		exit(1);
	}
	return found;
}

static double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static int work(void *library)
{
	void *module, *function;
	int (*load)(void **, const void *) = (int (*)(void **, const void *))find(library, "cuModuleLoadData");
	int (*get)(void **, void *, const char *) =
		(int (*)(void **, void *, const char *))find(library, "cuModuleGetFunction");
	int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) =
		(int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
			 void **))find(library, "cuLaunchKernel");
	int code = load(&module, PTX);
	if (!code)
		code = get(&function, module, "kernel_1ms");
	double begin = seconds(), now;
	for (long kernels = 0; !code;) {
		code = launch(function, 1000, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
		kernels++;
		if ((now = seconds()) - begin >= 3) {
			printf("{\"busy\": %.1f}\n", kernels / (now - begin) / 10);
			fflush(stdout);
			begin = now, kernels = 0;
		}
	}
	printf("{\"error\": %d}\n", code);
	return 1;
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
	if (!code && count > 2 && !strcmp(words[2], "work"))
		return work(library);
	for (;;)
		pause();
}
