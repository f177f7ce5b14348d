/* Attacks on the pages of a share. */
#ifndef PAGES_H
#define PAGES_H

/* Path of the first policy or account page in this container; NULL if there is none. */
const char *page_file(const char *name);
/* Finds where the pages are mapped in this process, up to 16. Returns the count. */
int page_mapped(const char *name, unsigned char **address);
/* The account page, mapped writable; NULL if there is none. */
unsigned char *account_page(void);
/* Values that no honest process writes: time that was never granted, waits, and waits with nothing
 * charged. */
void have_time(unsigned char *account);
void have_waited(unsigned char *account);
void have_charged_nothing(unsigned char *account);
/* Makes both copies of a policy page allow 8 TiB and all compute time, with valid checksums. */
void raise_limits(unsigned char *page);
/* Makes a policy page say that the share has the device for hours. */
void grant_for_ever(unsigned char *page);

#endif
