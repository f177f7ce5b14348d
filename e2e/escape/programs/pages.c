/* Attacks on the pages of a share: its limits and its accounting. Offsets are those of api/pages, layout
 * 1. */
#define _GNU_SOURCE
#include "pages.h"
#include "driver.h"
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { PACED = 68, STAMP = 72, QUANTUM = 112, ENDS = 144, EXPIRES = 152, FIRST = 1024, SECOND = 2048, LENGTH = 8, CHECKSUM = 12, LIMIT = 216, PHYSICAL = 240, CORES = 256 };
enum { TOTAL = 64, BALANCE = 128, SLOTS = 4096, SLOT = 256, OWNER = 0, HELD = 8, MANAGED = 48, CHARGED = 64, WAITED = 72 };

static uint64_t word(const unsigned char *at)
{
	uint64_t value;
	memcpy(&value, at, 8);
	return value;
}

static void put(unsigned char *at, uint64_t value) { memcpy(at, &value, 8); }

static uint32_t crc32c(const unsigned char *record, uint32_t length)
{
	uint32_t sum = ~0u;
	for (uint32_t i = 0; i < length; i++) {
		if (i >= CHECKSUM && i < CHECKSUM + 4)
			continue;
		sum ^= record[i];
		for (int bit = 0; bit < 8; bit++)
			sum = sum >> 1 ^ (0x82f63b78u & -(sum & 1));
	}
	return ~sum;
}

void raise_limits(unsigned char *page)
{
	static const int copies[] = { FIRST, SECOND };
	for (int i = 0; i < 2; i++) {
		unsigned char *record = page + copies[i];
		uint32_t length;
		memcpy(&length, record + LENGTH, 4);
		if (!word(record) || length > 1024)
			continue;
		put(record + LIMIT, (uint64_t)1 << 43);
		put(record + PHYSICAL, (uint64_t)1 << 43);
		/* No ceiling, either. */
		put(record + CORES, 0);
		uint32_t sum = crc32c(record, length);
		memcpy(record + CHECKSUM, &sum, 4);
	}
	memset(page + PACED, 0, 4);
	put(page + STAMP, word(page + STAMP) + 1);
}

void grant_for_ever(unsigned char *page)
{
	uint32_t number = 1000000000;
	memcpy(page + QUANTUM, &number, 4);
	put(page + ENDS, (uint64_t)1 << 62);
	put(page + EXPIRES, (uint64_t)1 << 62);
}

const char *page_file(const char *name)
{
	static char path[4096];
	char pattern[64];
	glob_t found;
	snprintf(pattern, sizeof pattern, "/run/divvy/*/*/%s", name);
	if (glob(pattern, 0, NULL, &found) || !found.gl_pathc)
		return NULL;
	snprintf(path, sizeof path, "%s", found.gl_pathv[0]);
	globfree(&found);
	return path;
}

int page_mapped(const char *name, unsigned char **address)
{
	char line[4352], end[64];
	FILE *maps = fopen("/proc/self/maps", "r");
	snprintf(end, sizeof end, "/%s\n", name);
	int count = 0;
	while (maps && fgets(line, sizeof line, maps)) {
		size_t length = strlen(line), tail = strlen(end);
		if (length > tail && strstr(line, "/run/divvy/") && !strcmp(line + length - tail, end) && count < 16)
			address[count++] = (unsigned char *)strtoull(line, NULL, 16);
	}
	if (maps)
		fclose(maps);
	return count;
}

/* Starts CUDA, so that the pages are mapped. Returns the MiB that it holds. */
static long begin(struct driver *driver)
{
	if (find_default(driver) || start(driver))
		report_held(0);
	return take(driver, 16);
}

static void write_the_file(void)
{
	const char *path = page_file("policy");
	unsigned char page[4096];
	if (path) {
		int file = open(path, O_RDONLY);
		if (file < 0 || read(file, page, sizeof page) != sizeof page)
			skip("the policy page cannot be read");
		raise_limits(page);
		close(file);
		if (chmod(path, 0666))
			report_refused("chmod");
		if (chown(path, getuid(), getgid()))
			report_refused("chown");
		if ((file = open(path, O_WRONLY)) < 0)
			report_refused("open to write");
		else if (write(file, page, sizeof page) != sizeof page)
			report_refused("write");
		if ((file = open(path, O_WRONLY | O_TRUNC)) < 0)
			report_refused("truncate");
		char aside[4200];
		snprintf(aside, sizeof aside, "%s.old", path);
		if (rename(path, aside))
			report_refused("rename");
		if (unlink(path))
			report_refused("unlink");
	}
	restart_as("plain", environ);
}

static void remount(void)
{
	const char *path = page_file("policy");
	if (path) {
		if (mount(NULL, path, NULL, MS_REMOUNT | MS_BIND, NULL))
			report_refused("remount to write");
		if (umount2(path, MNT_DETACH))
			report_refused("umount");
	}
	if (mount("none", "/run", "tmpfs", 0, NULL))
		report_refused("mount over /run");
	if (mount("/dev/null", "/etc/ld.so.preload", NULL, MS_BIND, NULL))
		report_refused("mount over /etc/ld.so.preload");
	if (unlink("/etc/ld.so.preload"))
		report_refused("unlink /etc/ld.so.preload");
	if (truncate("/etc/ld.so.preload", 0))
		report_refused("truncate /etc/ld.so.preload");
	write_the_file();
}

/* The container's own root may rename the directories above the mounts. */
static void move_run(void)
{
	if (rename("/run/divvy", "/run/elsewhere"))
		report_refused("rename /run/divvy");
	restart_as("plain", environ);
}

static void move_etc(void)
{
	if (rename("/etc", "/elsewhere"))
		report_refused("rename /etc");
	/* Without the loader's cache in /etc, the loader finds no library by its SONAME. */
	restart_as("absolute-path", environ);
}

/* A directory without permissions is closed to a root without capabilities, and so to its loader. */
static void close_run(void)
{
	if (page_file("policy") && chmod("/run/divvy", 0))
		report_refused("chmod /run/divvy");
	for (int capability = 0; capability < 64; capability++)
		prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
	restart_as("plain", environ);
}

/* Copies the page and raises the limits in the copy. */
static void raised(const unsigned char *mapped, unsigned char *page)
{
	memcpy(page, mapped, 4096);
	raise_limits(page);
}

static void own_memory_file(void)
{
	struct driver driver;
	unsigned char *mapped[16], page[4096];
	long mib = begin(&driver);
	int memory = open("/proc/self/mem", O_RDWR);
	for (int i = page_mapped("policy", mapped); i-- > 0;) {
		raised(mapped[i], page);
		if (memory < 0 || pwrite(memory, page, sizeof page, (off_t)(uintptr_t)mapped[i]) != sizeof page)
			report_refused("write to /proc/self/mem");
		struct iovec from = { page, sizeof page }, to = { mapped[i], sizeof page };
		if (process_vm_writev(getpid(), &from, 1, &to, 1, 0) != sizeof page)
			report_refused("process_vm_writev");
	}
	report_held(mib + take(&driver, goal() - mib));
}

static void trace_itself(void)
{
	struct driver driver;
	unsigned char *mapped[16], page[4096];
	long mib = begin(&driver);
	int count = page_mapped("policy", mapped), status;
	pid_t self = getpid();
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	pid_t child = fork();
	if (!child) {
		if (ptrace(PTRACE_ATTACH, self, NULL, NULL) || waitpid(self, &status, 0) < 0) {
			report_refused("ptrace");
			_exit(1);
		}
		for (int i = 0; i < count; i++) {
			raised(mapped[i], page);
			for (int at = 0; at < 4096; at += 8)
				if (ptrace(PTRACE_POKEDATA, self, mapped[i] + at, word(page + at))) {
					report_refused("POKEDATA");
					break;
				}
		}
		ptrace(PTRACE_DETACH, self, NULL, NULL);
		_exit(0);
	}
	waitpid(child, &status, 0);
	report_held(mib + take(&driver, goal() - mib));
}

static sigjmp_buf before;
static void jump(int signal) { siglongjmp(before, signal); }

static void make_writable(void)
{
	struct driver driver;
	unsigned char *mapped[16], page[4096];
	long mib = begin(&driver);
	struct sigaction action = { .sa_handler = jump };
	sigaction(SIGSEGV, &action, NULL);
	for (int i = page_mapped("policy", mapped); i-- > 0;) {
		raised(mapped[i], page);
		if (mprotect(mapped[i], 4096, PROT_READ | PROT_WRITE))
			report_refused("mprotect");
		if (sigsetjmp(before, 1))
			report_refused("a store");
		else
			memcpy(mapped[i], page, sizeof page);
	}
	report_held(mib + take(&driver, goal() - mib));
}

static void map_over(void)
{
	struct driver driver;
	unsigned char *mapped[16], page[4096];
	long mib = begin(&driver);
	for (int i = page_mapped("policy", mapped); i-- > 0;) {
		raised(mapped[i], page);
		void *over = mmap(mapped[i], 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		if (over == MAP_FAILED)
			report_refused("mmap over the policy page");
		else
			memcpy(over, page, sizeof page);
	}
	report_held(mib + take(&driver, goal() - mib));
}

unsigned char *account_page(void)
{
	const char *path = page_file("account");
	if (!path)
		return NULL;
	int file = open(path, O_RDWR);
	void *account = mmap(NULL, SLOTS + 1024 * SLOT, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (account == MAP_FAILED)
		skip("the account page cannot be mapped");
	return account;
}

/* Allocates, changes the account page, and allocates again, until the goal is reached or nothing more is
 * granted. */
static void forge(void (*change)(unsigned char *account))
{
	struct driver driver;
	long mib = begin(&driver), more;
	unsigned char *account = account_page();
	do {
		more = take(&driver, goal() - mib);
		mib += more;
		if (account)
			change(account);
	} while (mib < goal() && more > 0);
	report_held(mib);
}

static void each_slot(unsigned char *account, void (*change)(unsigned char *slot))
{
	for (int i = 0; i < 1024; i++)
		if (word(account + SLOTS + i * SLOT + OWNER) >> 48 == 2)
			change(account + SLOTS + i * SLOT);
}

static void forget(unsigned char *slot) { put(slot + HELD, 0); }

static void zero(unsigned char *account)
{
	put(account + TOTAL, 0);
	each_slot(account, forget);
}

/* Marks all held memory as managed. */
static void all_moves(unsigned char *slot) { put(slot + MANAGED, word(slot + HELD) & (((uint64_t)1 << 44) - 1)); }

/* Marks it before each block, so that no block counts as the claim's own memory. */
static void manage(void)
{
	struct driver driver;
	long mib = begin(&driver), more = 1;
	unsigned char *account = account_page();
	for (; mib < goal() && more > 0; mib += more) {
		if (account)
			each_slot(account, all_moves);
		more = take(&driver, 16);
	}
	report_held(mib);
}

/* As if the slot's owner were another process that holds nothing: pid 1, which lives as long as the
 * container. */
static void to_another(unsigned char *slot)
{
	put(slot + OWNER, (word(slot + OWNER) & ~0xffffffffull) | 1);
	forget(slot);
}

static void steal(unsigned char *account)
{
	put(account + TOTAL, 0);
	each_slot(account, to_another);
}

static void older(unsigned char *slot)
{
	put(slot + OWNER, word(slot + OWNER) + ((uint64_t)1 << 32));
	forget(slot);
}

static void bump(unsigned char *account)
{
	put(account + TOTAL, 0);
	each_slot(account, older);
}

static void rich(unsigned char *account) { put(account + BALANCE, INT64_MAX); }

/* Less than the balance that alone proves a forgery. */
void have_time(unsigned char *account) { put(account + BALANCE, 900000000); }

static void waited(unsigned char *slot) { put(slot + WAITED, word(slot + WAITED) + 1000000); }
void have_waited(unsigned char *account) { each_slot(account, waited); }

static void charged_nothing(unsigned char *slot)
{
	waited(slot);
	put(slot + CHARGED, 0);
}

void have_charged_nothing(unsigned char *account) { each_slot(account, charged_nothing); }

static void used_zeroed(void) { forge(zero); }
static void balance_raised(void) { forge(rich); }
static void slot_stolen(void) { forge(steal); }
static void generation_bumped(void) { forge(bump); }

const struct attack page_attacks[] = {
	{ "policy-file", write_the_file },
	{ "policy-remount", remount },
	{ "run-moved", move_run },
	{ "etc-moved", move_etc },
	{ "pages-closed", close_run },
	{ "policy-proc-mem", own_memory_file },
	{ "policy-ptrace", trace_itself },
	{ "policy-mprotect", make_writable },
	{ "policy-mapped-over", map_over },
	{ "account-managed", manage },
	{ "account-zeroed", used_zeroed },
	{ "account-balance", balance_raised },
	{ "account-slot-stolen", slot_stolen },
	{ "account-generation", generation_bumped },
	{ NULL, NULL },
};
