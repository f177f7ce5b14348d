/* Attacks on the library from within its process. */
#define _GNU_SOURCE
#include "driver.h"
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The driver's library among the loaded objects, and its symbol table. */
struct object {
	uintptr_t base;
	const ElfW(Sym) *symbols;
	const char *strings;
	const uint32_t *hash;
};

static uintptr_t at(const struct link_map *map, uintptr_t value)
{
	/* glibc has already made most of these absolute. */
	return value < map->l_addr ? map->l_addr + value : value;
}

static void read_tables(const struct link_map *map, struct object *object)
{
	object->base = map->l_addr;
	for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
		if (entry->d_tag == DT_SYMTAB)
			object->symbols = (const void *)at(map, entry->d_un.d_ptr);
		if (entry->d_tag == DT_STRTAB)
			object->strings = (const void *)at(map, entry->d_un.d_ptr);
		if (entry->d_tag == DT_GNU_HASH)
			object->hash = (const void *)at(map, entry->d_un.d_ptr);
	}
}

/* Walks every chain of the GNU hash table. Its header: number of buckets, first symbol, words of the
 * filter, shift. */
static void *in_tables(void *from, const char *name)
{
	const struct object *object = from;
	uint32_t buckets = object->hash[0], first = object->hash[1], words = object->hash[2];
	const uint32_t *bucket = object->hash + 4 + words * (sizeof(ElfW(Addr)) / 4);
	const uint32_t *chain = bucket + buckets;
	for (uint32_t i = 0; i < buckets; i++) {
		uint32_t index = bucket[i];
		if (index < first)
			continue;
		do {
			if (!strcmp(object->strings + object->symbols[index].st_name, name))
				return (void *)(object->base + object->symbols[index].st_value);
		} while (!(chain[index++ - first] & 1));
	}
	return NULL;
}

static struct object *real_driver(void)
{
	static struct object object;
	struct link_map *map;
	void *handle = dlopen("libcuda.so.1", RTLD_NOW);
	if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &map))
		skip(dlerror());
	/* Starts from the program's own map: the handle may be another object's. */
	while (map->l_prev)
		map = map->l_prev;
	/* The last object of that name is the driver: a shim is loaded before it. */
	for (; map; map = map->l_next)
		if (strstr(map->l_name, "/libcuda.so"))
			read_tables(map, &object);
	if (!object.hash || !object.symbols || !object.strings)
		skip("the driver's library has no GNU hash table");
	return &object;
}

void *raw_function(const char *name)
{
	void *found = in_tables(real_driver(), name);
	if (!found)
		skip("the driver has no such function");
	return found;
}

static void raw_pointers(void)
{
	struct driver driver;
	if (!find_all(&driver, in_tables, real_driver()))
		allocate_and_stay(&driver, goal());
}

/* Overwrites the beginning of a function with a jump to another. */
int redirect(void *from, void *to)
{
	uintptr_t page = sysconf(_SC_PAGESIZE), begin = (uintptr_t)from & ~(page - 1);
	if (mprotect((void *)begin, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC))
		return -1;
#if defined __x86_64__
	unsigned char jump[12] = { 0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0 }; /* mov rax, to; jmp rax */
	memcpy(jump + 2, &to, 8);
#elif defined __aarch64__
	unsigned char jump[16] = { 0x50, 0, 0, 0x58, 0, 2, 0x1f, 0xd6 }; /* ldr x16, [pc, 8]; br x16 */
	memcpy(jump + 8, &to, 8);
#endif
	memcpy(from, jump, sizeof jump);
	__builtin___clear_cache(from, (char *)from + sizeof jump);
	return 0;
}

static void patched(void)
{
	struct driver driver, real;
	if (find_default(&driver) || find_all(&real, in_tables, real_driver()))
		report_held(0);
	int code = start(&driver);
	void *hook = (void *)driver.allocate, *function = (void *)real.allocate;
	if (hook != function && redirect(hook, function))
		report_refused("mprotect of the library's code");
	report_held(code ? 0 : take(&driver, goal()));
}

/* Registers with the library and releases its context, so that nothing is charged. */
static int register_only(void)
{
	struct driver driver;
	int device;
	void *context;
	int (*release)(int) = (void *)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuDevicePrimaryCtxRelease_v2");
	if (!release || find_default(&driver) || driver.init(0) || driver.device(&device, 0))
		return -1;
	if (!driver.retain(&context, device))
		release(device);
	return 0;
}

/* In each of many processes, a context of 300 MiB and 208 MiB more, both without the library. */
static void overhead(void)
{
	enum { COUNT = 24, EACH = 208 };
	int ends[2];
	long sum = 0, one;
	if (pipe(ends))
		skip("no pipe");
	for (int child = 0; child < COUNT; child++) {
		if (fork())
			continue;
		struct driver real;
		one = register_only() || find_all(&real, in_tables, real_driver()) || start(&real) ? 0 : take(&real, EACH);
		if (write(ends[1], &one, sizeof one) != sizeof one)
			_exit(1);
		for (;;)
			pause();
	}
	for (int child = 0; child < COUNT; child++)
		if (read(ends[0], &one, sizeof one) == sizeof one)
			sum += one;
	report_held(sum);
}

/* A copy of the driver's library that is not recognised by name or SONAME. */
static void own_library(void)
{
	struct driver driver;
	if (!find_in(&driver, arguments.copy))
		allocate_and_stay(&driver, goal());
}

/* Managed memory, moved to the GPU. 1 is CU_MEM_ATTACH_GLOBAL. */
static void managed(void)
{
	struct driver driver;
	unsigned long long address;
	size_t size = goal() * MIB;
	void *handle = dlopen(arguments.copy, RTLD_NOW);
	if (!handle || find_in(&driver, arguments.copy))
		skip(dlerror());
	int (*allocate)(unsigned long long *, size_t, unsigned) = (void *)dlsym(handle, "cuMemAllocManaged");
	int (*move)(unsigned long long, size_t, int, void *) = (void *)dlsym(handle, "cuMemPrefetchAsync");
	if (!allocate || !move)
		skip("the driver has no managed memory");
	report_held(start(&driver) || allocate(&address, size, 1) || move(address, size, 0, NULL) ? 0 : goal());
}

const struct attack memory_attacks[] = {
	{ "managed", managed },
	{ "link-map", raw_pointers },
	{ "library-patched", patched },
	{ "overhead-processes", overhead },
	{ "own-libcuda", own_library },
	{ NULL, NULL },
};
