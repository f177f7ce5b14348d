/* overcommit work MIB KERNEL_MS MS | overcommit pool MIB | overcommit take MIB
 *
 * Tenants of a GPU that is short of memory; they are not aware of shares.
 *
 * `work` holds MIB in blocks of 64 MiB, prints "ready HELD", waits for a byte on standard input, and runs
 * one kernel after the other for MS milliseconds. Then it prints the end of each kernel, in milliseconds
 * since its begin. `pool` reserves MIB in a pool, frees all of it and is idle until its input ends. `take`
 * allocates MIB for each line of input and prints the driver's result code. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "measure.h"

static void wait_for_word(void)
{
	char byte;
	if (read(STDIN_FILENO, &byte, 1) < 0)
		fail("read", 0);
}

static void work(uint64_t mib, const char *length, uint64_t window)
{
	enum { MOST = 100000 };
	static uint64_t done[MOST];
	const uint64_t block = 64;
	address made;
	char text[256], name[64];
	handle module, kernel;
	uint64_t held = 0, count = 0;
	open_gpu();
	/* The simulated GPU takes a kernel's length from its name. */
	snprintf(name, sizeof name, "work_%sms", length);
	snprintf(text, sizeof text, PTX_HEAD ".visible .entry %s()\n{\n ret;\n}\n", name);
	must(cuModuleLoadData(&module, text));
	must(cuModuleGetFunction(&kernel, module, name));
	while (held + block <= mib && !cuda.cuMemAlloc_v2(&made, block * MIB))
		held += block;
	printf("ready %llu\n", (unsigned long long)held), fflush(stdout);
	wait_for_word();
	for (uint64_t begin = now(); now() - begin < window * MS && count < MOST;) {
		must(cuLaunchKernel(kernel, 1000, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL));
		must(cuCtxSynchronize());
		done[count++] = (now() - begin) / MS;
	}
	for (uint64_t at = 0; at < count; at++)
		printf("done %llu\n", (unsigned long long)done[at]);
	fflush(stdout);
	_exit(0);
}

static void pool(uint64_t mib)
{
	enum { BLOCKS = 16 };
	address blocks[BLOCKS];
	uint64_t all = UINT64_MAX;
	handle made;
	open_gpu();
	must(cuDeviceGetDefaultMemPool(&made, 0));
	/* CU_MEMPOOL_ATTR_RELEASE_THRESHOLD */
	must(cuMemPoolSetAttribute(made, 4, &all));
	for (int at = 0; at < BLOCKS; at++)
		must(cuMemAllocAsync(&blocks[at], mib * MIB / BLOCKS, NULL));
	for (int at = 0; at < BLOCKS; at++)
		must(cuMemFreeAsync(blocks[at], NULL));
	must(cuCtxSynchronize());
	puts("ready 0"), fflush(stdout);
	wait_for_word();
	_exit(0);
}

/* Memory by handle. It cannot be managed, so a refusal is final. */
static void take(uint64_t mib)
{
	struct {
		int kind, handles, location[2];
		uint64_t rest[9];
	} properties = { 1, 0, { 1, 0 }, { 0 } };
	address made;
	char line[64];
	open_gpu();
	puts("ready 0"), fflush(stdout);
	while (fgets(line, sizeof line, stdin))
		printf("%d\n", cuda.cuMemCreate(&made, mib * MIB, &properties, 0)), fflush(stdout);
	_exit(0);
}

int main(int count, char **words)
{
	if (count == 5 && !strcmp(words[1], "work"))
		work(strtoull(words[2], NULL, 10), words[3], strtoull(words[4], NULL, 10));
	if (count == 3 && !strcmp(words[1], "pool"))
		pool(strtoull(words[2], NULL, 10));
	if (count == 3 && !strcmp(words[1], "take"))
		take(strtoull(words[2], NULL, 10));
	fputs("overcommit work MIB KERNEL_MS MS | overcommit pool MIB | overcommit take MIB\n", stderr);
	return 2;
}
