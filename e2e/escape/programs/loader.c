/* Ways to the driver's functions that a preloaded library may miss. */
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
	if (!find_default(&driver))
		allocate_and_stay(&driver, goal());
}

/* Not an attack: for each line of input, allocates that many MiB more, and prints how many it got. */
static void on_demand(void)
{
	struct driver driver;
	char line[64];
	if (find_default(&driver) || start(&driver))
		skip("no driver");
	while (fgets(line, sizeof line, stdin)) {
		printf("held %ld\n", take(&driver, atol(line)));
		fflush(stdout);
	}
	exit(0);
}

/* Four children, each of which wants half of the goal. */
static void after_fork(void)
{
	struct driver driver;
	int ends[2];
	long sum = 0, one;
	if (pipe(ends))
		skip("no pipe");
	for (int child = 0; child < 4; child++) {
		if (fork())
			continue;
		if (find_default(&driver) || start(&driver))
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
	report_held(sum);
}

/* A child of a process with a context and memory. CUDA refuses the child, but the child may try. */
static void fork_of_a_user(void)
{
	struct driver driver;
	if (find_default(&driver) || start(&driver))
		report_held(0);
	long sum = take(&driver, goal() / 2), one = 0;
	int ends[2];
	if (pipe(ends))
		skip("no pipe");
	if (!fork()) {
		one = start(&driver) ? 0 : take(&driver, goal());
		if (write(ends[1], &one, sizeof one) != sizeof one)
			_exit(1);
		for (;;)
			pause();
	}
	if (read(ends[0], &one, sizeof one) != sizeof one)
		one = 0;
	report_held(sum + one);
}

/* Fills the share, then calls exec. The new image holds nothing and tries again, beside a child that does
 * the same. */
static void after_exec(void)
{
	struct driver driver;
	if (!find_default(&driver) && !start(&driver))
		take(&driver, goal());
	if (!fork())
		restart_as("plain-quiet", environ);
	restart_as("plain", environ);
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
	if (!find_in(&driver, arguments.library))
		allocate_and_stay(&driver, goal());
}

static void linker_name(void)
{
	struct driver driver;
	if (!find_in(&driver, "libcuda.so"))
		allocate_and_stay(&driver, goal());
}

/* With `injection: shim`, the real driver must be in this directory. */
#define REAL "/run/divvy/lib/real"

static void real_path(void)
{
	struct driver driver;
	if (!find_in(&driver, REAL "/libcuda.so.1"))
		allocate_and_stay(&driver, goal());
}

/* Starts with the shim, and continues with the real driver. */
static void real_path_beside(void)
{
	struct driver driver, real;
	if (find_default(&driver) || find_in(&real, REAL "/libcuda.so.1"))
		report_held(0);
	int code = start(&driver);
	report_held(code ? 0 : take(&real, goal()));
}

static void real_directory(void)
{
	setenv("LD_LIBRARY_PATH", REAL, 1);
	restart_as("plain", environ);
}

static void new_namespace(void)
{
	struct driver driver;
	void *handle = dlmopen(LM_ID_NEWLM, arguments.library, RTLD_NOW);
	if (!handle)
		skip(dlerror());
	if (!find_all(&driver, (find_function *)dlsym, handle))
		allocate_and_stay(&driver, goal());
}

static void deep_bind(void)
{
	struct driver driver;
	void *handle = dlopen(arguments.library, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
	if (!handle)
		skip(dlerror());
	if (!find_all(&driver, (find_function *)dlsym, handle))
		allocate_and_stay(&driver, goal());
}

/* A library that is linked to the driver gets its functions from the loader, without dlsym. */
static void linked(void *handle)
{
	if (!handle)
		skip(dlerror());
	int (*begin)(void) = (int (*)(void))dlsym(handle, "user_start");
	long (*get)(long) = (long (*)(long))dlsym(handle, "user_take");
	if (!begin || !get)
		skip(dlerror());
	report_held(begin() ? 0 : get(goal()));
}

static void deep_bind_linked(void) { linked(dlopen(sibling_path("libuser.so"), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND)); }
static void new_namespace_linked(void) { linked(dlmopen(LM_ID_NEWLM, sibling_path("libuser.so"), RTLD_NOW)); }

/* dlvsym does not find symbols without a version: the attack needs a driver with symbol versions. */
static void *versioned(void *handle, const char *name) { return dlvsym(handle, name, "libcuda.so.1"); }

static void by_version(void)
{
	struct driver driver;
	void *handle = dlopen("libcuda.so.1", RTLD_NOW);
	if (!handle)
		skip(dlerror());
	if (find_all(&driver, versioned, handle))
		skip("the driver has no symbol versions");
	allocate_and_stay(&driver, goal());
}

/* libc's own dlsym, by its symbol version. No preloaded library defines that version. */
static void by_libc(void)
{
	struct driver driver;
	void *libc = dlopen("libc.so.6", RTLD_NOW | RTLD_LOCAL), *handle = dlopen("libcuda.so.1", RTLD_NOW);
	find_function *find = libc ? (find_function *)dlvsym(libc, "dlsym", "GLIBC_2.34") : NULL;
	if (!find && libc)
		find = (find_function *)dlvsym(libc, "dlsym", "GLIBC_2.17");
	if (!find || !handle)
		skip("this libc has no such version of dlsym");
	if (!find_all(&driver, find, handle))
		allocate_and_stay(&driver, goal());
}

/* The driver's own lookup, which takes the name without the version suffix. */
static void *get_proc_address(void *get, const char *name)
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

static void by_get_proc_address(void)
{
	struct driver driver;
	void *handle = dlopen("libcuda.so.1", RTLD_NOW);
	if (!handle)
		skip(dlerror());
	void *get = dlsym(handle, "cuGetProcAddress_v2");
	/* Looks up the lookup function itself too: the result may be another function. */
	void *again = get ? get_proc_address(get, "cuGetProcAddress") : NULL;
	if (!again)
		skip("the driver has no cuGetProcAddress");
	if (!find_all(&driver, get_proc_address, again))
		allocate_and_stay(&driver, goal());
}

static void preload_unset(void)
{
	unsetenv("LD_PRELOAD");
	restart_as("plain", environ);
}

static void preload_replaced(void)
{
	setenv("LD_PRELOAD", "libm.so.6", 1);
	restart_as("plain", environ);
}

static void environment_cleared(void)
{
	char *nothing[] = { NULL };
	restart_as("plain", nothing);
}

const struct attack loader_attacks[] = {
	{ "plain", plain },
	{ "plain-quiet", plain_quiet },
	{ "on-demand", on_demand },
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
	{ "cugetprocaddress", by_get_proc_address },
	{ "preload-unset", preload_unset },
	{ "preload-replaced", preload_replaced },
	{ "environment-cleared", environment_cleared },
	{ NULL, NULL },
};
