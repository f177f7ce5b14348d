/* What programs that measure themselves have in common: `cuda` is each one's own table of the driver's functions. */
#ifndef MEASURE_H
#define MEASURE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

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

#define FIND(name) *(void **)&cuda.name = dlsym(library, #name)

static inline uint64_t clock_of(clockid_t id)
{
	struct timespec now;
	clock_gettime(id, &now);
	return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline uint64_t now(void) { return clock_of(CLOCK_MONOTONIC); }

static uint64_t state = 88172645463325252ull;
static inline uint64_t chance(uint64_t below)
{
	state ^= state << 13, state ^= state >> 7, state ^= state << 17;
	return state % below;
}

#endif
