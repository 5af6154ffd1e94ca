/* Times the sockets alone: the lower bound for a sum over loopback UDP.
 *
 *     cc -O3 -march=native -pthread -o loopback_floor loopback_floor.c
 *     ./loopback_floor --world 2 --bytes 100000000
 *
 * Every rank sends its array to the shards, in datagrams that hold one window each; a shard adds
 * up the ranks' windows and multicasts the sum; every rank receives it into its array. The bytes
 * take the same path as with racksum. Nothing else happens: there is no search for blocks of zeros,
 * no retransmission and no join. A header holds only the index of a window and a rank. So the sums
 * are not reliable, and the program fails if a datagram is lost.
 *
 * Timing, data, output and commands are those of README.md beside this file; only `go` and `quit`
 * are understood.
 */
#define _GNU_SOURCE

#include <arpa/inet.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WINDOW = 61440, LARGEST = 65536, AHEAD = 8, SLOTS = 4 * AHEAD, MAX_SHARDS = 4 };
enum { MAX_WORLD = 64, PERIOD = 7, LINE_BYTES = 256, SOCKET_BUFFER = 32 << 20 };
enum { STATUS_FAILED = 1, STATUS_BAD_CASE = 2 };
enum { LOST_MS = 10000, PREFETCH = 2048, LINE = 64 };

/* The header of a datagram. */
struct header {
    uint32_t window;
    uint32_t rank;
};

enum verb { VERB_GO, VERB_QUIT };

/* The memory that all processes share. */
struct shared {
    pthread_barrier_t barrier;
    enum verb verb;
    int64_t start_ns[MAX_WORLD];
    int64_t end_ns[MAX_WORLD];
};

/* The contributions of one window at a shard. */
struct slot {
    unsigned char *contribution[MAX_WORLD];
    int count;
};

static int64_t bytes = 100000000, seed = 1, iterations = 10, warmup = 2;
static int world = 2, shards = 2;
static bool bf16, interactive, is_rank;
static struct shared *shared;
static int shard_socket[MAX_SHARDS];
static struct sockaddr_in shard_addr[MAX_SHARDS], group;

/* Ends all processes: a rank kills its parent, and all ranks end with the parent. */
static void leave(int status, const char *why)
{
    printf("{\"peer\": \"floor\", \"error\": \"%s\"}\n", why);
    fflush(stdout);
    fprintf(stderr, "loopback_floor: %s\n", why);
    if (is_rank)
        kill(getppid(), SIGKILL);
    _exit(status);
}

static void fail(const char *why)
{
    leave(STATUS_FAILED, why);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- Arithmetic ---- */

static float load(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounds to nearest, ties to even. The data hold no NaN. */
static uint16_t store(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void encode(const float *restrict from, uint16_t *restrict to, int64_t elements)
{
    for (int64_t i = 0; i < elements; i += LINE) {
        int64_t end = i + LINE < elements ? i + LINE : elements;
        for (int64_t line = 0; line < 4; line++)
            __builtin_prefetch((const char *)(from + i) + PREFETCH + line * LINE);
        for (int64_t k = i; k < end; k++)
            to[k] = store(from[k]);
    }
}

static void decode(const uint16_t *restrict from, float *restrict to, int64_t elements)
{
    for (int64_t i = 0; i < elements; i += LINE) {
        int64_t end = i + LINE < elements ? i + LINE : elements;
        for (int64_t line = 0; line < 4; line++)
            __builtin_prefetch((char *)(to + i) + PREFETCH + line * LINE, 1);
        for (int64_t k = i; k < end; k++)
            to[k] = load(from[k]);
    }
}

/* Adds up the windows of a slot. A buffer has room for a full window, which is a whole number of
 * lines. So a short window is folded with the bytes that follow it, whose sums are not sent. */
static void fold(const struct slot *slot, unsigned char *sum)
{
    float lane[LINE];
    int64_t elements = WINDOW / (bf16 ? 2 : 4);
    for (int64_t i = 0; i < elements; i += LINE) {
        for (int r = 0; r < world; r++) {
            const unsigned char *body = slot->contribution[r] + sizeof(struct header);
            const uint16_t *half = (const uint16_t *)body + i;
            const float *full = (const float *)body + i;
            for (int k = 0; k < LINE; k++) {
                float x = bf16 ? load(half[k]) : full[k];
                lane[k] = r == 0 ? x : lane[k] + x;
            }
        }
        for (int k = 0; k < LINE; k++) {
            if (bf16)
                ((uint16_t *)sum)[i + k] = store(lane[k]);
            else
                ((float *)sum)[i + k] = lane[k];
        }
    }
}

/* ---- Sockets ---- */

static int open_socket(struct sockaddr_in *at)
{
    int fd = socket(AF_INET, SOCK_DGRAM, 0), one = 1, size = SOCKET_BUFFER;
    socklen_t len = sizeof *at;
    if (fd < 0)
        fail("cannot create a socket");
    /* Force the size where this is allowed: otherwise some kernels grant too little, and the loss
     * of a datagram ends the program. */
    if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size) != 0)
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) != 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)at, len) != 0 ||
        getsockname(fd, (struct sockaddr *)at, &len) != 0)
        fail("cannot bind a socket");
    return fd;
}

static void await(int fd)
{
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    if (poll(&readable, 1, LOST_MS) == 0)
        fail("a datagram was lost: the socket buffers are too small, or the shards are too slow");
}

static void open_shards(void)
{
    struct in_addr loopback = {htonl(INADDR_LOOPBACK)};
    for (int s = 0; s < shards; s++) {
        shard_addr[s] = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr = loopback};
        shard_socket[s] = open_socket(&shard_addr[s]);
        setsockopt(shard_socket[s], IPPROTO_IP, IP_MULTICAST_IF, &loopback, sizeof loopback);
    }
    /* Choose a multicast group for this process, and a free port, which all ranks then bind. */
    group.sin_family = AF_INET;
    group.sin_addr.s_addr = htonl(0xefff0000u | (uint32_t)getpid() % 0xffff);
    close(open_socket(&group));
}

static int join_group(void)
{
    struct sockaddr_in at = group;
    int fd = open_socket(&at), no = 0;
    struct ip_mreq member = {group.sin_addr, {htonl(INADDR_LOOPBACK)}};
    if (setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &member, sizeof member) != 0)
        fail("cannot join the multicast group");
    setsockopt(fd, IPPROTO_IP, IP_MULTICAST_ALL, &no, sizeof no);
    return fd;
}

/* ---- A shard ---- */

static void *take_memory(size_t size)
{
    void *memory = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    if (memory == NULL)
        fail("there is not enough memory");
    memset(memory, 0, size);
    return memory;
}

static void *run_shard(void *argument)
{
    int fd = *(int *)argument;
    struct slot *slots = take_memory(SLOTS * sizeof *slots);
    int spares = SLOTS * world + 1;
    unsigned char **spare = take_memory((size_t)spares * sizeof *spare);
    for (int i = 0; i < spares; i++)
        spare[i] = take_memory(LARGEST);
    unsigned char *sum = take_memory(LARGEST);
    for (;;) {
        ssize_t length = recv(fd, spare[spares - 1], LARGEST, MSG_DONTWAIT);
        if (length < 0) {
            struct pollfd readable = {.fd = fd, .events = POLLIN};
            poll(&readable, 1, -1);
            continue;
        }
        unsigned char *buffer = spare[--spares];
        const struct header *header = (const struct header *)buffer;
        struct slot *slot = &slots[header->window / (uint32_t)shards % SLOTS];
        slot->contribution[header->rank] = buffer;
        if (++slot->count < world)
            continue;
        memcpy(sum, header, sizeof *header);
        fold(slot, sum + sizeof *header);
        for (int r = 0; r < world; r++)
            spare[spares++] = slot->contribution[r];
        slot->count = 0;
        if (sendto(fd, sum, (size_t)length, 0, (struct sockaddr *)&group, sizeof group) != length)
            fail("cannot send a sum");
    }
    return NULL;
}

/* ---- A rank ---- */

struct rank {
    uint32_t rank;
    int tx, rx;
    float *array, *original;
    unsigned char *buffer;
};

/* The number of elements in a full window, and in the window with this index. */
static int64_t window_elements(void) { return WINDOW / (bf16 ? 2 : 4); }
static int64_t elements_of(int64_t window)
{
    int64_t rest = bytes / 4 - window * window_elements();
    return rest < window_elements() ? rest : window_elements();
}

static void send_window(struct rank *rank, int64_t window)
{
    struct header header = {(uint32_t)window, rank->rank};
    int64_t elements = elements_of(window);
    float *from = rank->array + window * window_elements();
    struct iovec parts[2] = {{&header, sizeof header}, {from, (size_t)elements * 4}};
    if (bf16) {
        encode(from, (uint16_t *)rank->buffer, elements);
        parts[1] = (struct iovec){rank->buffer, (size_t)elements * 2};
    }
    struct msghdr message = {.msg_name = &shard_addr[window % shards],
                             .msg_namelen = sizeof shard_addr[0], .msg_iov = parts,
                             .msg_iovlen = 2};
    if (sendmsg(rank->tx, &message, 0) < 0)
        fail("cannot send a window");
}

/* Receives a sum and returns true, or returns false if none has arrived. */
static bool receive_window(struct rank *rank)
{
    struct header header;
    if (recv(rank->rx, &header, sizeof header, MSG_PEEK | MSG_DONTWAIT) < (ssize_t)sizeof header)
        return false;
    int64_t elements = elements_of(header.window);
    float *to = rank->array + (int64_t)header.window * window_elements();
    struct iovec parts[2] = {{&header, sizeof header}, {to, (size_t)elements * 4}};
    if (bf16)
        parts[1] = (struct iovec){rank->buffer, (size_t)elements * 2};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (recvmsg(rank->rx, &message, MSG_DONTWAIT) < 0)
        fail("cannot receive a sum");
    if (bf16)
        decode((const uint16_t *)rank->buffer, to, elements);
    return true;
}

static void iterate(struct rank *rank)
{
    int64_t windows = (bytes / 4 + window_elements() - 1) / window_elements();
    memcpy(rank->array, rank->original, (size_t)bytes);
    pthread_barrier_wait(&shared->barrier);
    shared->start_ns[rank->rank] = now_ns();
    for (int64_t sent = 0, got = 0; got < windows;) {
        for (; sent < windows && sent - got < AHEAD * shards; sent++)
            send_window(rank, sent);
        if (receive_window(rank))
            got++;
        else
            await(rank->rx);
    }
    shared->end_ns[rank->rank] = now_ns();
    pthread_barrier_wait(&shared->barrier);
}

static float value(int of_rank, int64_t index)
{
    return (float)(1 + (index + 3 * of_rank + seed) % PERIOD);
}

static void check(const struct rank *rank)
{
    float expected[PERIOD] = {0};
    for (int i = 0; i < PERIOD; i++)
        for (int r = 0; r < world; r++)
            expected[i] += value(r, i);
    for (int i = 0; i < PERIOD; i++)
        expected[i] = bf16 ? load(store(expected[i])) : expected[i];
    for (int64_t i = 0; i < bytes / 4; i++)
        if (rank->array[i] != expected[i % PERIOD])
            fail("the first sum is wrong");
}

static void run_rank(uint32_t nth)
{
    is_rank = true;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct sockaddr_in anywhere = {.sin_family = AF_INET,
                                   .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct rank rank = {.rank = nth, .tx = open_socket(&anywhere), .rx = join_group(),
                        .array = take_memory((size_t)bytes),
                        .original = take_memory((size_t)bytes),
                        .buffer = take_memory(LARGEST)};
    for (int64_t i = 0; i < bytes / 4; i++)
        rank.original[i] = value((int)nth, i);
    pthread_barrier_wait(&shared->barrier);
    for (bool first = true;; first = false) {
        pthread_barrier_wait(&shared->barrier);
        if (shared->verb == VERB_QUIT)
            _exit(0);
        iterate(&rank);
        if (first)
            check(&rank);
    }
}

/* ---- All processes ---- */

/* Makes the ranks run one iteration; returns the ns from the first start to the last end. */
static int64_t go(int64_t *start, int64_t *end)
{
    shared->verb = VERB_GO;
    for (int meeting = 0; meeting < 3; meeting++)
        pthread_barrier_wait(&shared->barrier);
    *start = INT64_MAX, *end = 0;
    for (int r = 0; r < world; r++) {
        *start = shared->start_ns[r] < *start ? shared->start_ns[r] : *start;
        *end = shared->end_ns[r] > *end ? shared->end_ns[r] : *end;
    }
    return *end - *start;
}

static void start(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t attributes;
    if (shared == MAP_FAILED || pthread_barrierattr_init(&attributes) != 0)
        fail("there is not enough memory");
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, (unsigned)world + 1);
    open_shards();
    for (int r = 0; r < world; r++) {
        pid_t child = fork();
        if (child < 0)
            fail("cannot start a rank");
        if (child == 0)
            run_rank((uint32_t)r);
    }
    for (int s = 0; s < shards; s++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run_shard, &shard_socket[s]) != 0)
            fail("cannot start a shard");
    }
    pthread_barrier_wait(&shared->barrier);
}

static void obey(void)
{
    char line[LINE_BYTES];
    int64_t start_ns, end_ns;
    while (fgets(line, sizeof line, stdin) != NULL && strcmp(line, "quit\n") != 0) {
        if (strcmp(line, "go\n") != 0)
            leave(STATUS_BAD_CASE, "unknown command; use go or quit");
        int64_t span = go(&start_ns, &end_ns);
        printf("{\"us\": %.3f, \"start_ns\": %" PRId64 ", \"end_ns\": %" PRId64 "}\n",
               (double)span / 1000.0, start_ns, end_ns);
        fflush(stdout);
    }
}

static void parse_options(int argc, char **argv)
{
    struct { const char *name; int64_t *number; } options[] = {
        {"--bytes", &bytes}, {"--seed", &seed}, {"--iters", &iterations}, {"--warmup", &warmup}};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--interactive") == 0) {
            interactive = true;
            continue;
        }
        const char *name = argv[i], *text = ++i < argc ? argv[i] : "";
        bool is_bf16 = strcmp(text, "bf16") == 0;
        if (strcmp(name, "--wire") == 0 && (is_bf16 || strcmp(text, "f32") == 0)) {
            bf16 = is_bf16;
            continue;
        }
        char *end;
        int64_t number = strtoll(text, &end, 10);
        bool known = *text != '\0' && *end == '\0' && number >= 1;
        size_t k = 0;
        while (k < 4 && strcmp(name, options[k].name) != 0)
            k++;
        if (known && k < 4)
            *options[k].number = number;
        else if (known && strcmp(name, "--world") == 0 && number <= MAX_WORLD)
            world = (int)number;
        else if (known && strcmp(name, "--shards") == 0 && number <= MAX_SHARDS)
            shards = (int)number;
        else
            leave(STATUS_BAD_CASE,
                  "an option or its value is invalid; see benches/peers/README.md");
    }
    if (bytes % 4 != 0)
        leave(STATUS_BAD_CASE, "--bytes must be a multiple of 4");
}

int main(int argc, char **argv)
{
    parse_options(argc, argv);
    start();
    int64_t from, to;
    for (int64_t i = 0; i < warmup; i++)
        go(&from, &to);
    const char *wire = bf16 ? "bf16" : "f32";
    if (interactive) {
        printf("{\"ready\": true, \"peer\": \"floor\", \"world\": %d, \"bytes\": %" PRId64
               ", \"wire\": \"%s\", \"checked\": true}\n", world, bytes, wire);
        fflush(stdout);
        obey();
    } else {
        printf("{\"peer\": \"floor\", \"world\": %d, \"bytes\": %" PRId64 ", \"wire\": \"%s\", "
               "\"times_us\": [", world, bytes, wire);
        for (int64_t i = 0; i < iterations; i++)
            printf("%s%.3f", i == 0 ? "" : ", ", (double)go(&from, &to) / 1000.0);
        printf("], \"checked\": true}\n");
    }
    fflush(stdout);
    shared->verb = VERB_QUIT;
    pthread_barrier_wait(&shared->barrier);
    while (wait(NULL) > 0)
        continue;
    return 0;
}
