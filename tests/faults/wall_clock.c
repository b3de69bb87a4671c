/* Moves the wall clock of one process, for LD_PRELOAD: CLOCK_REALTIME is off by the seconds in the file that WALL_CLOCK
   names (a long, mapped, so that a test may change it at any time). Waits until a wall-clock time move along, as they do
   when the clock of a machine is set. CLOCK_MONOTONIC is left alone, as the kernel leaves it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define WALL 1000000000L /* seconds: what is later is no time since boot */

static long nothing;
static volatile long *off = &nothing;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("WALL_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *map = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  if (map != MAP_FAILED) off = map;
  close(file);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t id, struct timespec *out) {
  static __typeof__(&clock_gettime) real;
  if (!real) real = REAL(clock_gettime);
  int failed = real(id, out);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) out->tv_sec += *off;
  return failed;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  (void)zone;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec, out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

static struct timespec moved(const struct timespec *until) {
  struct timespec real = *until;
  if (real.tv_sec > WALL) real.tv_sec -= *off;
  return real;
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict t) {
  static __typeof__(&pthread_cond_timedwait) real;
  if (!real) real = (__typeof__(real))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!real) real = REAL(pthread_cond_timedwait);
  struct timespec until = moved(t);
  return real(c, m, &until);
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict t) {
  static __typeof__(&sem_timedwait) real;
  if (!real) real = REAL(sem_timedwait);
  struct timespec until = moved(t);
  return real(s, &until);
}

long syscall(long number, ...) {
  static __typeof__(&syscall) real;
  if (!real) real = REAL(syscall);
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  struct timespec until;
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
    until = moved((const struct timespec *)a[3]);
    a[3] = (long)&until;
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
