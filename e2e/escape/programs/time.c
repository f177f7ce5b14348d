/* Compute time: programs that want all of a GPU's, each in its own way. They say `held 0` when they are about to begin, and work
 * until they are killed; what they get is for others to see. On a real GPU the kernels watch its clock. */
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

static void about_to_begin(void)
{
	printf("held 0\n");
	fflush(stdout);
}

/* Kernels of 2 ms, as fast as they go or nearly: a program that only launches would keep a core from its judge. */
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
	about_to_begin();
	work();
}

/* Fills and copies in the GPU's own memory, and between it and the host's whatever moves. */
static void copies(void)
{
	enum { GPU, HOST = -1 };
	size_t size = 1024 * MIB, part = 8 * MIB;
	address managed, own;
	open_gpu();
	/* CU_MEM_ATTACH_GLOBAL */
	must(cuMemAllocManaged(&managed, size, 1));
	must(cuMemAlloc_v2(&own, 2 * part));
	about_to_begin();
	for (;;) {
		must(cuMemPrefetchAsync(managed, size, GPU, NULL));
		must(cuMemPrefetchAsync(managed, size, HOST, NULL));
		must(cuMemsetD8Async(own, 1, part, NULL));
		must(cuMemcpyDtoDAsync_v2(own + part, own, part, NULL));
		usleep(500);
	}
}

/* On sixteen streams, without ever waiting for one. */
static void queue(void)
{
	handle streams[16];
	begin();
	for (int i = 0; i < 16; i++)
		/* CU_STREAM_NON_BLOCKING */
		must(cuStreamCreate(&streams[i], 1));
	about_to_begin();
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
	about_to_begin();
	for (;;)
		pause();
}

/* In processes of which none lives long enough to be known. */
static void fresh(int waits)
{
	about_to_begin();
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
	about_to_begin();
	for (;;) {
		must(cuGraphLaunch(graph, stream));
		usleep(5000);
	}
}

static void endless(void)
{
	begin();
	about_to_begin();
	kernel(HOUR, NULL);
	for (;;)
		pause();
}

/* Works, while another process of the container writes the account page. */
static void cook(void (*change)(unsigned char *account))
{
	unsigned char *account = account_page();
	begin();
	about_to_begin();
	if (account && !fork())
		for (;;) {
			change(account);
			usleep(1000);
		}
	work();
}

static void more_balance(void) { cook(have_time); }
static void claimed_waits(void) { cook(have_waited); }
static void forgotten_charges(void) { cook(have_charged_nothing); }

/* Everything was over in no time. */
static int in_no_time(float *milliseconds, handle from, handle to)
{
	(void)from, (void)to;
	*milliseconds = 0;
	return 0;
}

static void mismeasured(void)
{
	begin();
	if (redirect((void *)cuda.cuEventElapsedTime, (void *)in_no_time))
		refused("mprotect of the driver's code");
	about_to_begin();
	work();
}

static void map_over(void)
{
	unsigned char *mapped[16], page[4096];
	begin();
	for (int i = page_mapped("policy", mapped); i-- > 0;) {
		memcpy(page, mapped[i], sizeof page);
		raise_limits(page);
		void *over = mmap(mapped[i], 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		if (over == MAP_FAILED)
			refused("mmap over the policy page");
		else
			memcpy(over, page, sizeof page);
	}
	about_to_begin();
	work();
}

const struct row time_rows[] = {
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
	{ "time-policy-mapped-over", map_over },
	{ NULL, NULL },
};
