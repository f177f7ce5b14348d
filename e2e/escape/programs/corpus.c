/* A program that prints what a loaded library may change: signals, threads, open files, the mode mask, the
 * environment, and how the loader finds functions. Exits with 42. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void *add(void *sum)
{
	for (int i = 0; i < 1000; i++) {
		char *block = malloc(1 + i % 100);
		block[0] = 1;
		__atomic_fetch_add((int *)sum, block[0], __ATOMIC_RELAXED);
		free(block);
	}
	return NULL;
}

static void last(void) { puts("at exit"); }

static const char *found(void *handle, const char *name) { return dlsym(handle, name) ? "found" : "not found"; }

/* Uses the GPU driver as a CUDA program does. */
static void use_cuda(void)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
	unsigned long long address = 0;
	int device = 0;
	if (!driver) {
		puts(dlerror());
		return;
	}
	int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
	int (*get)(int *, int) = (int (*)(int *, int))dlsym(driver, "cuDeviceGet");
	int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
	int (*make_current)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
	int (*allocate)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))dlsym(driver, "cuMemAlloc_v2");
	int (*release)(unsigned long long) = (int (*)(unsigned long long))dlsym(driver, "cuMemFree_v2");
	printf("cuda %d", init(0));
	printf(" %d", get(&device, 0));
	printf(" %d", retain(&context, device));
	printf(" %d", make_current(context));
	printf(" %d", allocate(&address, 1 << 20));
	printf(" %d\n", release(address));
}

int main(int count, char **words)
{
	char line[256];
	int sum = 0, files = 0;
	pthread_t threads[4];
	atexit(last);
	FILE *status = fopen("/proc/self/status", "r");
	while (status && fgets(line, sizeof line, status))
		if (!strncmp(line, "Sig", 3) || !strncmp(line, "Threads", 7) || !strncmp(line, "Shd", 3))
			fputs(strstr(line, "SigQ") ? "" : line, stdout);
	if (status)
		fclose(status);
	DIR *open = opendir("/proc/self/fd");
	while (open && readdir(open))
		files++;
	if (open)
		closedir(open);
	printf("files %d, umask %o, words %d, preload %s\n", files, umask(0), count, getenv("LD_PRELOAD") ? "set" : "unset");
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, add, &sum);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	printf("sum %d\n", sum);
	printf("default: malloc %s, nvmlInit_v2 %s", found(RTLD_DEFAULT, "malloc"), found(RTLD_DEFAULT, "nvmlInit_v2"));
	/* Only found where the GPU driver is loaded. */
	printf(", cuInit %s\n", found(RTLD_DEFAULT, "cuInit"));
	const char *missing = dlerror();
	printf("error %s\n", missing && strstr(missing, "cuInit") ? "names it" : "is something else");
	printf("next: malloc %s, twice %s", found(RTLD_NEXT, "malloc"), found(RTLD_NEXT, "malloc"));
	printf(", nothing %s\n", found(RTLD_NEXT, "no_such_function"));
	const char *error = dlerror();
	printf("error %s\n", error && strstr(error, "no_such_function") ? "names it" : "is something else");
	if (count > 1 && !strcmp(words[1], "id"))
		printf("uid %d, euid %d\n", (int)getuid(), (int)geteuid());
	if (count > 1 && !strcmp(words[1], "cuda"))
		use_cuda();
	return 42;
}
