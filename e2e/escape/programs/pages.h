/* The pages of a share, for a program that would like them to say something else. */
#ifndef PAGES_H
#define PAGES_H

/* Path of the first policy or account page in this container; NULL without one. */
const char *page_file(const char *name);
/* Where they are mapped in this process, up to 16; how many. */
int page_mapped(const char *name, unsigned char **address);
/* The account page, mapped to be written; NULL without one. */
unsigned char *account_page(void);
/* Words on it that no honest process writes: time that nobody granted; waits; and the same with nothing charged. */
void have_time(unsigned char *account);
void have_waited(unsigned char *account);
void have_charged_nothing(unsigned char *account);
/* Makes both copies of a policy page allow 8 TiB and all of the time, with checksums that hold. */
void raise_limits(unsigned char *page);

#endif
