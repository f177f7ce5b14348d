/* escape ATTACK GOAL LIBRARY COPY
 *
 * Runs one attack on a share's memory or compute time. It tries to hold GOAL MiB, prints `held MIB` and stays
 * until it is killed, so that the test can read the usage from the GPU. It does not decide whether the
 * attack succeeded. */
#define _GNU_SOURCE
#include "driver.h"
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct arguments arguments;

long goal(void) { return atol(arguments.goal); }

int find_all(struct driver *driver, find_function *find, void *from)
{
	struct {
		const char *name;
		void **slot;
	} wanted[] = {
		{ "cuInit", (void **)&driver->init },
		{ "cuDeviceGet", (void **)&driver->device },
		{ "cuDevicePrimaryCtxRetain", (void **)&driver->retain },
		{ "cuCtxSetCurrent", (void **)&driver->make_current },
		{ "cuMemAlloc_v2", (void **)&driver->allocate },
	};
	for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
		*wanted[i].slot = find(from, wanted[i].name);
		if (!*wanted[i].slot) {
			fprintf(stderr, "%s is not found\n", wanted[i].name);
			return -1;
		}
	}
	return 0;
}

int find_in(struct driver *driver, const char *library)
{
	void *handle = dlopen(library, RTLD_NOW);
	if (!handle)
		skip(dlerror());
	return find_all(driver, (find_function *)dlsym, handle);
}

int find_default(struct driver *driver) { return find_in(driver, "libcuda.so.1"); }

int start(struct driver *driver)
{
	int code, device;
	void *context;
	if ((code = driver->init(0)) || (code = driver->device(&device, 0)) || (code = driver->retain(&context, device)))
		return code;
	return driver->make_current(context);
}

long take(struct driver *driver, long mib)
{
	long got = 0;
	unsigned long long address;
	while (got < mib && driver->allocate(&address, 16 * MIB) == 0)
		got += 16;
	return got;
}

void report_held(long mib)
{
	printf("held %ld\n", mib);
	fflush(stdout);
	for (;;)
		pause();
}

void allocate_and_stay(struct driver *driver, long mib)
{
	int code = start(driver);
	if (code)
		report_refused("the context");
	report_held(code ? 0 : take(driver, mib));
}

void skip(const char *why)
{
	printf("skip %s\n", why ? why : "not possible here");
	fflush(stdout);
	exit(0);
}

void report_refused(const char *what) { fprintf(stderr, "refused: %s (%s)\n", what, strerror(errno)); }

const char *sibling_path(const char *name)
{
	static char path[4200];
	const char *slash = strrchr(arguments.self, '/');
	snprintf(path, sizeof path, "%.*s/%s", (int)(slash - arguments.self), arguments.self, name);
	return path;
}

void restart_as(const char *attack, char **environment)
{
	const char *words[] = { arguments.self, attack, arguments.goal, arguments.library, arguments.copy, NULL };
	execve(arguments.self, (char **)words, environment);
	skip("exec failed");
}

static void run_if_named(const struct attack *attacks)
{
	for (; attacks->name; attacks++)
		if (!strcmp(attacks->name, arguments.attack))
			attacks->run();
}

int main(int count, char **words)
{
	if (count != 5) {
		fprintf(stderr, "usage: %s ATTACK GOAL LIBRARY COPY\n", words[0]);
		return 2;
	}
	static char self[4096];
	if (readlink("/proc/self/exe", self, sizeof self - 1) < 0)
		return 2;
	arguments = (struct arguments){ self, words[1], words[2], words[3], words[4] };
	run_if_named(loader_attacks);
	run_if_named(page_attacks);
	run_if_named(memory_attacks);
	run_if_named(space_attacks);
	run_if_named(time_attacks);
	fprintf(stderr, "no attack %s\n", arguments.attack);
	return 2;
}
