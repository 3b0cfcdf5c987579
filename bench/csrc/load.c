/* Load generator: requests over many kept connections, from one thread.

   load PORT BODIES CONNECTIONS REQUESTS [RATE SEED]   POST /v1/chat/completions
   load PORT GET PATH CONNECTIONS REQUESTS [RATE SEED]
   load PORT KEEP BODIES CONNECTIONS REQUESTS          each connection has its own part of them
   load PORT HOLD BODIES STREAMS

   BODIES is a file of bodies, each after its length (32 bits, little endian), used in order; with
   KEEP, of N connections the first one sends the first body and every Nth after it. Without
   RATE the loop is closed: a connection sends its next request when it got its answer. With RATE it
   is open: requests arrive in a Poisson process of RATE per second that follows from SEED, on more
   connections when all are busy, and their time runs from when they were due. HOLD opens streams,
   says "held" once each brought an event, and ends with its standard input. Every line there is
   answered with one of JSON: how many events came since the one before, and quantiles of the time
   that each took from when the stub sent it.

   Prints one line of JSON: counts, wall time and quantiles of the latency in microseconds. */
#include "wire.h"

#include <math.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/uio.h>

enum { EVENTS = 256, READ_BYTES = 1 << 18, HEAD_BYTES = 8192, MOST_CONNECTIONS = 1 << 16 };
enum { PATIENCE_S = 180, STREAMS_AT_ONCE = 16, MOST_DELAY_US = 1 << 22 };
enum State { IDLE, HEAD, SIZED, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, LAST_LINE };

typedef struct {
    int fd, is_ready, is_plain; /* is_plain: status 200 */
    enum State state;
    char head[HEAD_BYTES];
    size_t head_length;
    uint64_t left; /* bytes of the body or of the chunk */
    char size_text[20], last;
    size_t size_length, stamp_length; /* stamp_length: bytes of an event's time that came */
    int64_t stamp_us;
    char request[256];
    struct iovec out[2];
    int64_t due_us, events;
    const char *own; /* the next body, with KEEP */
} Connection;

static int epoll, port;
static const char *path = "/v1/chat/completions";
static const char *bodies, *bodies_end;
static Connection *connections[MOST_CONNECTIONS];
static int opened, idle_count, is_hold, is_keep, wide;
static Connection *idle[MOST_CONNECTIONS];
static int64_t *latencies, started, answered, failed, wanted;
static int64_t bytes_in, events_in, reads_in, event_reads, held;
static int64_t read_us;                      /* when the bytes at hand were read */
static uint32_t delays[MOST_DELAY_US + 1];   /* events by their microseconds on the way */
static int64_t delays_in, delay_most_us;
static double rate, next_due_us;
static uint64_t random_state;

/* Return the next exponential gap in microseconds (splitmix64). */
static double gap_us(void) {
    uint64_t value = (random_state += 0x9E3779B97F4A7C15u);
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    double uniform = (double)((value ^ (value >> 31)) >> 11) / 9007199254740992.0;
    return -log1p(-uniform) * 1e6 / rate;
}

/* Map the file of bodies. */
static void map(const char *name) {
    struct stat about;
    int fd = open(name, O_RDONLY);
    if (fd < 0 || fstat(fd, &about)) die(name);
    bodies = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
    if (bodies == MAP_FAILED) die(name);
    bodies_end = bodies + about.st_size;
    close(fd);
}

/* Connect to the proxy. */
static void dial(Connection *connection) {
    struct sockaddr_in address = loopback(port);
    connection->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(connection->fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    fcntl(connection->fd, F_SETFL, O_NONBLOCK);
    set_nodelay(connection->fd);
    watch(epoll, EPOLL_CTL_ADD, connection->fd, EPOLLIN, connection);
}

/* Return a new idle connection. */
static Connection *new_connection(void) {
    Connection *connection = calloc(1, sizeof *connection);
    if (!connection || opened == MOST_CONNECTIONS) die("connections");
    connections[opened++] = connection;
    dial(connection);
    return connection;
}

/* Send what is left of the request. */
static void send_on(Connection *connection) {
    struct msghdr message = {.msg_iov = connection->out, .msg_iovlen = 2};
    while (connection->out[0].iov_len + connection->out[1].iov_len) {
        ssize_t sent = sendmsg(connection->fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) {
            watch(epoll, EPOLL_CTL_MOD, connection->fd, EPOLLIN | EPOLLOUT, connection);
            return;
        }
        if (sent < 0) return; /* the close is read */
        for (int at = 0; at < 2; at++) {
            size_t taken = (size_t)sent < connection->out[at].iov_len ? (size_t)sent
                                                                      : connection->out[at].iov_len;
            connection->out[at].iov_base = (char *)connection->out[at].iov_base + taken;
            connection->out[at].iov_len -= taken;
            sent -= (ssize_t)taken;
        }
    }
}

/* Return where the body after this one is. */
static const char *after(const char *body) {
    uint32_t length;
    memcpy(&length, body, sizeof length);
    return body + sizeof length + length;
}

/* Begin the next request on an idle connection. */
static void begin(Connection *connection, int64_t due_us) {
    uint32_t length = 0;
    const char **next = is_keep ? &connection->own : &bodies;
    if (bodies) {
        if (*next >= bodies_end) die("more requests than bodies");
        memcpy(&length, *next, sizeof length);
        connection->out[1] = (struct iovec){(void *)(*next + sizeof length), length};
        for (int each = is_keep ? wide : 1; each-- && *next < bodies_end;) *next = after(*next);
    }
    const char *form = bodies ? "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                                "Content-Type: application/json\r\nAccept: */*\r\n"
                                "User-Agent: bench\r\nContent-Length: %u\r\n\r\n"
                              : "GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n";
    int head = snprintf(connection->request, sizeof connection->request, form, path, port, length);
    connection->out[0] = (struct iovec){connection->request, (size_t)head};
    connection->state = HEAD;
    connection->head_length = 0;
    connection->events = 0;
    connection->last = 0;
    connection->stamp_length = 0;
    connection->due_us = due_us;
    started++;
    send_on(connection);
}

/* Note the end of an answer and go on. */
static void finish(Connection *connection, int is_good) {
    if (is_good) latencies[answered++] = now_us() - connection->due_us;
    failed += !is_good;
    connection->state = IDLE;
    if (rate > 0 || started == wanted || (is_keep && connection->own >= bodies_end)) {
        idle[idle_count++] = connection;
    } else {
        begin(connection, now_us());
    }
}

/* Open a connection again that the proxy closed. */
static void redial(Connection *connection) {
    int was_busy = connection->state != IDLE;
    close(connection->fd);
    dial(connection);
    if (was_busy) finish(connection, 0);
}

/* Take one more byte of an event: it may be of its time. */
static void take_stamp(Connection *connection, char byte) {
    size_t name = sizeof STAMP - 1, at = connection->stamp_length;
    if (at < name) {
        connection->stamp_length = byte == STAMP[at] ? at + 1 : byte == STAMP[0];
        connection->stamp_us = 0;
    } else {
        connection->stamp_us = connection->stamp_us * 10 + (byte - '0');
        if (++connection->stamp_length < name + STAMP_DIGITS) return;
        connection->stamp_length = 0;
        int64_t delay_us = read_us - connection->stamp_us;
        delays[delay_us < 0 ? 0 : delay_us < MOST_DELAY_US ? delay_us : MOST_DELAY_US]++;
        delay_most_us = delay_us > delay_most_us ? delay_us : delay_most_us;
        delays_in++;
    }
}

/* Count the events whose last byte is in `data`. */
static void count_events(Connection *connection, const char *data, size_t length) {
    for (size_t at = 0; at < length; at++) {
        if (is_hold) take_stamp(connection, data[at]);
        if (data[at] == '\n' && connection->last == '\n') {
            held += !connection->events++;
            events_in++;
        }
        connection->last = data[at];
    }
}

/* Return the delay that this part of the events had at most. */
static int64_t delay_us(double part) {
    int64_t before = 0, wanted_in = (int64_t)ceil(part * (double)delays_in);
    for (int64_t at = 0; at <= MOST_DELAY_US; at++)
        if ((before += delays[at]) >= wanted_in) return at;
    return MOST_DELAY_US;
}

/* Answer a line on standard input, and begin anew; its end is the end of the run. Returns whether
   there was a line. */
static int tell_delays(void) {
    char line[64];
    if (read(STDIN_FILENO, line, sizeof line) <= 0) return 0;
    printf("{\"events\":%lld,\"p50_us\":%lld,\"p99_us\":%lld,\"p999_us\":%lld,\"most_us\":%lld}\n",
           (long long)delays_in, (long long)delay_us(0.5), (long long)delay_us(0.99),
           (long long)delay_us(0.999), (long long)delay_most_us);
    fflush(stdout);
    memset(delays, 0, sizeof delays);
    delays_in = delay_most_us = 0;
    return 1;
}

/* Take bytes of the head; begin the body once it is whole. Returns the bytes used. */
static size_t take_head(Connection *connection, const char *data, size_t length) {
    size_t before = connection->head_length;
    size_t room = HEAD_BYTES - before, taken = length < room ? length : room;
    memcpy(connection->head + before, data, taken);
    size_t head = head_bytes(connection->head, before + taken);
    connection->head_length += taken;
    if (!head) {
        if (connection->head_length == HEAD_BYTES) die("a head of more than 8 KiB");
        return taken;
    }
    connection->is_plain = !strncmp(connection->head + 8, " 200", 4);
    if (!connection->is_plain)
        fprintf(stderr, "answer: %.12s %.*s\n", connection->head, (int)(before + length - head),
                data + (head - before));
    const char *told = header_value(connection->head, head, "content-length:");
    connection->left = told ? strtoull(told, NULL, 10) : 0;
    connection->size_length = 0;
    connection->state = told ? SIZED : CHUNK_SIZE;
    if (!told && !header_value(connection->head, head, "transfer-encoding:")) die("a body without length");
    if (told && !connection->left) finish(connection, connection->is_plain);
    return head - before;
}

/* Take bytes of a body or of a chunk. Returns the bytes used. */
static size_t take_body(Connection *connection, const char *data, size_t length) {
    size_t taken = length < connection->left ? length : (size_t)connection->left;
    if (connection->state == CHUNK_DATA) count_events(connection, data, taken);
    connection->left -= taken;
    if (connection->left) return taken;
    if (connection->state == SIZED) {
        finish(connection, connection->is_plain);
    } else {
        connection->state = CHUNK_END;
        connection->left = 2;
    }
    return taken;
}

/* Take a chunk's size line, or the empty line after the last chunk. Returns the bytes used. */
static size_t take_line(Connection *connection, const char *data, size_t length) {
    const char *end = memchr(data, '\n', length);
    size_t taken = end ? (size_t)(end - data) + 1 : length;
    if (connection->size_length + taken >= sizeof connection->size_text) die("a long chunk size");
    memcpy(connection->size_text + connection->size_length, data, taken);
    connection->size_length += taken;
    connection->size_text[connection->size_length] = 0;
    if (!end) return taken;
    connection->size_length = 0;
    if (connection->state == LAST_LINE) {
        finish(connection, connection->is_plain);
        return taken;
    }
    connection->left = strtoull(connection->size_text, NULL, 16);
    connection->state = connection->left ? CHUNK_DATA : LAST_LINE;
    return taken;
}

/* Read what came. */
static void receive(Connection *connection) {
    static char data[READ_BYTES];
    ssize_t got = recv(connection->fd, data, sizeof data, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        redial(connection);
        return;
    }
    int64_t events_before = events_in;
    read_us = now_us();
    reads_in++;
    bytes_in += got;
    size_t length = (size_t)got;
    for (size_t at = 0; at < length;) {
        if (connection->state == IDLE) die("bytes after the answer");
        if (connection->state == HEAD) {
            at += take_head(connection, data + at, length - at);
        } else if (connection->state == CHUNK_SIZE || connection->state == LAST_LINE) {
            at += take_line(connection, data + at, length - at);
        } else if (connection->state == CHUNK_END) {
            size_t skip = length - at < connection->left ? length - at : (size_t)connection->left;
            at += skip;
            connection->left -= skip;
            if (!connection->left) connection->state = CHUNK_SIZE;
        } else {
            at += take_body(connection, data + at, length - at);
        }
    }
    event_reads += events_in > events_before;
}

/* Begin the requests that are due; have the timer ring for the next. */
static void arrive(int timer) {
    while (started < wanted && next_due_us <= (double)now_us()) {
        Connection *connection = idle_count ? idle[--idle_count] : new_connection();
        begin(connection, (int64_t)next_due_us);
        next_due_us += gap_us();
    }
    struct itimerspec at = {.it_value = {(time_t)(next_due_us / 1e6),
                                         (long)fmod(next_due_us, 1e6) * 1000}};
    if (started < wanted) timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
}

static int compare(const void *one, const void *other) {
    int64_t left = *(const int64_t *)one, right = *(const int64_t *)other;
    return (left > right) - (left < right);
}

/* Print the figures. */
static void report(int64_t wall_us) {
    qsort(latencies, (size_t)answered, sizeof *latencies, compare);
    int64_t last = answered ? answered - 1 : 0;
    printf("{\"answered\":%lld,\"failed\":%lld,\"wall_us\":%lld,\"bytes\":%lld,\"events\":%lld,"
           "\"reads\":%lld,\"event_reads\":%lld,\"connections\":%d,"
           "\"p50_us\":%lld,\"p99_us\":%lld,\"most_us\":%lld}\n",
           (long long)answered, (long long)failed, (long long)wall_us, (long long)bytes_in,
           (long long)events_in, (long long)reads_in, (long long)event_reads, opened,
           (long long)latencies[last / 2], (long long)latencies[last * 99 / 100],
           (long long)latencies[last]);
}

/* Begin more streams, few at a time, each on a connection that is as new: none waits until then. */
static void open_streams(void) {
    if (failed) die("a stream that was to be held failed");
    while (started < wanted && started - held < STREAMS_AT_ONCE) begin(new_connection(), now_us());
}

/* Run until all requests are answered, or, when streams are held, until the input ends. */
static void run(int timer) {
    struct epoll_event events[EVENTS];
    int is_told = 0;
    while (answered + failed < wanted) {
        int ready = epoll_wait(epoll, events, EVENTS, -1);
        for (int at = 0; at < ready; at++) {
            Connection *connection = events[at].data.ptr;
            if (!connection) {
                uint64_t rung;
                if (!is_hold && read(timer, &rung, sizeof rung) > 0) arrive(timer);
                if (is_hold && !tell_delays()) return;
                continue;
            }
            if (events[at].events & EPOLLOUT) {
                watch(epoll, EPOLL_CTL_MOD, connection->fd, EPOLLIN, connection);
                send_on(connection);
            }
            if (events[at].events & ~(uint32_t)EPOLLOUT) receive(connection);
        }
        if (is_hold) open_streams();
        if (is_hold && !is_told && held == wanted) {
            is_told = 1;
            alarm(0);
            printf("held\n");
            fflush(stdout);
        }
    }
}

int main(int count, char **words) {
    if (count < 5) die("usage: load PORT [GET PATH | BODIES] CONNECTIONS REQUESTS [RATE SEED]");
    port = atoi(words[1]);
    is_hold = !strcmp(words[2], "HOLD");
    is_keep = !strcmp(words[2], "KEEP");
    int is_get = !strcmp(words[2], "GET"), at = is_get || is_hold || is_keep ? 4 : 3;
    if (is_get) path = words[3];
    if (!is_get) map(words[at - 1]);
    wide = atoi(words[at]);
    wanted = is_hold || count <= at + 1 ? wide : atoll(words[at + 1]);
    if (count > at + 3) {
        rate = atof(words[at + 2]);
        random_state = strtoull(words[at + 3], NULL, 10);
    }
    latencies = calloc((size_t)wanted + 1, sizeof *latencies);
    if (!latencies || wide < 1 || wanted < wide) die("at least a request per connection");
    epoll = epoll_create1(0);
    int timer = is_hold ? STDIN_FILENO : timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    watch(epoll, EPOLL_CTL_ADD, timer, EPOLLIN, NULL);
    const char *own = bodies;
    for (int each = 0; each < wide && !is_hold; each++) {
        idle[idle_count++] = new_connection();
        if (!is_keep) continue;
        if (own >= bodies_end) die("fewer bodies than connections");
        idle[each]->own = own;
        own = after(own);
    }
    if (is_hold) alarm(PATIENCE_S);
    int64_t began_us = now_us();
    if (rate > 0) {
        next_due_us = (double)began_us + gap_us();
        arrive(timer);
    } else if (is_hold) {
        open_streams();
    } else {
        while (idle_count) begin(idle[--idle_count], now_us());
    }
    run(timer);
    report(now_us() - began_us);
    return 0;
}
