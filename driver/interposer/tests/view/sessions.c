/* An NVML whose lists have the caller as the second of three entries. A device's handle is its UUID. */
#include <string.h>
#include <unistd.h>

static int fill(unsigned *count, void *list, unsigned long entry)
{
	for (unsigned at = 0; at < 3; at++) {
		unsigned *words = (unsigned *)((char *)list + at * entry);
		memset(words, 0x5a, entry);
		words[0] = 70 + at;
		words[1] = at == 1 ? (unsigned)getpid() : 100000 + at;
	}
	*count = 3;
	return 0;
}

int nvmlDeviceGetUUID(const char *device, char *text, unsigned length)
{
	strncpy(text, device, length);
	return 0;
}

/* nvmlEncoderSessionInfo_t (8 words) and nvmlFBCSessionInfo_t (12 words); the first two are the session and the pid. */
int nvmlDeviceGetEncoderSessions(const char *device, unsigned *count, void *list) { return (void)device, fill(count, list, 32); }
int nvmlDeviceGetFBCSessions(const char *device, unsigned *count, void *list) { return (void)device, fill(count, list, 48); }
