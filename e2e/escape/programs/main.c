/* escape ROW GOAL LIBRARY COPY
 *
 * Plays one trick by which a program may try to hold more device memory than its share, or to have more time, tries to hold GOAL MiB,
 * prints `held MIB` and stays until it is killed, so that whoever judges it can look at what the GPU says. It never
 * judges itself. */
#define _GNU_SOURCE
#include "driver.h"
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct order order;

long goal(void) { return atol(order.goal); }

int find_all(struct driver *driver, find_function *find, void *from)
{
	struct {
		const char *name;
		void **room;
	} wanted[] = {
		{ "cuInit", (void **)&driver->init },
		{ "cuDeviceGet", (void **)&driver->device },
		{ "cuDevicePrimaryCtxRetain", (void **)&driver->retain },
		{ "cuCtxSetCurrent", (void **)&driver->make_current },
		{ "cuMemAlloc_v2", (void **)&driver->allocate },
	};
	for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
		*wanted[i].room = find(from, wanted[i].name);
		if (!*wanted[i].room) {
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
		cannot(dlerror());
	return find_all(driver, (find_function *)dlsym, handle);
}

int find_usual(struct driver *driver) { return find_in(driver, "libcuda.so.1"); }

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

void held(long mib)
{
	printf("held %ld\n", mib);
	fflush(stdout);
	for (;;)
		pause();
}

void hold(struct driver *driver, long mib)
{
	int code = start(driver);
	if (code)
		refused("the context");
	held(code ? 0 : take(driver, mib));
}

void cannot(const char *why)
{
	printf("cannot %s\n", why ? why : "be tried here");
	fflush(stdout);
	exit(0);
}

void refused(const char *what) { fprintf(stderr, "refused: %s (%s)\n", what, strerror(errno)); }

const char *beside(const char *name)
{
	static char path[4200];
	const char *slash = strrchr(order.self, '/');
	snprintf(path, sizeof path, "%.*s/%s", (int)(slash - order.self), order.self, name);
	return path;
}

void become(const char *row, char **environment)
{
	const char *words[] = { order.self, row, order.goal, order.library, order.copy, NULL };
	execve(order.self, (char **)words, environment);
	cannot("be started again");
}

static void play(const struct row *rows)
{
	for (; rows->name; rows++)
		if (!strcmp(rows->name, order.row))
			rows->play();
}

int main(int count, char **words)
{
	if (count != 5) {
		fprintf(stderr, "usage: %s ROW GOAL LIBRARY COPY\n", words[0]);
		return 2;
	}
	static char self[4096];
	if (readlink("/proc/self/exe", self, sizeof self - 1) < 0)
		return 2;
	order = (struct order){ self, words[1], words[2], words[3], words[4] };
	play(loader_rows);
	play(page_rows);
	play(memory_rows);
	play(space_rows);
	play(time_rows);
	fprintf(stderr, "no row %s\n", order.row);
	return 2;
}
