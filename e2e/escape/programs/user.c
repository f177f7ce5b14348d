/* A library that is linked to the driver, as those that CUDA programs are made of are. */
#include <stddef.h>

int cuInit(unsigned);
int cuDeviceGet(int *, int);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(unsigned long long *, size_t);

int user_start(void)
{
	int code, device;
	void *context;
	if ((code = cuInit(0)) || (code = cuDeviceGet(&device, 0)) || (code = cuDevicePrimaryCtxRetain(&context, device)))
		return code;
	return cuCtxSetCurrent(context);
}

/* Allocates until so many MiB are held in blocks of 16, or the driver refuses; how many it holds. */
long user_take(long mib)
{
	unsigned long long address;
	long got = 0;
	while (got < mib && cuMemAlloc_v2(&address, 16 << 20) == 0)
		got += 16;
	return got;
}
