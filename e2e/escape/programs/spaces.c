/* Attacks by the program's own namespaces, where the kernel allows them, and cgroups. */
#define _GNU_SOURCE
#include "driver.h"
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void map_root(int uid, int gid)
{
	char line[64];
	const struct {
		const char *file;
		int id;
	} maps[] = { { "/proc/self/uid_map", uid }, { "/proc/self/gid_map", gid } };
	int groups = open("/proc/self/setgroups", O_WRONLY);
	if (groups < 0 || write(groups, "deny", 4) != 4)
		report_refused("setgroups");
	for (int i = 0; i < 2; i++) {
		int file = open(maps[i].file, O_WRONLY);
		int length = snprintf(line, sizeof line, "0 %d 1", maps[i].id);
		if (file < 0 || write(file, line, length) != length)
			report_refused(maps[i].file);
	}
}

/* Root of a user namespace may mount over the pages and over the loader's files. */
static void user(void)
{
	int uid = getuid(), gid = getgid();
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
		skip("the kernel allows no user namespaces here");
	map_root(uid, gid);
	if (mount("none", "/run", "tmpfs", 0, NULL))
		report_refused("mount over /run");
	if (access("/etc/ld.so.preload", F_OK) == 0 && mount("/dev/null", "/etc/ld.so.preload", NULL, MS_BIND, NULL))
		report_refused("mount over /etc/ld.so.preload");
	restart_as("plain", environ);
}

/* A process whose pid is not valid in the container, with its own copy of the driver. */
static void pid(void)
{
	int uid = getuid(), gid = getgid(), status;
	if (unshare(CLONE_NEWUSER | CLONE_NEWPID))
		skip("the kernel allows no user namespaces here");
	map_root(uid, gid);
	pid_t child = fork();
	if (!child)
		restart_as("own-libcuda", environ);
	waitpid(child, &status, 0);
	_exit(0);
}

/* Moves to the root of each cgroup hierarchy, where it may write there. */
static void leave(void)
{
	char line[8192], path[4096];
	FILE *mounts = fopen("/proc/self/mounts", "r");
	while (mounts && fgets(line, sizeof line, mounts)) {
		if (sscanf(line, "%*s %4000s", path) != 1 || !strstr(line, " cgroup"))
			continue;
		strcat(path, "/cgroup.procs");
		int file = open(path, O_WRONLY);
		if (file < 0 || write(file, "0", 1) != 1)
			report_refused(path);
	}
	restart_as("own-libcuda", environ);
}

const struct attack space_attacks[] = {
	{ "cgroup-left", leave },
	{ "user-namespace", user },
	{ "pid-namespace", pid },
	{ NULL, NULL },
};
