/* Common parts of the programs that measure themselves: the driver's functions, looked up as an
 * application does, and clocks. */
#ifndef MEASURE_H
#define MEASURE_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MIB ((size_t)1 << 20)
#define US 1000ull
#define MS 1000000ull

typedef void *handle;
typedef unsigned long long address;

#define LAUNCH_ handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **
/* All driver functions that any of them calls. A function that the driver lacks is NULL. */
#define FUNCTIONS(EACH)                                                     \
	EACH(cuInit, unsigned)                                              \
	EACH(cuDeviceGet, int *, int)                                       \
	EACH(cuDeviceGetAttribute, int *, int, int)                         \
	EACH(cuDeviceTotalMem_v2, size_t *, int)                            \
	EACH(cuDevicePrimaryCtxRetain, handle *, int)                       \
	EACH(cuCtxSetCurrent, handle)                                       \
	EACH(cuCtxSynchronize, void)                                        \
	EACH(cuMemAlloc_v2, address *, size_t)                              \
	EACH(cuMemFree_v2, address)                                         \
	EACH(cuMemGetInfo_v2, size_t *, size_t *)                           \
	EACH(cuMemHostAlloc, void **, size_t, unsigned)                     \
	EACH(cuMemAllocManaged, address *, size_t, unsigned)                \
	EACH(cuMemPrefetchAsync, address, size_t, int, handle)              \
	EACH(cuMemcpyDtoDAsync_v2, address, address, size_t, handle)        \
	EACH(cuMemsetD8Async, address, unsigned char, size_t, handle)       \
	EACH(cuMemAllocAsync, address *, size_t, handle)                    \
	EACH(cuMemFreeAsync, address, handle)                               \
	EACH(cuMemCreate, address *, size_t, const void *, unsigned long long) \
	EACH(cuDeviceGetDefaultMemPool, handle *, int)                      \
	EACH(cuMemPoolSetAttribute, handle, int, void *)                    \
	EACH(cuModuleLoadData, handle *, const void *)                      \
	EACH(cuModuleGetFunction, handle *, handle, const char *)           \
	EACH(cuStreamCreate, handle *, unsigned)                            \
	EACH(cuStreamBeginCapture_v2, handle, int)                          \
	EACH(cuStreamEndCapture, handle, handle *)                          \
	EACH(cuGraphInstantiateWithFlags, handle *, handle, unsigned long long) \
	EACH(cuGraphLaunch, handle, handle)                                 \
	EACH(cuEventElapsedTime, float *, handle, handle)                   \
	EACH(cuLaunchKernel, LAUNCH_, void **)                              \
	EACH(cuLaunchCooperativeKernel, LAUNCH_)

#define DECLARE_(name, ...) int (*name)(__VA_ARGS__);
#define FIND_(name, ...) *(void **)&cuda.name = dlsym(library, #name);
static struct {
	FUNCTIONS(DECLARE_)
} cuda;

static void fail(const char *what, int code)
{
	fprintf(stderr, "%s: %d\n", what, code);
	exit(1);
}

#define must(call)                          \
	do {                                \
		int code_ = cuda.call;      \
		if (code_)                  \
			fail(#call, code_); \
	} while (0)

static inline void find_functions(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library)
		fail(dlerror(), 0);
	FUNCTIONS(FIND_)
}

/* Makes the primary context of a GPU current. Returns the context. */
static inline handle open_gpu_at(int at)
{
	int device;
	handle context;
	must(cuDeviceGet(&device, at));
	must(cuDevicePrimaryCtxRetain(&context, device));
	must(cuCtxSetCurrent(context));
	return context;
}

/* Makes the primary context of the first GPU current. Returns the GPU. */
static inline int open_gpu(void)
{
	find_functions();
	must(cuInit(0));
	open_gpu_at(0);
	return 0;
}

/* A kernel that runs for the time in its parameter, on any GPU since Maxwell. */
#define PTX_HEAD ".version 6.0\n.target sm_50\n.address_size 64\n"
#define PTX_SPIN(name)                                                                              \
	".visible .entry " name "(.param .u64 length)\n{\n .reg .u64 %rd<4>;\n .reg .pred %p1;\n" \
	" ld.param.u64 %rd1, [length];\n mov.u64 %rd2, %globaltimer;\n"                           \
	"again:\n mov.u64 %rd3, %globaltimer;\n sub.u64 %rd3, %rd3, %rd2;\n"                      \
	" setp.lt.u64 %p1, %rd3, %rd1;\n @%p1 bra again;\n ret;\n}\n"

/* A kernel that does a fixed amount of work, in rounds of a loop; it takes longer when other processes
 * share the GPU. On the simulated GPU a round takes a nanosecond. The store keeps the compiler from
 * removing the loop. */
#define PTX_COUNT(name)                                                                                \
	".visible .entry " name "(.param .u64 length)\n{\n .reg .u64 %rd<3>;\n .reg .pred %p1;\n"    \
	" .shared .align 8 .b8 sink[8];\n ld.param.u64 %rd1, [length];\n mov.u64 %rd2, 0;\n"          \
	"again:\n st.volatile.shared.u64 [sink], %rd2;\n add.u64 %rd2, %rd2, 1;\n"                    \
	" setp.lt.u64 %p1, %rd2, %rd1;\n @%p1 bra again;\n ret;\n}\n"

/* A kernel that waits for a peer on another GPU, as kernels of NCCL do. It sets its own word to the
 * number of the round, waits until the peer's word has it, and then runs for a time. */
#define PTX_MEET(name)                                                                                 \
	".visible .entry " name "(.param .u64 own, .param .u64 peer, .param .u64 round,\n"           \
	" .param .u64 length)\n{\n .reg .u64 %rd<8>;\n .reg .pred %p<3>;\n"                          \
	" ld.param.u64 %rd1, [own];\n ld.param.u64 %rd2, [peer];\n ld.param.u64 %rd3, [round];\n"    \
	" ld.param.u64 %rd4, [length];\n st.volatile.u64 [%rd1], %rd3;\n membar.sys;\n"             \
	"wait:\n ld.volatile.u64 %rd5, [%rd2];\n setp.lt.u64 %p1, %rd5, %rd3;\n @%p1 bra wait;\n"   \
	" mov.u64 %rd6, %globaltimer;\n"                                                             \
	"again:\n mov.u64 %rd7, %globaltimer;\n sub.u64 %rd7, %rd7, %rd6;\n"                        \
	" setp.lt.u64 %p2, %rd7, %rd4;\n @%p2 bra again;\n ret;\n}\n"

static inline void launch_spin(handle function, unsigned blocks, uint64_t length, handle stream)
{
	void *parameters[] = { &length };
	must(cuLaunchKernel(function, blocks, 1, 1, 128, 1, 1, 0, stream, parameters, NULL));
}

static inline uint64_t clock_of(clockid_t id)
{
	struct timespec now;
	clock_gettime(id, &now);
	return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline uint64_t now(void) { return clock_of(CLOCK_MONOTONIC); }

static inline int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* Makes the processor complete what it has begun. The simulated driver is so fast that the processor
 * otherwise overlaps the memory accesses of successive calls. The measured difference would then be the
 * overlap, not the cost of a call. */
static inline void finish(void)
{
#if defined(__x86_64__)
	__builtin_ia32_lfence();
#elif defined(__aarch64__)
	__asm__ volatile("dsb sy\n\tisb" ::: "memory");
#else
	__sync_synchronize();
#endif
}

/* Prints the cost of a call: the median over batches, so that rare interruptions do not count. `batch`
 * makes BATCH calls; `rest` is the work between batches that is not measured, or NULL. */
enum { BATCH = 256, BATCHES = 4096 };

static inline void figure(const char *name, void (*batch)(void), void (*rest)(void), long calls)
{
	static double took[BATCHES];
	long count = calls / BATCH;
	count = count < 1 ? 1 : count > BATCHES ? BATCHES : count;
	for (long i = 0; i < count; i++) {
		uint64_t begin = now();
		batch();
		took[i] = (double)(now() - begin) / BATCH;
		if (rest)
			rest();
	}
	qsort(took, count, sizeof *took, by_size);
	printf("%s %.3f\n", name, took[count / 2]);
	fflush(stdout);
}

/* Whether to take turns with other programs: one figure per byte of input, until the input ends. */
static int in_turns;

static inline void figures(const char *name, void (*batch)(void), void (*rest)(void), long calls)
{
	if (!in_turns) {
		figure(name, batch, rest, calls);
		return;
	}
	printf("ready\n");
	fflush(stdout);
	while (getchar() != EOF)
		figure(name, batch, rest, calls);
}

static handle launched;
static inline void launches(void)
{
	for (int call = 0; call < BATCH; call++)
		must(cuLaunchKernel(launched, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
}
static inline void wait_for_all(void) { must(cuCtxSynchronize()); }

static inline void launch_figures(handle function, long calls)
{
	launched = function;
	figures("launch", launches, wait_for_all, calls);
}

/* Reads the optional first argument `turns`. */
static inline void take_turns(int *count, char ***words)
{
	in_turns = *count > 1 && !strcmp((*words)[1], "turns");
	*count -= in_turns, *words += in_turns;
}

static uint64_t state = 88172645463325252ull;
static inline uint64_t chance(uint64_t below)
{
	state ^= state << 13, state ^= state >> 7, state ^= state << 17;
	return state % below;
}

#endif
