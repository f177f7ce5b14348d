/* Attacks on compute time: programs that demand all of a GPU's time. They print `held 0` just before they
 * begin and work until they are killed; the test measures the time that they get. On a real GPU the
 * kernels watch its clock. */
#define _GNU_SOURCE
#include "driver.h"
#include "measure.h"
#include "pages.h"
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define HOUR (3600000 * MS)

static const char PTX[] = PTX_HEAD PTX_SPIN("spin");

static handle spin;

static void begin(void)
{
	handle module;
	open_gpu();
	must(cuModuleLoadData(&module, PTX));
	must(cuModuleGetFunction(&spin, module, "spin"));
}

static void kernel(uint64_t length, handle stream)
{
	launch_spin(spin, 1000, length, stream);
}

static void report_start(void)
{
	printf("held 0\n");
	fflush(stdout);
}

/* Kernels of 2 ms, almost as fast as possible: a program that only launches would take a core from the
 * test. */
static void work(void)
{
	for (;;) {
		kernel(2 * MS, NULL);
		usleep(500);
	}
}

static void only_work(void)
{
	begin();
	report_start();
	work();
}

/* Fills and copies within the GPU's own memory, and migrates managed memory between it and the host. */
static void copies(void)
{
	enum { GPU, HOST = -1 };
	size_t size = 1024 * MIB, part = 8 * MIB;
	address managed, own;
	open_gpu();
	/* CU_MEM_ATTACH_GLOBAL */
	must(cuMemAllocManaged(&managed, size, 1));
	must(cuMemAlloc_v2(&own, 2 * part));
	report_start();
	for (;;) {
		must(cuMemPrefetchAsync(managed, size, GPU, NULL));
		must(cuMemPrefetchAsync(managed, size, HOST, NULL));
		must(cuMemsetD8Async(own, 1, part, NULL));
		must(cuMemcpyDtoDAsync_v2(own + part, own, part, NULL));
		usleep(500);
	}
}

/* Sixteen streams, without a wait. */
static void queue(void)
{
	handle streams[16];
	begin();
	for (int i = 0; i < 16; i++)
		/* CU_STREAM_NON_BLOCKING */
		must(cuStreamCreate(&streams[i], 1));
	report_start();
	for (uint64_t at = 0;; at++) {
		kernel(10 * MS, streams[at % 16]);
		if (at % 4 == 0)
			usleep(1000);
	}
}

static void processes(void)
{
	for (int i = 0; i < 8; i++)
		if (!fork()) {
			begin();
			work();
		}
	report_start();
	for (;;)
		pause();
}

/* Processes that end before they can be measured. */
static void fresh(int waits)
{
	report_start();
	for (int i = 0; i < 4; i++)
		if (!fork())
			for (;;) {
				if (!fork()) {
					begin();
					kernel(50 * MS, NULL);
					if (waits)
						cuda.cuCtxSynchronize();
					else
						usleep(200000);
					_exit(0);
				}
				wait(NULL);
			}
	for (;;)
		pause();
}

static void fresh_processes(void) { fresh(1); }
static void fresh_unawaited(void) { fresh(0); }

/* Ten kernels of 2 ms in one launch. */
static void graphs(void)
{
	handle stream, made, graph;
	begin();
	must(cuStreamCreate(&stream, 1));
	must(cuStreamBeginCapture_v2(stream, 0));
	for (int i = 0; i < 10; i++)
		kernel(2 * MS, stream);
	must(cuStreamEndCapture(stream, &made));
	must(cuGraphInstantiateWithFlags(&graph, made, 0));
	report_start();
	for (;;) {
		must(cuGraphLaunch(graph, stream));
		usleep(5000);
	}
}

static void endless(void)
{
	begin();
	report_start();
	kernel(HOUR, NULL);
	for (;;)
		pause();
}

/* Works while another process of the container writes the account page. */
static void forge(void (*change)(unsigned char *account))
{
	unsigned char *account = account_page();
	begin();
	report_start();
	if (account && !fork())
		for (;;) {
			change(account);
			usleep(1000);
		}
	work();
}

static void more_balance(void) { forge(have_time); }
static void claimed_waits(void) { forge(have_waited); }
static void forgotten_charges(void) { forge(have_charged_nothing); }

/* Makes every kernel look as if it took no time. */
static int zero_time(float *milliseconds, handle from, handle to)
{
	(void)from, (void)to;
	*milliseconds = 0;
	return 0;
}

static void mismeasured(void)
{
	begin();
	if (redirect((void *)cuda.cuEventElapsedTime, (void *)zero_time))
		report_refused("mprotect of the driver's code");
	report_start();
	work();
}

/* Replaces the policy page in this process by a changed copy. */
static void map_over(void (*change)(unsigned char *page))
{
	unsigned char *mapped[16], page[4096];
	begin();
	for (int i = page_mapped("policy", mapped); i-- > 0;) {
		memcpy(page, mapped[i], sizeof page);
		change(page);
		void *over = mmap(mapped[i], 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		if (over == MAP_FAILED)
			report_refused("mmap over the policy page");
		else
			memcpy(over, page, sizeof page);
	}
	report_start();
	work();
}

static void no_limits(void) { map_over(raise_limits); }
static void forged_grant(void) { map_over(grant_for_ever); }

/* Registers by the library, and launches by a pointer to the driver's own function. */
static void raw_launches(void)
{
	begin();
	*(void **)&cuda.cuLaunchKernel = raw_function("cuLaunchKernel");
	report_start();
	work();
}

const struct attack time_attacks[] = {
	{ "time-work", only_work },
	{ "time-copies", copies },
	{ "time-queue", queue },
	{ "time-processes", processes },
	{ "time-fresh-processes", fresh_processes },
	{ "time-fresh-unawaited", fresh_unawaited },
	{ "time-graphs", graphs },
	{ "time-endless", endless },
	{ "time-balance", more_balance },
	{ "time-waits", claimed_waits },
	{ "time-charges", forgotten_charges },
	{ "time-mismeasured", mismeasured },
	{ "time-policy-mapped-over", no_limits },
	{ "time-grant-forged", forged_grant },
	{ "time-raw-launches", raw_launches },
	{ NULL, NULL },
};
