/* bench [turns] launch N | info N | alloc LIVE lifo|fifo|random[-back-to-back] N | init N TIMES |
 *       race ROUNDS SEED | kills N SEED | hold MIB
 *
 * A CUDA program that measures itself. It finds the driver by dlopen and dlsym, as an application does,
 * and prints figures as `name value`; times are in nanoseconds. It is not aware of shares. With `turns` it
 * measures the cost of N calls once per byte of its input. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "measure.h"

/* An empty kernel; it takes a nanosecond on the simulated GPU, as its name says. */
static const char PTX[] = PTX_HEAD ".visible .entry nothing_1ns()\n{\n ret;\n}\n";

static void launch(long calls)
{
	handle module, nothing;
	open_gpu();
	must(cuModuleLoadData(&module, PTX));
	must(cuModuleGetFunction(&nothing, module, "nothing_1ns"));
	launch_figures(nothing, calls);
}

static void infos(void)
{
	size_t free, total;
	for (int call = 0; call < BATCH; call++)
		must(cuMemGetInfo_v2(&free, &total));
}

static void info(long calls)
{
	open_gpu();
	figures("info", infos, NULL, calls);
}

/* Live allocations, and which of them is freed next: the newest (l), the oldest (f) or a random one (r). */
static address *ring;
static long live, next;
static char order;
/* Whether the processor completes a call before the next one begins. */
static int apart;
static const size_t SIZE = 4096;

static long least(long a, long b) { return a < b ? a : b; }

static void allocs(void)
{
	/* In random order, the allocations to free are drawn between batches to the front of the ring. */
	long end = order == 'f' ? live : least(live, BATCH);
	for (int call = 0; call < BATCH; call++) {
		address made;
		if (apart)
			finish();
		must(cuMemAlloc_v2(&made, SIZE));
		if (apart)
			finish();
		/* The new allocation takes the place of the freed one. */
		if (live && order != 'l') {
			address freed = ring[next];
			ring[next] = made, made = freed;
			next = next + 1 == end ? 0 : next + 1;
		}
		must(cuMemFree_v2(made));
	}
}

/* Draws the allocations that the next batch frees. Outside of the measurement, because the lookup in this
 * ring would overlap with the driver's own memory accesses if calls follow each other directly, but not
 * otherwise. */
static void draw(void)
{
	if (order != 'r')
		return;
	next = 0;
	for (long i = 0; i < least(live, BATCH); i++) {
		long any = i + (long)chance(live - i);
		address drawn = ring[any];
		ring[any] = ring[i], ring[i] = drawn;
	}
}

static void alloc(long count, const char *name, long calls)
{
	live = count, order = *name, apart = !strstr(name, "back-to-back");
	open_gpu();
	ring = calloc(live + 1, sizeof *ring);
	for (long i = 0; i < live; i++)
		must(cuMemAlloc_v2(&ring[i], SIZE));
	draw();
	figures("alloc", allocs, draw, calls);
}

/* Measures the start of CUDA in many processes at once, from a loaded library to a known amount of GPU
 * memory. The results stay in shared memory until all are done: reading them earlier would take processor
 * time from processes that still measure. */
struct took {
	_Atomic int done;
	uint64_t cpu, wall;
};

static void init_one(int gate, int memory, int number, int count)
{
	int device;
	size_t total;
	char byte;
	find_functions();
	struct took *took = mmap(NULL, count * sizeof *took, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	/* Ready. All processes begin when the other end of the gate is closed. */
	if (took == MAP_FAILED || write(STDOUT_FILENO, "r", 1) != 1 || read(gate, &byte, 1) != 0)
		_exit(1);
	uint64_t cpu = clock_of(CLOCK_PROCESS_CPUTIME_ID), wall = now();
	must(cuInit(0));
	must(cuDeviceGet(&device, 0));
	must(cuDeviceTotalMem_v2(&total, device));
	cpu = clock_of(CLOCK_PROCESS_CPUTIME_ID) - cpu, wall = now() - wall;
	took[number].cpu = cpu, took[number].wall = wall;
	if (++took->done == count && write(STDOUT_FILENO, "d", 1) != 1)
		_exit(1);
	_exit(0);
}

static void all_of(int file, void *buffer, size_t size)
{
	for (size_t got = 0; got < size;) {
		ssize_t more = read(file, (char *)buffer + got, size - got);
		if (more <= 0)
			fail("a process has ended early", 0);
		got += more;
	}
}

static void init(int count)
{
	int gate[2], results[2];
	char words[4][16], byte;
	int memory = memfd_create("took", 0);
	if (pipe(gate) || pipe(results) || memory < 0 || ftruncate(memory, count * sizeof(struct took)))
		fail("pipe", 0);
	struct took *took = mmap(NULL, count * sizeof *took, PROT_READ, MAP_SHARED, memory, 0);
	if (took == MAP_FAILED)
		fail("mmap", 0);
	for (int i = 0; i < count; i++) {
		if (fork())
			continue;
		dup2(results[1], STDOUT_FILENO);
		close(results[0]), close(results[1]), close(gate[1]);
		int numbers[] = { gate[0], memory, i, count };
		for (int word = 0; word < 4; word++)
			snprintf(words[word], sizeof *words, "%d", numbers[word]);
		execl("/proc/self/exe", "bench", "init-one", words[0], words[1], words[2], words[3], NULL);
		_exit(1);
	}
	close(results[1]), close(memory);
	for (int i = 0; i < count; i++)
		all_of(results[0], &byte, 1);
	close(gate[0]), close(gate[1]);
	/* The last process writes this byte. */
	all_of(results[0], &byte, 1);
	for (int i = 0; i < count; i++)
		printf("cpu %llu\nwall %llu\n", (unsigned long long)took[i].cpu, (unsigned long long)took[i].wall);
	munmap(took, count * sizeof *took), close(results[0]);
	while (wait(NULL) > 0)
		;
}

/* Shared memory of the processes of one run. */
static struct table {
	_Atomic int arrived, round;
	_Atomic uint64_t want[2], got[2];
	_Atomic int alive, go;
	_Atomic uint64_t slowest;
} *table;

static void share_table(void)
{
	table = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (table == MAP_FAILED)
		fail("mmap", 0);
}

static void meet(int count)
{
	int round = table->round;
	if (++table->arrived == count) {
		table->arrived = 0;
		table->round++;
		return;
	}
	while (table->round == round)
		sched_yield();
}

/* Two processes ask for the remaining memory at the same moment. */
static void race(long rounds, uint64_t seed)
{
	long neither = 0, both = 0, missed = 0;
	share_table();
	state = seed | 1;
	pid_t parent = getpid();
	int which = fork() ? 0 : 1;
	open_gpu();
	meet(2);
	size_t left, total;
	must(cuMemGetInfo_v2(&left, &total));
	left -= left % (2 * MIB);
	for (long round = 0; round < rounds; round++) {
		/* Either each allocation fits alone but not both, or both fit. */
		int apart = round % 4 != 0;
		if (!which)
			for (int i = 0; i < 2; i++)
				table->want[i] = apart ? left - chance(4) * 2 * MIB : (left / 2 - chance(4) * 2 * MIB) & ~(2 * MIB - 1);
		meet(2);
		address made = 0;
		int code = cuda.cuMemAlloc_v2(&made, table->want[which]);
		if (code != 0 && code != 2)
			fail("cuMemAlloc", code);
		table->got[which] = code ? 0 : table->want[which];
		meet(2);
		if (!which) {
			int fits = (table->got[0] > 0) + (table->got[1] > 0);
			if (table->got[0] + table->got[1] > left)
				both++;
			if (apart && fits == 0)
				neither++;
			if (!apart && fits < 2)
				missed++;
		}
		if (made)
			must(cuMemFree_v2(made));
		meet(2);
	}
	if (getpid() != parent)
		_exit(0);
	printf("above %ld\nneither %ld\nmissed %ld\n", both, neither, missed);
}

/* Allocates and frees blocks of all sizes until it is killed. */
static void churn(void)
{
	address held[64] = { 0 };
	open_gpu();
	table->alive = 1;
	for (;;) {
		unsigned at = chance(64);
		if (held[at]) {
			must(cuMemFree_v2(held[at]));
			held[at] = 0;
		} else if (cuda.cuMemAlloc_v2(&held[at], (chance(32) + 1) * 2 * MIB)) {
			held[at] = 0;
		}
	}
}

static void await(_Atomic int *word, int value)
{
	while (*word != value)
		usleep(50);
}

/* Waits for the start of a child, with a timeout because it may fail. */
static void await_start(void)
{
	uint64_t begin = now();
	while (!table->alive) {
		usleep(50);
		if (now() - begin > 20000000000ull)
			fail("a process does not start", 0);
	}
}

/* On each request, waits until all memory that was free at the start can be allocated at once, and reports
 * how long that took. */
static void prober(int results)
{
	size_t left, total;
	open_gpu();
	must(cuMemGetInfo_v2(&left, &total));
	left -= left % (2 * MIB);
	table->alive = 1;
	for (;;) {
		await(&table->go, 1);
		uint64_t begin = now(), took, call;
		address made;
		int code;
		do {
			call = now();
			code = cuda.cuMemAlloc_v2(&made, left);
			if (now() - call > table->slowest)
				table->slowest = now() - call;
			took = now() - begin;
			if (code)
				usleep(200);
		} while (code && took < 10000000000ull);
		if (!code)
			must(cuMemFree_v2(made));
		table->go = 0;
		if (write(results, &took, sizeof took) != sizeof took)
			_exit(1);
	}
}

static void kills(long count, uint64_t seed)
{
	int results[2];
	uint64_t took, worst = 0, late = 0;
	share_table();
	if (pipe(results))
		fail("pipe", 0);
	pid_t probe = fork();
	if (!probe)
		prober(results[1]);
	await_start();
	state = seed | 1;
	for (long i = 0; i < count; i++) {
		table->alive = 0;
		uint64_t next = chance(~0ull);
		pid_t child = fork();
		if (!child) {
			state = next | 1;
			churn();
		}
		/* Most children are killed while they allocate, some while they start. */
		if (chance(8))
			await_start();
		usleep(chance(2000));
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
		table->go = 1;
		all_of(results[0], &took, sizeof took);
		worst = took > worst ? took : worst;
		late += took > 2000000000ull;
	}
	kill(probe, SIGKILL);
	printf("worst %llu\nslowest %llu\nlate %llu\n", (unsigned long long)worst, (unsigned long long)table->slowest,
		(unsigned long long)late);
}

/* Allocates the memory as soon as it is free, and holds it. Prints the time of that, and whether it must
 * wait. */
static void hold(long mib)
{
	int waits = 0;
	address made;
	open_gpu();
	uint64_t begin = now();
	while (cuda.cuMemAlloc_v2(&made, mib * MIB)) {
		if (!waits++)
			printf("waiting 0\n"), fflush(stdout);
		if (now() - begin > 30000000000ull)
			fail("nothing is freed", 0);
		usleep(500);
	}
	printf("held %llu\n", (unsigned long long)now());
	fflush(stdout);
	for (;;)
		pause();
}

int main(int count, char **words)
{
	take_turns(&count, &words);
	const char *mode = count > 1 ? words[1] : "";
	long number = count > 2 ? atol(words[2]) : 0;
	if (!strcmp(mode, "launch"))
		launch(number);
	else if (!strcmp(mode, "info"))
		info(number);
	else if (!strcmp(mode, "alloc") && count == 5)
		alloc(number, words[3], atol(words[4]));
	else if (!strcmp(mode, "init-one") && count == 6)
		init_one(number, atoi(words[3]), atoi(words[4]), atoi(words[5]));
	else if (!strcmp(mode, "init") && count == 4)
		for (long times = atol(words[3]); times > 0; times--)
			init(number);
	else if (!strcmp(mode, "race") && count == 4)
		race(number, strtoull(words[3], NULL, 10));
	else if (!strcmp(mode, "hold"))
		hold(number);
	else if (!strcmp(mode, "kills") && count == 4)
		kills(number, strtoull(words[3], NULL, 10));
	else {
		fprintf(stderr, "usage: bench [turns] launch N | info N | alloc LIVE ORDER N | init N TIMES | race ROUNDS SEED | kills N SEED | hold MIB\n");
		return 2;
	}
	return 0;
}
