/* The pages of a share, for a program that would like them to say something else. */
#ifndef PAGES_H
#define PAGES_H

/* Path of the first policy or account page in this container; NULL without one. */
const char *page_file(const char *name);
/* Where they are mapped in this process, up to 16; how many. */
int page_mapped(const char *name, unsigned char **address);
/* Makes both copies of a policy page allow 8 TiB, with checksums that hold. */
void raise_limits(unsigned char *page);

#endif
