/* What the stub replica and the load generator share: clock, sockets, HTTP heads. Linux only. */
#ifndef WIRE_H
#define WIRE_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* What an event's time of sending stands behind, in so many digits. */
#define STAMP "\"sent_us\":\""
enum { STAMP_DIGITS = 15 };

/* End the process with what failed. */
static inline void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "wrong use");
    exit(1);
}

/* Return the monotonic clock in microseconds. */
static inline int64_t now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

/* Return a loopback address. */
static inline struct sockaddr_in loopback(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

/* Send small writes at once. */
static inline void set_nodelay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* Have epoll report `events` of `fd` with `data`. */
static inline void watch(int epoll, int operation, int fd, uint32_t events, void *data) {
    struct epoll_event event = {.events = events, .data.ptr = data};
    if (epoll_ctl(epoll, operation, fd, &event) < 0) die("epoll_ctl");
}

/* Return the bytes of a head with its blank line, 0 when it is not whole. */
static inline size_t head_bytes(const char *data, size_t length) {
    const char *end = memmem(data, length, "\r\n\r\n", 4);
    return end ? (size_t)(end - data) + 4 : 0;
}

/* Return the value of a header, NULL when it is missing; `name` is lower case with its colon. */
static inline const char *header_value(const char *head, size_t length, const char *name) {
    size_t name_length = strlen(name);
    const char *end = head + length;
    for (const char *at = memchr(head, '\n', length); at && at + 1 + name_length < end;
         at = memchr(at + 1, '\n', (size_t)(end - at - 1))) {
        if (strncasecmp(at + 1, name, name_length)) continue;
        const char *value = at + 1 + name_length;
        while (*value == ' ') value++;
        return value;
    }
    return NULL;
}

#endif
