/* A CUDA program without CUDA's headers: the few functions of the driver that these programs call, found as
 * the row at hand wants them found. */
#ifndef DRIVER_H
#define DRIVER_H

#include <stddef.h>

#define MIB ((size_t)1 << 20)

/* How one function is found by its exported name; NULL: it is not. */
typedef void *find_function(void *from, const char *name);

struct driver {
	int (*init)(unsigned);
	int (*device)(int *, int);
	int (*retain)(void **, int);
	int (*make_current)(void *);
	int (*allocate)(unsigned long long *, size_t);
};

/* Fills in all functions; 0, or -1 with a word on stderr. */
int find_all(struct driver *driver, find_function *find, void *from);
/* The driver's library as a program has it: dlopen by its SONAME, dlsym. */
int find_usual(struct driver *driver);
/* The same, of the library with that name. */
int find_in(struct driver *driver, const char *library);

/* Initialises, makes the primary context of the first GPU current. 0, or the driver's error. */
int start(struct driver *driver);
/* Allocates until so many MiB are held in blocks of 16, or the driver refuses; how many it holds. */
long take(struct driver *driver, long mib);

/* What every row does in the end: start and take. Says what is held and stays; never returns. */
void hold(struct driver *driver, long mib);
/* Says so and stays. */
void held(long mib);
/* The trick cannot be tried here; the reason is printed, and the row has no result. */
void cannot(const char *why);
/* The trick was refused; printed, and the program goes on. */
void refused(const char *what);
/* Goes on as another image of this program with that row. */
void become(const char *row, char **environment);

/* Has calls of one function go to another: its code is written over. 0, or -1. */
int redirect(void *from, void *to);

/* Path of a file that lies beside this program. */
const char *beside(const char *name);

/* What the program was called with. */
extern struct order {
	const char *self;
	const char *row;
	/* As much as it should try to hold, in MiB. */
	const char *goal;
	/* Path of the driver's library, and of a copy of it under another name. */
	const char *library, *copy;
} order;
long goal(void);

/* The tricks, by subject. */
struct row {
	const char *name;
	void (*play)(void);
};
extern const struct row loader_rows[], page_rows[], memory_rows[], space_rows[], time_rows[];

#endif
