/* A library for LD_PRELOAD that shifts the time of day, and nothing else, by $SKEW_S seconds.
 *
 * Durations and monotonic clocks stay true. Waits until a time of day (sem_timedwait and
 * pthread_cond_timedwait) are shifted back, so that they end when the program meant them to. The times
 * of files are the kernel's and are not shifted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* No machine has been up for thirty years: what is later is a time of day, not a monotonic time. */
#define EARLIEST_TIME_OF_DAY_S 1000000000

static long skew_s(void) {
    static int known;
    static long value;
    if (!known) {
        const char *text = getenv("SKEW_S");
        value = text ? atol(text) : 0;
        known = 1;
    }
    return value;
}

static struct timespec true_time(const struct timespec *shown) {
    struct timespec result = *shown;
    if (result.tv_sec > EARLIEST_TIME_OF_DAY_S)
        result.tv_sec -= skew_s();
    return result;
}

int clock_gettime(clockid_t clock, struct timespec *result) {
    int failed = (int)syscall(SYS_clock_gettime, clock, result);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        result->tv_sec += skew_s();
    return failed;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, result, zone);
    if (!failed)
        result->tv_sec += skew_s();
    return failed;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    int (*real)(sem_t *, const struct timespec *);
    *(void **)&real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec then = true_time(until);
    return real(semaphore, &then);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec then = true_time(until);
    return real(condition, mutex, &then);
}
