/* Ways to the driver's functions that a library which was loaded first may not see. */
#define _GNU_SOURCE
#include "driver.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void plain(void)
{
	struct driver driver;
	if (!find_usual(&driver))
		hold(&driver, goal());
}

/* No trick: for each line of its input takes so many MiB more, and says how many it got. */
static void as_told(void)
{
	struct driver driver;
	char line[64];
	if (find_usual(&driver) || start(&driver))
		cannot("without a driver");
	while (fgets(line, sizeof line, stdin)) {
		printf("held %ld\n", take(&driver, atol(line)));
		fflush(stdout);
	}
	exit(0);
}

/* Four children, each of which wants a half of it, beside a parent that holds some. */
static void after_fork(void)
{
	struct driver driver;
	int ends[2];
	long sum = 0, one;
	if (pipe(ends))
		cannot("without a pipe");
	for (int child = 0; child < 4; child++) {
		if (fork())
			continue;
		if (find_usual(&driver) || start(&driver))
			one = 0;
		else
			one = take(&driver, goal() / 2);
		if (write(ends[1], &one, sizeof one) != sizeof one)
			_exit(1);
		for (;;)
			pause();
	}
	for (int child = 0; child < 4; child++)
		if (read(ends[0], &one, sizeof one) == sizeof one)
			sum += one;
	held(sum);
}

/* A child of a process that has a context and memory: CUDA refuses the child, but it may try. */
static void fork_of_a_user(void)
{
	struct driver driver;
	if (find_usual(&driver) || start(&driver))
		held(0);
	long sum = take(&driver, goal() / 2), one = 0;
	int ends[2];
	if (pipe(ends))
		cannot("without a pipe");
	if (!fork()) {
		one = start(&driver) ? 0 : take(&driver, goal());
		if (write(ends[1], &one, sizeof one) != sizeof one)
			_exit(1);
		for (;;)
			pause();
	}
	if (read(ends[0], &one, sizeof one) != sizeof one)
		one = 0;
	held(sum + one);
}

/* Fills the share, then becomes another image, which holds nothing and tries again; and its child beside it. */
static void after_exec(void)
{
	struct driver driver;
	if (!find_usual(&driver) && !start(&driver))
		take(&driver, goal());
	if (!fork())
		become("plain-quiet", environ);
	become("plain", environ);
}

static void plain_quiet(void)
{
	if (!freopen("/dev/null", "w", stdout))
		_exit(1);
	plain();
}

static void absolute_path(void)
{
	struct driver driver;
	if (!find_in(&driver, order.library))
		hold(&driver, goal());
}

static void linker_name(void)
{
	struct driver driver;
	if (!find_in(&driver, "libcuda.so"))
		hold(&driver, goal());
}

/* Where another library stands in the driver's place, the driver itself lies here, and needs to. */
#define REAL "/run/divvy/lib/real"

static void real_path(void)
{
	struct driver driver;
	if (!find_in(&driver, REAL "/libcuda.so.1"))
		hold(&driver, goal());
}

/* Begins as it should, and goes on with the driver itself. */
static void real_path_beside(void)
{
	struct driver driver, real;
	if (find_usual(&driver) || find_in(&real, REAL "/libcuda.so.1"))
		held(0);
	int code = start(&driver);
	held(code ? 0 : take(&real, goal()));
}

static void real_directory(void)
{
	setenv("LD_LIBRARY_PATH", REAL, 1);
	become("plain", environ);
}

static void new_namespace(void)
{
	struct driver driver;
	void *handle = dlmopen(LM_ID_NEWLM, order.library, RTLD_NOW);
	if (!handle)
		cannot(dlerror());
	if (!find_all(&driver, (find_function *)dlsym, handle))
		hold(&driver, goal());
}

static void deep_bind(void)
{
	struct driver driver;
	void *handle = dlopen(order.library, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
	if (!handle)
		cannot(dlerror());
	if (!find_all(&driver, (find_function *)dlsym, handle))
		hold(&driver, goal());
}

/* A library that is linked to the driver finds what it calls by itself: no dlsym is asked. */
static void linked(void *handle)
{
	if (!handle)
		cannot(dlerror());
	int (*begin)(void) = (int (*)(void))dlsym(handle, "user_start");
	long (*get)(long) = (long (*)(long))dlsym(handle, "user_take");
	if (!begin || !get)
		cannot(dlerror());
	held(begin() ? 0 : get(goal()));
}

static void deep_bind_linked(void) { linked(dlopen(beside("libuser.so"), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND)); }
static void new_namespace_linked(void) { linked(dlmopen(LM_ID_NEWLM, beside("libuser.so"), RTLD_NOW)); }

/* Symbols without a version are not found by one: the trick needs a driver whose symbols have some. */
static void *versioned(void *handle, const char *name) { return dlvsym(handle, name, "libcuda.so.1"); }

static void by_version(void)
{
	struct driver driver;
	void *handle = dlopen("libcuda.so.1", RTLD_NOW);
	if (!handle)
		cannot(dlerror());
	if (find_all(&driver, versioned, handle))
		cannot("with this driver, whose symbols have no versions");
	hold(&driver, goal());
}

/* libc's own dlsym, which no library that was loaded first defines by that version. */
static void by_libc(void)
{
	struct driver driver;
	void *libc = dlopen("libc.so.6", RTLD_NOW | RTLD_LOCAL), *handle = dlopen("libcuda.so.1", RTLD_NOW);
	find_function *find = libc ? (find_function *)dlvsym(libc, "dlsym", "GLIBC_2.34") : NULL;
	if (!find && libc)
		find = (find_function *)dlvsym(libc, "dlsym", "GLIBC_2.17");
	if (!find || !handle)
		cannot("since this libc has no such version of dlsym");
	if (!find_all(&driver, find, handle))
		hold(&driver, goal());
}

/* The driver's own way to its functions, for one that is asked for by the name of its first version. */
static void *asked(void *get, const char *name)
{
	int (*ask)(const char *, void **, int, unsigned long long, int *) =
		(int (*)(const char *, void **, int, unsigned long long, int *))get;
	char base[64];
	void *found = NULL;
	int status;
	snprintf(base, sizeof base, "%s", name);
	char *version = strstr(base, "_v2");
	if (version)
		*version = 0;
	return ask(base, &found, 12000, 0, &status) ? NULL : found;
}

static void asked_of_the_driver(void)
{
	struct driver driver;
	void *handle = dlopen("libcuda.so.1", RTLD_NOW);
	if (!handle)
		cannot(dlerror());
	void *get = dlsym(handle, "cuGetProcAddress_v2");
	/* Asked for itself, too: the answer may be another function. */
	void *again = get ? asked(get, "cuGetProcAddress") : NULL;
	if (!again)
		cannot("since the driver has no cuGetProcAddress");
	if (!find_all(&driver, asked, again))
		hold(&driver, goal());
}

static void preload_unset(void)
{
	unsetenv("LD_PRELOAD");
	become("plain", environ);
}

static void preload_replaced(void)
{
	setenv("LD_PRELOAD", "libm.so.6", 1);
	become("plain", environ);
}

static void environment_cleared(void)
{
	char *nothing[] = { NULL };
	become("plain", nothing);
}

const struct row loader_rows[] = {
	{ "plain", plain },
	{ "plain-quiet", plain_quiet },
	{ "as-told", as_told },
	{ "fork", after_fork },
	{ "fork-of-a-user", fork_of_a_user },
	{ "exec", after_exec },
	{ "absolute-path", absolute_path },
	{ "linker-name", linker_name },
	{ "real-path", real_path },
	{ "real-path-beside", real_path_beside },
	{ "real-directory", real_directory },
	{ "dlmopen", new_namespace },
	{ "deepbind", deep_bind },
	{ "deepbind-linked", deep_bind_linked },
	{ "dlmopen-linked", new_namespace_linked },
	{ "dlvsym", by_version },
	{ "libc-dlsym", by_libc },
	{ "cugetprocaddress", asked_of_the_driver },
	{ "preload-unset", preload_unset },
	{ "preload-replaced", preload_replaced },
	{ "environment-cleared", environment_cleared },
	{ NULL, NULL },
};
