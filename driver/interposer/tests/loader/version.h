/* The version of libc's oldest functions, including dlsym. */
#ifdef __x86_64__
#define LIBC_VERSION "GLIBC_2.2.5"
#else
#define LIBC_VERSION "GLIBC_2.17"
#endif
