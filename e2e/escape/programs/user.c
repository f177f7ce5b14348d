/* A library that is linked to the driver, like the libraries of CUDA programs. */
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

/* Allocates blocks of 16 MiB until `mib` MiB are held or the driver refuses. Returns the MiB held. */
long user_take(long mib)
{
	unsigned long long address;
	long got = 0;
	while (got < mib && cuMemAlloc_v2(&address, 16 << 20) == 0)
		got += 16;
	return got;
}
