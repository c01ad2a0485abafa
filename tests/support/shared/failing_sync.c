/* Preloaded into a server: while the file that FAILING_SYNC names exists, syncing a write-ahead log fails
 * with EIO, after the data went to the system, as with a disk that loses what it was given. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(int descriptor)
{
	const char *trigger = getenv("FAILING_SYNC");
	char link[64], path[4096];
	ssize_t length;

	if (trigger == NULL || access(trigger, F_OK) != 0)
		return 0;
	snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
	length = readlink(link, path, sizeof path - 1);
	if (length < 4)
		return 0;
	return strncmp(path + length - 4, "-wal", 4) == 0;
}

#define SYNC(name)                                            \
	int name(int descriptor)                              \
	{                                                     \
		int (*real)(int) = dlsym(RTLD_NEXT, #name);   \
		if (fails(descriptor)) {                      \
			errno = EIO;                          \
			return -1;                            \
		}                                             \
		return real(descriptor);                      \
	}

SYNC(fsync)
SYNC(fdatasync)
