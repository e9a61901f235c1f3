/* Preloaded: lets the n-th call to the system that writes below a folder fail, as a full or a broken disk does.

   fault_below(folder) says where, fault_after(n) which one: that call returns an error, and the following ones work.
   fault_after(-1): none. faults() is how many calls there were since. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[PATH_MAX];
static long countdown = -1, seen;

void fault_below(const char* folder) { strncpy(below, folder, sizeof below - 1); }
void fault_after(long n) { countdown = n, seen = 0; }
long faults(void) { return seen; }

static int starts(const char* path) { return below[0] && strncmp(path, below, strlen(below)) == 0; }

static int ours(int fd) {
  char link[64], path[PATH_MAX] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  return below[0] && readlink(link, path, sizeof path - 1) > 0 && starts(path);
}

/* Folders are asked for by path, or by a descriptor and a name in it. */
static int about(int folder, const char* path) {
  return path && (path[0] == '/' || folder == AT_FDCWD ? starts(path) : ours(folder));
}

static int fails(int concerned) {
  if (!concerned) return 0;
  ++seen;
  if (countdown < 0 || countdown-- > 0) return 0;
  errno = ENOSPC;
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES (O_WRONLY | O_RDWR | O_CREAT)

#define OPENS(name)                                                   \
  int name(const char* path, int flags, ...) {                        \
    va_list rest;                                                     \
    va_start(rest, flags);                                            \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;         \
    va_end(rest);                                                     \
    if (fails(flags & WRITES && about(AT_FDCWD, path))) return -1;    \
    return REAL(name)(path, flags, mode);                             \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                \
  int name(int folder, const char* path, int flags, ...) {            \
    va_list rest;                                                     \
    va_start(rest, flags);                                            \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;         \
    va_end(rest);                                                     \
    if (fails(flags & WRITES && about(folder, path))) return -1;      \
    return REAL(name)(folder, path, flags, mode);                     \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t write(int fd, const void* data, size_t size) {
  if (fails(ours(fd))) return -1;
  return REAL(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec* parts, int count) {
  if (fails(ours(fd))) return -1;
  return REAL(writev)(fd, parts, count);
}
int fsync(int fd) { return fails(ours(fd)) ? -1 : REAL(fsync)(fd); }
int fchmod(int fd, mode_t mode) { return fails(ours(fd)) ? -1 : REAL(fchmod)(fd, mode); }
int ftruncate(int fd, off_t size) { return fails(ours(fd)) ? -1 : REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return fails(ours(fd)) ? -1 : REAL(ftruncate64)(fd, size); }
/* Returns the error. */
int posix_fallocate(int fd, off_t start, off_t size) {
  return fails(ours(fd)) ? ENOSPC : REAL(posix_fallocate)(fd, start, size);
}
int posix_fallocate64(int fd, off64_t start, off64_t size) {
  return fails(ours(fd)) ? ENOSPC : REAL(posix_fallocate64)(fd, start, size);
}
/* The descriptor is gone either way. */
int close(int fd) {
  int failed = fails((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY && ours(fd));
  int status = REAL(close)(fd);
  if (failed) errno = EIO;
  return failed ? -1 : status;
}
int mkdir(const char* path, mode_t mode) { return fails(about(AT_FDCWD, path)) ? -1 : REAL(mkdir)(path, mode); }
int mkdirat(int folder, const char* path, mode_t mode) {
  return fails(about(folder, path)) ? -1 : REAL(mkdirat)(folder, path, mode);
}
int rename(const char* from, const char* to) {
  return fails(about(AT_FDCWD, to)) ? -1 : REAL(rename)(from, to);
}
int renameat(int a, const char* from, int b, const char* to) {
  return fails(about(b, to)) ? -1 : REAL(renameat)(a, from, b, to);
}
int unlink(const char* path) { return fails(about(AT_FDCWD, path)) ? -1 : REAL(unlink)(path); }
int unlinkat(int folder, const char* path, int flags) {
  return fails(about(folder, path)) ? -1 : REAL(unlinkat)(folder, path, flags);
}
int rmdir(const char* path) { return fails(about(AT_FDCWD, path)) ? -1 : REAL(rmdir)(path); }
