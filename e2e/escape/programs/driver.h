/* A CUDA program without CUDA's headers: the few driver functions that the attacks call, looked up as each
 * attack wants. */
#ifndef DRIVER_H
#define DRIVER_H

#include <stddef.h>

#define MIB ((size_t)1 << 20)

/* Looks up one function by its exported name; NULL if it is not found. */
typedef void *find_function(void *from, const char *name);

struct driver {
	int (*init)(unsigned);
	int (*device)(int *, int);
	int (*retain)(void **, int);
	int (*make_current)(void *);
	int (*allocate)(unsigned long long *, size_t);
};

/* Looks up all functions. Returns 0, or -1 with a message on stderr. */
int find_all(struct driver *driver, find_function *find, void *from);
/* The driver's library as an application finds it: dlopen by its SONAME, dlsym. */
int find_default(struct driver *driver);
/* The same with the library of that name. */
int find_in(struct driver *driver, const char *library);

/* Initialises CUDA and makes the primary context of the first GPU current. Returns 0, or the driver's
 * error. */
int start(struct driver *driver);
/* Allocates blocks of 16 MiB until `mib` MiB are held or the driver refuses. Returns the MiB held. */
long take(struct driver *driver, long mib);

/* The end of every attack: starts CUDA, allocates, prints the held memory and stays. Never returns. */
void allocate_and_stay(struct driver *driver, long mib);
/* Prints the held memory and stays. Never returns. */
void report_held(long mib);
/* Prints that the attack cannot run here, with the reason, and exits. The case is skipped then. */
void skip(const char *why);
/* Prints that an operation was refused; the program goes on. */
void report_refused(const char *what);
/* Replaces this process by this program with another attack. */
void restart_as(const char *attack, char **environment);

/* The driver's own function, found by walking the loader's tables. */
void *raw_function(const char *name);

/* Redirects calls of one function to another by overwriting its code. Returns 0 or -1. */
int redirect(void *from, void *to);

/* The path of a file in the directory of this program. */
const char *sibling_path(const char *name);

/* The arguments of the program. */
extern struct arguments {
	const char *self;
	const char *attack;
	/* The memory to try to hold, in MiB. */
	const char *goal;
	/* Path of the driver's library, and of a copy of it under another name. */
	const char *library, *copy;
} arguments;
long goal(void);

/* The attacks, by subject. */
struct attack {
	const char *name;
	void (*run)(void);
};
extern const struct attack loader_attacks[], page_attacks[], memory_attacks[], space_attacks[], time_attacks[];

#endif
