/* compute run SHAPE BEFORE WINDOW [ROUNDS] | compute rounds | compute [turns] launch N
 *
 * A tenant that demands all of a GPU's time: it launches kernels of one shape without a pause and prints
 * the result. SHAPE is a name in `shapes`, or `spin:NS` for kernels of NS nanoseconds. Some shapes demand
 * less: they pause, never launch, or start processes that exit at once. `run` prints "ready", begins when its standard input ends or delivers a byte, and measures
 * from BEFORE to BEFORE + WINDOW milliseconds later. `launch` measures the launch of an empty kernel.
 * Figures are printed as `name value`, times in nanoseconds. It is not aware of shares, and runs on any
 * GPU.
 *
 * By default, kernels run for a time on the GPU's clock. With ROUNDS (loop rounds per microsecond) each
 * kernel does a fixed amount of work instead, so the number of launches gives the tenant's part of the
 * GPU's work. `rounds` measures ROUNDS on a GPU that is otherwise idle. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "measure.h"

/* Kernels that run for the time in their parameter, or for that amount of work, and an empty one. */
static const char PTX[] = PTX_HEAD PTX_SPIN("spin") PTX_SPIN("spin_long") PTX_COUNT("spin_count")
	PTX_COUNT("spin_count_long") PTX_MEET("meet") ".visible .entry nothing_1ns()\n{\n ret;\n}\n";

static handle spin, spin_long, nothing, streams[4], graph;
static int multiprocessors;
/* Rounds per microsecond; 0 for kernels that watch the clock. */
static uint64_t rounds;

static void start(void)
{
	handle module;
	int device = open_gpu();
	/* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
	must(cuDeviceGetAttribute(&multiprocessors, 16, device));
	must(cuModuleLoadData(&module, PTX));
	must(cuModuleGetFunction(&spin, module, rounds ? "spin_count" : "spin"));
	must(cuModuleGetFunction(&spin_long, module, rounds ? "spin_count_long" : "spin_long"));
	must(cuModuleGetFunction(&nothing, module, "nothing_1ns"));
}

/* The parameter of a kernel that runs for `length` nanoseconds. */
static uint64_t parameter(uint64_t length) { return rounds ? length * rounds / US : length; }
static void busy(handle function, unsigned blocks, uint64_t length, handle stream)
{
	launch_spin(function, blocks, parameter(length), stream);
}

/* The shapes: each function makes launch number `at`. */
static void wave(uint64_t at) { (void)at, busy(spin, 132, 20 * US, NULL); }
static void short_(uint64_t at) { (void)at, busy(spin, 1000, 100 * US, NULL); }
static void plain(uint64_t at) { (void)at, busy(spin, 1000, MS, NULL); }
static void narrow(uint64_t at) { busy(spin, 20, MS, streams[at % 4]); }
static void long_(uint64_t at) { (void)at, busy(spin, 1000, 5 * MS, NULL); }
static void mixed(uint64_t at)
{
	if (at % 2)
		busy(spin_long, 1000, 10 * MS, NULL);
	else
		busy(spin, 1000, 10 * US, NULL);
}
static void jitter(uint64_t at) { (void)at, busy(spin, 1000, MS / 5 * 4 + chance(MS / 5 * 2), NULL); }
static void of_graph(uint64_t at) { (void)at, ({ must(cuGraphLaunch(graph, streams[0])); }); }
static void cooperative(uint64_t at)
{
	uint64_t length = parameter(MS);
	void *parameters[] = { &length };
	(void)at;
	must(cuLaunchCooperativeKernel(spin, multiprocessors, 1, 1, 128, 1, 1, 0, NULL, parameters));
}

/* Kernels of the length in the name of the shape. */
static uint64_t spin_length;
static void spin_of_length(uint64_t at) { (void)at, busy(spin, 1000, spin_length, NULL); }

static void pause_for(uint64_t length)
{
	struct timespec pause = { length / (1000 * MS), (long)(length % (1000 * MS)) };
	nanosleep(&pause, NULL);
}

/* About every 50 ms, a few kernels of a millisecond; records how long each of these bursts takes. */
static double latencies[4096];
static size_t bursts;
static void burst_of(int kernels, uint64_t at)
{
	uint64_t begin = now();
	for (int i = 0; i < kernels; i++)
		plain(at);
	must(cuCtxSynchronize());
	latencies[bursts++ % 4096] = (double)(now() - begin);
	pause_for(40 * MS + chance(10 * MS));
}
static void burst(uint64_t at) { burst_of(5, at); }
static void single(uint64_t at) { burst_of(1, at); }

static void idle(uint64_t at) { (void)at, pause_for(10 * MS); }

/* One kernel that never ends: it runs for 146 years. */
static void endless(uint64_t at)
{
	if (!at)
		busy(spin, 1000, 1ull << 62, NULL);
	pause_for(10 * MS);
}

/* A process that launches up to six kernels of a millisecond and exits, in half of the cases with work
 * in flight. Its parent does not use the GPU. */
static void churn(uint64_t at)
{
	pid_t child = fork();
	if (child < 0)
		fail("fork", 0);
	if (child) {
		waitpid(child, NULL, 0);
		return;
	}
	state += at * 0x9e3779b97f4a7c15ull;
	start();
	for (uint64_t kernels = 1 + chance(6); kernels; kernels--)
		plain(at);
	if (chance(2))
		must(cuCtxSynchronize());
	else
		pause_for(chance(3 * MS));
	_exit(0);
}

/* Kernels on two GPUs that wait for each other and then run for a millisecond. */
static handle contexts[2], meets[2];
static uint64_t *rounds_met;
static void make_pair(void)
{
	handle module;
	void *memory;
	for (int i = 0; i < 2; i++) {
		contexts[i] = open_gpu_at(i);
		must(cuModuleLoadData(&module, PTX));
		must(cuModuleGetFunction(&meets[i], module, "meet"));
	}
	/* CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP */
	must(cuMemHostAlloc(&memory, 4096, 3));
	rounds_met = memory;
}
static void pair(uint64_t at)
{
	for (int i = 0; i < 2; i++) {
		uint64_t round = at + 1, length = MS;
		uint64_t *own = rounds_met + 16 * i, *peer = rounds_met + 16 * !i;
		void *parameters[] = { &own, &peer, &round, &length };
		must(cuCtxSetCurrent(contexts[i]));
		must(cuLaunchKernel(meets[i], 1, 1, 1, 128, 1, 1, 0, NULL, parameters, NULL));
	}
}

static void make_streams(void)
{
	/* CU_STREAM_NON_BLOCKING */
	for (int i = 0; i < 4; i++)
		must(cuStreamCreate(&streams[i], 1));
}

/* Ten kernels of 100 us in a row. */
static void make_graph(void)
{
	handle made;
	make_streams();
	must(cuStreamBeginCapture_v2(streams[0], 0));
	for (int i = 0; i < 10; i++)
		busy(spin, 1000, 100 * US, streams[0]);
	must(cuStreamEndCapture(streams[0], &made));
	must(cuGraphInstantiateWithFlags(&graph, made, 0));
}

static const struct shape {
	const char *name;
	void (*launch)(uint64_t at);
	void (*prepare)(void);
	/* Waits for each kernel. */
	int waits;
	/* Does not use the GPU itself. */
	int forks;
} shapes[] = {
	{ "20us", wave, NULL, 0, 0 },
	{ "100us", short_, NULL, 0, 0 },
	{ "1ms", plain, NULL, 0, 0 },
	{ "streams", narrow, make_streams, 0, 0 },
	{ "5ms", long_, NULL, 0, 0 },
	{ "mixed", mixed, NULL, 0, 0 },
	{ "jitter", jitter, NULL, 0, 0 },
	{ "graph", of_graph, make_graph, 0, 0 },
	{ "cooperative", cooperative, NULL, 0, 0 },
	{ "sync", plain, NULL, 1, 0 },
	{ "bursts", burst, NULL, 0, 0 },
	{ "single", single, NULL, 0, 0 },
	{ "idle", idle, NULL, 0, 0 },
	{ "endless", endless, NULL, 0, 0 },
	{ "churn", churn, NULL, 0, 1 },
	{ "pair", pair, make_pair, 0, 0 },
}, shape_of_length = { "spin", spin_of_length, NULL, 0, 0 };

static void run(const char *name, uint64_t before, uint64_t window)
{
	const struct shape *shape = NULL;
	for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
		if (!strcmp(shapes[i].name, name))
			shape = &shapes[i];
	if (!strncmp(name, "spin:", 5)) {
		spin_length = strtoull(name + 5, NULL, 10);
		shape = &shape_of_length;
	}
	if (!shape)
		fail(name, 0);
	if (!shape->forks)
		start();
	if (shape->prepare)
		shape->prepare();
	char byte;
	puts("ready");
	fflush(stdout);
	if (read(STDIN_FILENO, &byte, 1) < 0)
		fail("read", 0);
	/* Before the window, in the window, and 1.5 s after it, so that no neighbour gets more time at the
	 * end of its window and an observer has read it by then. */
	uint64_t ends[] = { before * MS, (before + window) * MS, (before + window) * MS + 1500 * MS };
	uint64_t count[3] = { 0 }, stall[3] = { 0 }, cpu[3] = { 0 }, at = 0, begin = now(), last = begin;
	size_t counted = 0;
	for (int part = 0; part < 3; part++) {
		uint64_t since = clock_of(CLOCK_PROCESS_CPUTIME_ID);
		if (part == 1)
			bursts = 0;
		if (part == 2)
			counted = bursts < 4096 ? bursts : 4096;
		while (last - begin < ends[part]) {
			/* The program's own wait does not count as part of the launch. */
			uint64_t called = shape->waits ? now() : last;
			shape->launch(at++);
			last = now();
			if (last - called > stall[part])
				stall[part] = last - called;
			count[part]++;
			if (shape->waits)
				must(cuCtxSynchronize());
		}
		cpu[part] = clock_of(CLOCK_PROCESS_CPUTIME_ID) - since;
	}
	printf("early_stall %llu\nstall %llu\nlaunches %llu\ncpu %llu\n", (unsigned long long)stall[0],
		(unsigned long long)stall[1], (unsigned long long)count[1], (unsigned long long)cpu[1]);
	if (counted) {
		qsort(latencies, counted, sizeof *latencies, by_size);
		printf("bursts %zu\nburst_p50 %.0f\nburst_p99 %.0f\n", counted, latencies[counted / 2],
			latencies[counted * 99 / 100]);
	}
	fflush(stdout);
	/* Queued kernels need not complete. */
	_exit(0);
}

/* Measures the rounds of a kernel per microsecond, in a second pass when the GPU has reached its clock. */
static void find_rounds(void)
{
	enum { EACH = 1000000, TIMES = 20 };
	uint64_t took = 0;
	rounds = US;
	start();
	for (int part = 0; part < 2; part++) {
		uint64_t begin = now();
		for (int i = 0; i < TIMES; i++)
			launch_spin(spin, 1000, EACH, NULL);
		must(cuCtxSynchronize());
		took = now() - begin;
	}
	printf("rounds %llu\n", (unsigned long long)(EACH * US * TIMES / took));
}

int main(int count, char **words)
{
	take_turns(&count, &words);
	if (count == 6)
		rounds = strtoull(words[5], NULL, 10);
	if ((count == 5 || count == 6) && !strcmp(words[1], "run"))
		run(words[2], strtoull(words[3], NULL, 10), strtoull(words[4], NULL, 10));
	else if (count == 2 && !strcmp(words[1], "rounds"))
		find_rounds();
	else if (count == 3 && !strcmp(words[1], "launch"))
		start(), launch_figures(nothing, atol(words[2]));
	else {
		fprintf(stderr, "usage: compute run SHAPE BEFORE WINDOW [ROUNDS] | rounds | [turns] launch N\n");
		return 2;
	}
	return 0;
}
