/* static GOAL: a program with the driver linked into it, so that no loader runs. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int cuInit(unsigned);
int cuDeviceGet(int *, int);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(unsigned long long *, size_t);

int main(int count, char **words)
{
	long goal = count > 1 ? atol(words[1]) : 0, got = 0;
	unsigned long long address;
	void *context;
	int device;
	if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context))
		goal = 0;
	while (got < goal && cuMemAlloc_v2(&address, 16 << 20) == 0)
		got += 16;
	printf("held %ld\n", got);
	fflush(stdout);
	for (;;)
		pause();
}
