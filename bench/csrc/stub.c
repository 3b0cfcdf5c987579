/* Stub replicas: as many as told, each on a port of its own, all in one thread.

   stub REPLICAS

   Prints the ports. A chat is answered at once, with an answer of about 1 KiB. A body that contains
   "pace-CHUNKS-GAP_US" (in any string) is answered with that many server-sent events, GAP_US apart;
   0 is back to back. Each event tells when it was sent, in microseconds of the monotonic clock
   ("sent_us"). Asked for the tokens of a chat (/render, as vLLM answers it), it makes one of every 4
   bytes. Every line on standard input is answered with the chats and events sent so far; its end is
   the end of the process.

   Streams wait in a heap, by when their next event is due: one that waits costs nothing, and its
   buffer is gone. */
#include "wire.h"

#include <poll.h>

enum { EVENTS = 256, READ_BYTES = 1 << 18, EVENT_BYTES = 200, ANSWER_BYTES = 1024 };
enum { TOKEN_BYTES = 4, VOCABULARY = 150000, ID_CHARS = 7, PATIENCE_MS = 2000 };

typedef struct Connection {
    int fd;
    int is_blocked;
    char *in;
    size_t length, room, sent; /* sent: of the event at hand */
    int64_t chunks_left, gap_us, due_us;
    int64_t stamp_us; /* of the event at hand, 0 before it was tried */
    size_t place;     /* in the heap, from 1 on; 0: not there */
} Connection;

static int epoll;
static Connection **heap; /* of those whose next event is due some time, from 1 on */
static size_t heap_count, heap_room;
static int64_t chats, events_sent;
static char answer[ANSWER_BYTES + 256], chunk[EVENT_BYTES + 16];
static size_t answer_length, chunk_length, stamp_at; /* stamp_at: of its digits in a chunk */
static const char STREAM[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    "Transfer-Encoding: chunked\r\n\r\n";
static const char END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char CHATS[] = "/v1/chat/completions", RENDER[] = "/v1/chat/completions/render";
static const char *const PAGES[][2] = {
    {"/health", ""},
    {"/v1/models",
     "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":0,"
     "\"owned_by\":\"vllm\",\"root\":\"bench\",\"max_model_len\":262144}]}"},
    {"/version", "{\"version\":\"0.10.0\"}"},
    {"/get_model_info", "{\"is_generation\":true}"}, /* no path: one peer would ask a hub for it */
    {"/model_info", "{\"is_generation\":true}"},
    {"/get_server_info", "{\"model_id\":\"bench\"}"},
    {"/server_info", "{\"model_id\":\"bench\"}"},
};

/* Write the answers that never change. */
static void prepare(void) {
    char body[ANSWER_BYTES + 1], event[EVENT_BYTES + 1];
    int length = snprintf(
        body, sizeof body,
        "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"bench\","
        "\"usage\":{\"prompt_tokens\":500,\"completion_tokens\":200,\"total_tokens\":700},"
        "\"choices\":[{\"index\":0,\"finish_reason\":\"stop\",\"message\":{\"role\":\"assistant\","
        "\"content\":\"%*s\"}}]}",
        ANSWER_BYTES - 250, "answer");
    answer_length = (size_t)sprintf(
        answer,
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", length,
        body);
    length = snprintf(
        event, sizeof event,
        "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,"
        "\"model\":\"bench\",\"sent_us\":\"%0*d\",\"choices\":[{\"index\":0,\"delta\":"
        "{\"content\":\"%*s\"}}]}\n\n",
        STAMP_DIGITS, 0, EVENT_BYTES - 135 - STAMP_DIGITS - 13, "token");
    chunk_length = (size_t)sprintf(chunk, "%x\r\n%s\r\n", (unsigned)length, event);
    stamp_at = (size_t)(strstr(chunk, STAMP) - chunk) + sizeof STAMP - 1;
}

/* Put a stream where it belongs, at `place` or nearer to the root or to the leaves. */
static void settle(Connection *one, size_t place) {
    for (; place > 1 && heap[place / 2]->due_us > one->due_us; place /= 2)
        (heap[place] = heap[place / 2])->place = place;
    for (size_t child; (child = 2 * place) <= heap_count; place = child) {
        if (child < heap_count && heap[child + 1]->due_us < heap[child]->due_us) child++;
        if (heap[child]->due_us >= one->due_us) break;
        (heap[place] = heap[child])->place = place;
    }
    (heap[place] = one)->place = place;
}

/* Have a stream's next event sent when it is due. */
static void enter(Connection *one) {
    if (heap_count + 1 >= heap_room) {
        heap_room = heap_room * 2 + 64;
        if (!(heap = realloc(heap, heap_room * sizeof *heap))) die("realloc");
    }
    settle(one, ++heap_count);
}

/* Take a stream off the heap, if it is there. */
static void leave(Connection *one) {
    size_t place = one->place;
    if (!place) return;
    one->place = 0;
    Connection *last = heap[heap_count--];
    if (last != one) settle(last, place);
}

/* Close a connection. */
static void drop(Connection *connection) {
    leave(connection);
    close(connection->fd);
    free(connection->in);
    free(connection);
}

/* Send all of an answer; a peer that does not take it is dropped. Returns whether it did. */
static int send_all(Connection *connection, const char *data, size_t length) {
    while (length) {
        ssize_t sent = send(connection->fd, data, length, MSG_NOSIGNAL);
        struct pollfd writable = {.fd = connection->fd, .events = POLLOUT};
        if (sent < 0 && (errno != EAGAIN || poll(&writable, 1, PATIENCE_MS) < 1)) return 0;
        data += sent > 0 ? sent : 0;
        length -= sent > 0 ? (size_t)sent : 0;
    }
    return 1;
}

/* Answer with the tokens of a chat: equal beginnings have equal tokens. */
static int answer_render(Connection *connection, const char *body, size_t length) {
    static char *page;
    static size_t room;
    size_t most = (length / TOKEN_BYTES + 1) * ID_CHARS + 512;
    if (most > room && !(page = realloc(page, room = most))) die("realloc");
    char *head = page, *ids = page + 256, *at = ids;
    at += sprintf(at, "{\"request_id\":\"r\",\"model\":\"bench\",\"token_ids\":[");
    for (size_t from = 0; from + TOKEN_BYTES <= length; from += TOKEN_BYTES) {
        uint32_t four, id;
        memcpy(&four, body + from, sizeof four);
        id = four * 2654435761u % VOCABULARY;
        char digits[ID_CHARS], *digit = digits;
        do *digit++ = (char)('0' + id % 10);
        while (id /= 10);
        if (from) *at++ = ',';
        while (digit > digits) *at++ = *--digit;
    }
    at += sprintf(at, "]}");
    int head_length = sprintf(
        head, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zd\r\n\r\n",
        at - ids);
    return send_all(connection, head, (size_t)head_length) &&
           send_all(connection, ids, (size_t)(at - ids));
}

/* Return whether a request line asks for `path`. */
static int asks(const char *request, const char *path) {
    const char *target = strchr(request, ' ');
    size_t length = strlen(path);
    return target && !strncmp(target + 1, path, length) && target[1 + length] == ' ';
}

/* Answer what is no chat: a page that never changes, or 404. */
static int answer_page(Connection *connection) {
    char page[1024];
    const char *body = NULL;
    for (size_t at = 0; at < sizeof PAGES / sizeof *PAGES; at++)
        if (asks(connection->in, PAGES[at][0])) body = PAGES[at][1];
    int length = snprintf(
        page, sizeof page,
        "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
        body ? "200 OK" : "404 Not Found", body ? strlen(body) : 0, body ? body : "");
    return send_all(connection, page, (size_t)length);
}

/* Answer a chat at once, or begin its stream. */
static int answer_chat(Connection *connection, const char *body, size_t length) {
    const char *pace = memmem(body, length, "pace-", 5);
    chats++;
    if (!pace) return send_all(connection, answer, answer_length);
    char *rest;
    connection->chunks_left = strtoll(pace + 5, &rest, 10);
    connection->gap_us = strtoll(rest + 1, NULL, 10);
    connection->due_us = now_us();
    if (connection->chunks_left < 1) return 0;
    enter(connection);
    return send_all(connection, STREAM, sizeof STREAM - 1);
}

/* Answer every whole request that came. Returns whether the connection stays. */
static int serve(Connection *connection) {
    size_t head;
    while (!connection->chunks_left && (head = head_bytes(connection->in, connection->length))) {
        const char *told = header_value(connection->in, head, "content-length:");
        size_t whole = head + (told ? strtoull(told, NULL, 10) : 0);
        if (connection->length < whole) return 1;
        const char *body = connection->in + head;
        int is_served = asks(connection->in, CHATS)    ? answer_chat(connection, body, whole - head)
                        : asks(connection->in, RENDER) ? answer_render(connection, body, whole - head)
                                                       : answer_page(connection);
        if (!is_served) return 0;
        connection->length -= whole;
        memmove(connection->in, connection->in + whole, connection->length);
    }
    if (connection->chunks_left && !connection->length) { /* nothing comes for long */
        free(connection->in);
        connection->in = NULL;
        connection->room = 0;
    }
    return 1;
}

/* Read what came. */
static void receive(Connection *connection) {
    if (connection->room - connection->length <= READ_BYTES) {
        connection->room = connection->room * 2 + 2 * READ_BYTES;
        connection->in = realloc(connection->in, connection->room);
        if (!connection->in) die("realloc");
    }
    ssize_t got = recv(connection->fd, connection->in + connection->length, READ_BYTES, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        drop(connection);
        return;
    }
    connection->length += (size_t)got;
    connection->in[connection->length] = 0; /* numbers are read up to here */
    if (!serve(connection)) drop(connection);
}

/* Write the time of an event into it. */
static void stamp(char *event, int64_t time_us) {
    for (char *digit = event + stamp_at + STAMP_DIGITS; digit-- > event + stamp_at; time_us /= 10)
        *digit = (char)('0' + time_us % 10);
}

/* Send the next event of a stream. Returns whether the stream goes on. */
static int send_event(Connection *connection) {
    char last[sizeof chunk + sizeof END];
    size_t length = chunk_length;
    memcpy(last, chunk, chunk_length);
    if (!connection->stamp_us) connection->stamp_us = now_us();
    stamp(last, connection->stamp_us);
    if (connection->chunks_left == 1) {
        memcpy(last + length, END, sizeof END - 1);
        length += sizeof END - 1;
    }
    size_t left = length - connection->sent;
    ssize_t sent = send(connection->fd, last + connection->sent, left, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return 0;
    if (sent < (ssize_t)left) {
        connection->sent += sent > 0 ? (size_t)sent : 0;
        connection->is_blocked = 1;
        watch(epoll, EPOLL_CTL_MOD, connection->fd, EPOLLIN | EPOLLOUT, connection);
        return 1;
    }
    /* Back to back they take turns: whoever sent last is due last. */
    connection->due_us = connection->gap_us ? connection->due_us + connection->gap_us : now_us();
    connection->sent = 0;
    connection->stamp_us = 0;
    events_sent++;
    return --connection->chunks_left > 0;
}

/* Send what is due now to every stream, one event each. Returns the milliseconds until the next is
   due, -1 for none. */
static int stream(void) {
    int64_t now = now_us();
    for (size_t most = heap_count; most && heap_count && heap[1]->due_us <= now; most--) {
        Connection *one = heap[1];
        int goes_on = send_event(one);
        if (goes_on && !one->is_blocked) {
            settle(one, one->place);
            continue;
        }
        leave(one);
        if (goes_on) continue;
        int is_whole = !one->chunks_left;
        one->chunks_left = 0;
        if (!is_whole || !serve(one)) drop(one);
    }
    if (!heap_count) return -1;
    return heap[1]->due_us <= now ? 0 : (int)((heap[1]->due_us - now + 999) / 1000);
}

/* Take a new connection. */
static void take(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
    if (fd < 0) return;
    set_nodelay(fd);
    Connection *connection = calloc(1, sizeof *connection);
    if (!connection) die("calloc");
    connection->fd = fd;
    watch(epoll, EPOLL_CTL_ADD, fd, EPOLLIN, connection);
}

/* Listen on a free port and return its socket. */
static int open_port(void) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in address = loopback(0);
    socklen_t length = sizeof address;
    if (bind(fd, (struct sockaddr *)&address, length) || listen(fd, 4096)) die("listen");
    getsockname(fd, (struct sockaddr *)&address, &length);
    printf("%d ", ntohs(address.sin_port));
    return fd;
}

/* Answer a line on standard input. */
static void tell(void) {
    char line[64];
    if (read(STDIN_FILENO, line, sizeof line) <= 0) exit(0);
    printf("%lld %lld\n", (long long)chats, (long long)events_sent);
    fflush(stdout);
}

int main(int count, char **words) {
    static Connection listeners[16], input;
    int replicas = count == 2 ? atoi(words[1]) : 0;
    if (replicas < 1 || replicas > 16) die("usage: stub REPLICAS (1 to 16)");
    prepare();
    epoll = epoll_create1(0);
    watch(epoll, EPOLL_CTL_ADD, STDIN_FILENO, EPOLLIN, &input);
    for (int at = 0; at < replicas; at++) {
        listeners[at].fd = open_port();
        watch(epoll, EPOLL_CTL_ADD, listeners[at].fd, EPOLLIN, &listeners[at]);
    }
    printf("\n");
    fflush(stdout);
    struct epoll_event events[EVENTS];
    while (1) {
        int timeout_ms = stream();
        int ready = epoll_wait(epoll, events, EVENTS, timeout_ms);
        for (int at = 0; at < ready; at++) {
            Connection *connection = events[at].data.ptr;
            if (connection == &input) {
                tell();
            } else if (connection >= listeners && connection < listeners + 16) {
                take(connection->fd);
            } else {
                if (connection->is_blocked && events[at].events & EPOLLOUT) {
                    connection->is_blocked = 0;
                    enter(connection);
                    watch(epoll, EPOLL_CTL_MOD, connection->fd, EPOLLIN, connection);
                }
                if (events[at].events & ~(uint32_t)EPOLLOUT) receive(connection);
            }
        }
    }
}
