/* program ENCODE CUVID CUDA COMMANDS: opens and closes sessions on the first GPU, and prints each result.
 *
 * e, x: open an encoder with the table's first function, or with the one with parameters; E: close the
 * last one. d, D: open and close a decoder. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct functions {
	uint32_t version, reserved;
	void *all[318];
};

struct parameters {
	uint32_t version, kind;
	void *device, *rest[400];
};

static void *find(const char *library, const char *name)
{
	void *handle = dlopen(library, RTLD_NOW), *found = handle ? dlsym(handle, name) : NULL;
	if (!found) {
		fprintf(stderr, "%s: %s\n", name, dlerror());
		exit(2);
	}
	return found;
}

int main(int count, char **words)
{
	static struct functions list;
	static struct parameters parameters = { .kind = 1 };
	void *context, *encoders[16], *decoders[16];
	int has_encoders = 0, has_decoders = 0, device;
	if (count != 5)
		return 2;
	int (*init)(unsigned) = find(words[3], "cuInit"), (*get)(int *, int) = find(words[3], "cuDeviceGet");
	int (*retain)(void **, int) = find(words[3], "cuDevicePrimaryCtxRetain");
	int (*current)(void *) = find(words[3], "cuCtxSetCurrent");
	int (*create)(struct functions *) = find(words[1], "NvEncodeAPICreateInstance");
	int (*decode)(void **, void *) = find(words[2], "cuvidCreateDecoder");
	int (*end)(void *) = find(words[2], "cuvidDestroyDecoder");
	if (init(0) || get(&device, 0) || retain(&context, device) || current(context) || create(&list))
		return 2;
	parameters.device = context;
	int (*open)(void *, uint32_t, void **) = list.all[0], (*destroy)(void *) = list.all[27];
	int (*open_ex)(struct parameters *, void **) = list.all[29];
	for (const char *command = words[4]; *command; command++) {
		int code = -1;
		switch (*command) {
		case 'e':
			code = open(context, 1, &encoders[has_encoders]);
			has_encoders += !code;
			break;
		case 'x':
			code = open_ex(&parameters, &encoders[has_encoders]);
			has_encoders += !code;
			break;
		case 'E':
			code = destroy(encoders[--has_encoders]);
			break;
		case 'd':
			code = decode(&decoders[has_decoders], NULL);
			has_decoders += !code;
			break;
		case 'D':
			code = end(decoders[--has_decoders]);
			break;
		}
		printf("%d ", code);
	}
	puts("");
	fflush(stdout);
	char byte;
	/* Keep the sessions open until the input ends. */
	return read(0, &byte, 1) < 0;
}
