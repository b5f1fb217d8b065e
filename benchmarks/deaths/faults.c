/* A layer below the files of one folder, loaded before the C library (LD_PRELOAD; fault_layer.py builds it).
 *
 * Every change to a file below the folder is written to a log, in the order in which it happened, whichever process made
 * it.  At a chosen one the process dies, or all do (the power fails), or the operation is refused (ENOSPC, EIO), or the
 * clock jumps.  What a disk may hold after a power failure follows from the log: failing_disk.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { CREATE = 1, MKDIR, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, RMDIR };   /* operations, as failing_disk.py knows them */
enum { NOTHING, KILL, POWER, REFUSE, CLOCK };                               /* faults, as fault_layer.py knows them */

/* Shared by all processes of a trial. */
struct control {
    uint64_t used;          /* bytes of the log */
    uint64_t counted[16];   /* operations so far, by kind */
    pthread_mutex_t lock;
    uint64_t matching;      /* those among which the fault is counted */
    uint64_t at;            /* its number among them, from 1; 0: never */
    uint32_t kinds;         /* which these are, a bit each */
    uint32_t fault;
    int32_t error;          /* what is said where an operation is refused */
    uint32_t lasting;       /* whether all later ones are refused as well */
    uint32_t after;         /* whether it dies after the operation rather than before; a write is cut in the middle */
    uint32_t dead;          /* the power is off */
    int64_t jump, offset;   /* seconds by which the clock jumps; by which it is wrong now */
    char folder[PATH_MAX];
};
struct record { uint32_t kind, path, other, unused; uint64_t inode, offset, bytes; };

#define HEAD 8192  /* bytes before the log, for the control */
#define LOG_BYTES (1ull << 30)
static struct control *control;
static char *events;

#define REAL(name) ((__typeof__(name) *)real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static void map(const char *place) {
    int file = syscall(SYS_openat, AT_FDCWD, place, O_RDWR | O_CLOEXEC, 0);
    void *start = mmap(NULL, HEAD + LOG_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (start == MAP_FAILED) return;
    events = (char *)start + HEAD;
    control = start;
}

/* Called by fault_layer.py, in the process that becomes the trial.  Its children inherit the mapping. */
int faults_arm(const char *place, const char *folder, uint32_t fault, uint32_t kinds, uint64_t at, int error,
               int lasting, int after, int64_t jump) {
    int file = syscall(SYS_openat, AT_FDCWD, place, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0 || syscall(SYS_ftruncate, file, HEAD + LOG_BYTES)) return -1;
    syscall(SYS_close, file);
    map(place);
    if (!control) return -1;
    struct control *made = control;
    control = NULL;
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&made->lock, &shared);
    strncpy(made->folder, folder, PATH_MAX - 1);
    made->fault = fault, made->kinds = kinds, made->at = at, made->error = error;
    made->lasting = lasting, made->after = after, made->jump = jump;
    control = made;
    return 0;
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static void lock(void) {
    if (pthread_mutex_lock(&control->lock) == EOWNERDEAD) pthread_mutex_consistent(&control->lock);
    if (control->dead) die();
}

static int below(const char *path) {
    size_t length = strlen(control->folder);
    return !strncmp(path, control->folder, length) && (path[length] == '/' || !path[length]);
}

/* The path of a descriptor; 0 where it is none below the folder. */
static int of_descriptor(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0 && below(path);
}

static int absolute(int folder, const char *given, char *path) {
    if (given[0] == '/') snprintf(path, PATH_MAX, "%s", given);
    else {
        char start[PATH_MAX];
        if (folder == AT_FDCWD) {
            if (!getcwd(start, PATH_MAX)) return 0;
        } else of_descriptor(folder, start);
        snprintf(path, PATH_MAX, "%.2000s/%.2000s", start, given);
    }
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') path[--length] = 0;
    return below(path);
}

static void note(uint32_t kind, const char *path, const char *other, uint64_t inode, uint64_t offset, uint64_t bytes,
                 const struct iovec *parts, int count) {
    struct record record = {kind, strlen(path), strlen(other), 0, inode, offset, bytes};
    uint64_t whole = sizeof record + record.path + record.other + (count ? bytes : 0);
    if (control->used + whole > LOG_BYTES) die();
    char *to = events + control->used;
    memcpy(to, &record, sizeof record), to += sizeof record;
    memcpy(to, path, record.path), to += record.path;
    memcpy(to, other, record.other), to += record.other;
    for (int part = 0; part < count && bytes; part++) {
        size_t taken = parts[part].iov_len < bytes ? parts[part].iov_len : bytes;
        memcpy(to, parts[part].iov_base, taken), to += taken, bytes -= taken;
    }
    control->used += whole;
}

/* What becomes of an operation: it is done (0), refused (-1), or the end of the process (1: after it is done). */
static int verdict(uint32_t kind) {
    control->counted[kind]++;
    if (!(control->kinds >> kind & 1) || !control->at) return 0;
    uint64_t number = ++control->matching;
    int due = number == control->at;
    switch (control->fault) {
        case REFUSE:
            if (!due && !(control->lasting && number > control->at)) return 0;
            errno = control->error;
            return -1;
        case CLOCK:
            if (due) control->offset = control->jump;
            return 0;
        case KILL:
        case POWER:
            return due;
    }
    return 0;
}

static void end(void) {
    if (control->fault == POWER) control->dead = 1;
    die();
}

static uint64_t inode_of(const char *path) {
    struct stat status;
    return fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) ? 0 : status.st_ino;
}

/* An operation between lock() and pthread_mutex_unlock: refused, or cut short by death before it begins. */
#define BEGIN(kind)                                                     \
    lock();                                                             \
    int ends = verdict(kind);                                           \
    if (ends < 0) { int why = errno; pthread_mutex_unlock(&control->lock); errno = why; return -1; } \
    if (ends && !control->after) end();
#define END                                                             \
    if (ends) end();                                                    \
    { int why = errno; pthread_mutex_unlock(&control->lock); errno = why; }

static int opened(int folder, const char *given, int flags, mode_t mode) {
    char path[PATH_MAX];
    int writes = flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC);
    if (!control || !writes || (flags & O_TMPFILE) == O_TMPFILE || !absolute(folder, given, path))
        return syscall(SYS_openat, folder, given, flags, mode);
    lock();
    uint64_t before = inode_of(path);
    int creates = (flags & O_CREAT) && !before, cuts = (flags & O_TRUNC) && before;
    int ends = creates || cuts ? verdict(creates ? CREATE : TRUNCATE) : 0;
    if (ends > 0 && !control->after) end();
    int file = ends < 0 ? -1 : syscall(SYS_openat, folder, given, flags, mode), why = errno;
    if (file >= 0 && creates) note(CREATE, path, "", inode_of(path), 0, 0, NULL, 0);
    if (file >= 0 && cuts) note(TRUNCATE, path, "", before, 0, 0, NULL, 0);
    if (ends > 0) end();
    pthread_mutex_unlock(&control->lock);
    errno = why;
    return file;
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* The C library's own files open by themselves: the file is made first, so that it is seen. */
static void made_for(const char *path, const char *mode) {
    if (!control || mode[0] == 'r') return;
    int file = opened(AT_FDCWD, path, O_CREAT | O_WRONLY | (mode[0] == 'w' ? O_TRUNC : 0), 0666);
    if (file >= 0) syscall(SYS_close, file);
}
FILE *fopen(const char *path, const char *mode) { made_for(path, mode); return REAL(fopen)(path, mode); }
FILE *fopen64(const char *path, const char *mode) { made_for(path, mode); return REAL(fopen64)(path, mode); }

/* offset < 0: where the descriptor stands. */
static ssize_t written(int file, const struct iovec *parts, int count, off_t offset) {
    char path[PATH_MAX];
    if (!control || !of_descriptor(file, path))
        return offset < 0 ? syscall(SYS_writev, file, parts, count) : syscall(SYS_pwritev, file, parts, count, offset, 0);
    BEGIN(WRITE)
    struct stat status;
    fstat(file, &status);
    off_t at = offset;
    if (offset < 0) at = fcntl(file, F_GETFL) & O_APPEND ? status.st_size : syscall(SYS_lseek, file, 0, SEEK_CUR);
    struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2};
    const struct iovec *these = ends ? &half : parts;  /* a death after the operation leaves the half of a write */
    int many = ends ? 1 : count;
    ssize_t done = offset < 0 ? syscall(SYS_writev, file, these, many) : syscall(SYS_pwritev, file, these, many, offset, 0);
    if (done > 0) note(WRITE, path, "", status.st_ino, at, done, these, many);
    END
    return done;
}
ssize_t write(int file, const void *from, size_t bytes) {
    struct iovec part = {(void *)from, bytes};
    char path[PATH_MAX];
    if (!control || !of_descriptor(file, path)) return syscall(SYS_write, file, from, bytes);
    return written(file, &part, 1, -1);
}
/* NumPy's arrays; the C library would write them unseen. */
size_t fwrite(const void *from, size_t size, size_t count, FILE *stream) {
    char path[PATH_MAX];
    if (!control || !of_descriptor(fileno(stream), path)) return REAL(fwrite)(from, size, count, stream);
    fflush(stream);
    size_t done = 0;
    while (done < size * count) {
        ssize_t more = write(fileno(stream), (const char *)from + done, size * count - done);
        if (more < 0) return done / size;
        done += more;
    }
    int why = errno;
    fseeko(stream, lseek(fileno(stream), 0, SEEK_CUR), SEEK_SET);
    errno = why;
    return count;
}
ssize_t pwrite(int file, const void *from, size_t bytes, off_t offset) {
    struct iovec part = {(void *)from, bytes};
    return written(file, &part, 1, offset);
}
ssize_t pwrite64(int file, const void *from, size_t bytes, off64_t offset) { return pwrite(file, from, bytes, offset); }
ssize_t writev(int file, const struct iovec *parts, int count) { return written(file, parts, count, -1); }

/* Refused, so that those who copy fall back to reading and writing. */
ssize_t sendfile(int to, int from, off_t *offset, size_t bytes) {
    char path[PATH_MAX];
    if (control && of_descriptor(to, path)) { errno = EINVAL; return -1; }
    return syscall(SYS_sendfile, to, from, offset, bytes);
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t bytes) { return sendfile(to, from, offset, bytes); }
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *there, size_t bytes, unsigned flags) {
    char path[PATH_MAX];
    if (control && of_descriptor(to, path)) { errno = EXDEV; return -1; }
    return syscall(SYS_copy_file_range, from, at, to, there, bytes, flags);
}

static int cut(int file, off_t bytes) {
    char path[PATH_MAX];
    if (!control || !of_descriptor(file, path)) return syscall(SYS_ftruncate, file, bytes);
    BEGIN(TRUNCATE)
    struct stat status;
    fstat(file, &status);
    int done = syscall(SYS_ftruncate, file, bytes);
    if (!done) note(TRUNCATE, path, "", status.st_ino, bytes, 0, NULL, 0);
    END
    return done;
}
int ftruncate(int file, off_t bytes) { return cut(file, bytes); }
int ftruncate64(int file, off64_t bytes) { return cut(file, bytes); }

static int synced(int file, long call) {
    char path[PATH_MAX];
    if (!control || !of_descriptor(file, path)) return syscall(call, file);
    BEGIN(SYNC)
    struct stat status;
    fstat(file, &status);
    note(SYNC, path, "", status.st_ino, 0, 0, NULL, 0);  /* nothing has to reach a disk here: the log says what would */
    int done = 0;
    END
    return done;
}
int fsync(int file) { return synced(file, SYS_fsync); }
int fdatasync(int file) { return synced(file, SYS_fdatasync); }

static int renamed(int folder, const char *from, int other, const char *to, unsigned flags) {
    char old[PATH_MAX], new[PATH_MAX];
    if (!control || !absolute(folder, from, old) || !absolute(other, to, new))
        return syscall(SYS_renameat2, folder, from, other, to, flags);
    BEGIN(RENAME)
    uint64_t inode = inode_of(old);
    int done = syscall(SYS_renameat2, folder, from, other, to, flags);
    if (!done) note(RENAME, old, new, inode, 0, 0, NULL, 0);
    END
    return done;
}
int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int folder, const char *from, int other, const char *to) { return renamed(folder, from, other, to, 0); }
int renameat2(int folder, const char *from, int other, const char *to, unsigned flags) {
    return renamed(folder, from, other, to, flags);
}

static int removed(int folder, const char *given, int flags) {
    char path[PATH_MAX];
    if (!control || !absolute(folder, given, path)) return syscall(SYS_unlinkat, folder, given, flags);
    uint32_t kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    BEGIN(kind)
    int done = syscall(SYS_unlinkat, folder, given, flags);
    if (!done) note(kind, path, "", 0, 0, 0, NULL, 0);
    END
    return done;
}
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int folder, const char *path, int flags) { return removed(folder, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

static int made(int folder, const char *given, mode_t mode) {
    char path[PATH_MAX];
    if (!control || !absolute(folder, given, path) || inode_of(path)) return syscall(SYS_mkdirat, folder, given, mode);
    BEGIN(MKDIR)
    int done = syscall(SYS_mkdirat, folder, given, mode);
    if (!done) note(MKDIR, path, "", inode_of(path), 0, 0, NULL, 0);
    END
    return done;
}
int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return made(folder, path, mode); }

/* The clock on the wall; the one that measures durations is left alone. */
int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = syscall(SYS_clock_gettime, clock, now);
    if (control && !done && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += control->offset;
    return done;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int done = syscall(SYS_gettimeofday, now, zone);
    if (control && !done) now->tv_sec += control->offset;
    return done;
}
time_t time(time_t *to) {
    time_t now = syscall(SYS_time, NULL) + (control ? control->offset : 0);
    if (to) *to = now;
    return now;
}
